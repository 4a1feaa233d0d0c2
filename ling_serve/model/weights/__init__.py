"""Checkpoint files: what they hold, how each parameter comes out of them, and what is refused."""
