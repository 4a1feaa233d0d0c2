"""Bailing V3: its config, its layers over one packed batch, and its checkpoints."""
