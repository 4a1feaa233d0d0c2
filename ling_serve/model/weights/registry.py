"""The checkpoint formats that are read. A new one is a file with a function and a line here.

Formats mix: each parameter is taken from the first recipe whose tensors are all there in the right shapes.
"""

from __future__ import annotations

from ling_serve.model.weights.mlx_converted import mlx_converted
from ling_serve.model.weights.official import official
from ling_serve.model.weights.recipe import CheckpointFormat

FORMATS: tuple[CheckpointFormat, ...] = (official, mlx_converted)
