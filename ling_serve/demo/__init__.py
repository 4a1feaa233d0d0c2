"""The bundled demo: a tiny trained Bailing V3 checkpoint in the official layout, and everything that made it."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Folder of the bundled model: config.json, model.safetensors, tokenizer files, chat template, generation defaults."""
