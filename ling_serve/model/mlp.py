"""The gated feed-forward block, and the clamped SwiGLU that experts share with it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from ling_kernels.exponential import silu

from ling_serve.model.joined import join, products
from ling_serve.model.projection import Projection

_INPUTS = (("gate_proj",), ("up_proj",))


def clamped_swiglu(gate: mx.array, up: mx.array, limit: float | None) -> mx.array:
    """min(silu(gate), limit) · clip(up, -limit, limit); no limit = silu(gate) · up. Same shape and dtype.

    Checkpoints trained with a limit answer wrongly without it; the clamp comes after SiLU, not before.
    """
    activated = silu(gate)
    if limit is None:
        return activated * up
    return mx.minimum(activated, limit) * mx.clip(up, -limit, limit)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) · up(x)): the dense block of the first layers, and the shared experts of the others."""

    def __init__(self, hidden_size: int, intermediate_size: int, limit: float | None) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size)
        self.up_proj = Projection(hidden_size, intermediate_size)
        self.down_proj = Projection(intermediate_size, hidden_size)
        self.limit = limit

    def __call__(self, x: mx.array) -> mx.array:
        """[N, hidden] → [N, hidden]."""
        gate, up = products(self, _INPUTS, x)
        return self.down_proj(clamped_swiglu(gate, up, self.limit))

    def fuse(self) -> None:
        """Rearrange float32 weights for a CPU."""
        join(self, _INPUTS)
