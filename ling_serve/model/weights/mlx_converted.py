"""The layout `mlx_lm.convert` writes: each parameter under its own name and in its own shape."""

from __future__ import annotations

from collections.abc import Iterator

from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.recipe import Recipe, Source, Target


def mlx_converted(target: Target, config: ModelConfig) -> Iterator[Recipe]:
    del config  # the model's own shapes say it all
    yield Recipe("", (Source(target.path, (target.shape,)),), lambda parts: parts[0])
