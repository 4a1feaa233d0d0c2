"""Kimi Delta Attention: short convolutions, a recurrent state per head with a decay per channel, a gated norm.

One-token pieces take the recurrent step, all of them in one batch; longer pieces take the chunked form. Both start from
the state in their read slot and leave it in their write slot, so that it does not matter how a sequence is cut up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from ling_kernels import kda_chunk, kda_chunk_packed, kda_gate, kda_step, short_conv, short_conv_packed, sigmoid

from ling_serve.cache.caches import Caches
from ling_serve.cache.state_slots import KdaState
from ling_serve.model.config import ModelConfig
from ling_serve.model.forward_batch import ForwardBatch
from ling_serve.model.joined import join, products
from ling_serve.model.projection import Projection

_INPUTS = (("q_proj", "k_proj", "v_proj"), ("f_proj",), ("g_proj",), ("b_proj",))

_NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key; fixed in the architecture, not a field of the config."""


@dataclass(frozen=True)
class Projected:
    """What the layer takes from its input, row by row and before any mixing of tokens; the dtype is the input's."""

    qkv: mx.array
    """[..., 3 * H * D] inputs of the convolutions, q ‖ k ‖ v."""
    decay: mx.array
    """[..., H, D] before the gate's sigmoid."""
    beta: mx.array
    """[..., H] before its sigmoid."""
    gate: mx.array
    """[..., H, D] output gate before its sigmoid."""

    def rows(self, start: int, end: int) -> Projected:
        """Rows of a packed batch."""
        return Projected(self.qkv[start:end], self.decay[start:end], self.beta[start:end], self.gate[start:end])


@dataclass(frozen=True)
class _ConvWeight:
    sources: tuple[mx.array, mx.array, mx.array]
    joined: mx.array


class KdaAttention(nn.Module):
    """A KDA layer. Convolution, gate, decay, state and norm are computed in float32 whatever the weights' dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, kernel = config.kda_width, config.hidden_size, config.short_conv_kernel_size
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.lower_bound = config.kda_lower_bound
        self.q_proj = Projection(hidden, width)
        self.k_proj = Projection(hidden, width)
        self.v_proj = Projection(hidden, width)
        # Holders of weights [width, kernel, 1]: the convolution itself runs over q, k and v together.
        self.q_conv1d = nn.Conv1d(width, width, kernel, groups=width, bias=False)
        self.k_conv1d = nn.Conv1d(width, width, kernel, groups=width, bias=False)
        self.v_conv1d = nn.Conv1d(width, width, kernel, groups=width, bias=False)
        self.A_log = mx.zeros((self.num_heads,))
        self.f_proj = Projection(hidden, width)
        self.dt_bias = mx.zeros((width,))
        self.b_proj = Projection(hidden, self.num_heads)
        self.g_proj = Projection(hidden, width)
        self.o_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = Projection(width, hidden)
        self._conv_weight: _ConvWeight | None = None
        self._qk_scale = mx.array([self.head_dim**-0.5] * self.num_heads + [1.0] * self.num_heads)[:, None]

    def __call__(self, x: mx.array, batch: ForwardBatch, caches: Caches, layer: int) -> mx.array:
        """x [N, hidden] → [N, hidden]; moves the states of the batch's slots in model layer `layer` on."""
        projected = self.project(x)
        singles, states = batch.num_single, caches.states
        borders = [(0, singles), (singles, batch.num_pieces)]
        parts = [(start, end) for start, end in borders if start < end]
        # Every slot is read before any is written: a piece may start from a slot that another one moves on.
        before = [states.read(layer, batch.read_slots[start:end]) for start, end in parts]
        mixed: list[mx.array] = []
        for (start, end), state in zip(parts, before, strict=True):
            first = batch.cu_seqlens[start]
            rows = projected.rows(first, batch.cu_seqlens[end])
            if start < singles:
                o, after = self.step(rows, state)
            else:
                o, after = self.chunks(rows, state, [row - first for row in batch.cu_seqlens[start : end + 1]])
            states.write(layer, batch.write_slots[start:end], after)
            mixed.append(o)
        return self.output(mixed[0] if len(mixed) == 1 else mx.concatenate(mixed), projected.gate)

    def dense(self, x: mx.array) -> mx.array:
        """x [B, T, hidden] → [B, T, hidden]: B whole sequences from the zero state, no caches. Differentiable."""
        projected = self.project(x)
        history = mx.zeros((x.shape[0], self.q_conv1d.weight.shape[1] - 1, projected.qkv.shape[-1]), x.dtype)
        y, _ = short_conv(projected.qkv, history, self._join_conv_weight())
        state = mx.zeros((x.shape[0], self.num_heads, self.head_dim, self.head_dim))
        o, _ = kda_chunk(*self._inputs(y, projected), state)
        return self.output(o, projected.gate)

    def project(self, x: mx.array) -> Projected:
        """x [..., hidden]: every product with the layer's input, once for all tokens."""
        heads = (*x.shape[:-1], self.num_heads, self.head_dim)
        qkv, decay, gate, beta = products(self, _INPUTS, x)
        return Projected(qkv, decay.reshape(heads), beta, gate.reshape(heads))

    def fuse(self) -> None:
        """Rearrange float32 weights for a CPU."""
        join(self, _INPUTS)

    def step(self, rows: Projected, state: KdaState) -> tuple[mx.array, KdaState]:
        """One token of each of R sequences → o [R, H, D] float32 and their states."""
        y, conv = short_conv(rows.qkv[:, None], state.conv, self._joined_conv_weight())
        o, recurrent = kda_step(*self._inputs(y[:, 0], rows), state.recurrent)
        return o, KdaState(conv, recurrent)

    def chunks(self, rows: Projected, state: KdaState, cu_seqlens: Sequence[int]) -> tuple[mx.array, KdaState]:
        """R packed pieces of any lengths → o [N, H, D] float32 and their states."""
        y, conv = short_conv_packed(rows.qkv, state.conv, self._joined_conv_weight(), cu_seqlens)
        o, recurrent = kda_chunk_packed(*self._inputs(y, rows), state.recurrent, cu_seqlens)
        return o, KdaState(conv, recurrent)

    def output(self, o: mx.array, gate: mx.array) -> mx.array:
        """o [..., H, D] float32, gate [..., H, D] → [..., hidden]."""
        gated = self.o_norm(o) * sigmoid(gate.astype(mx.float32))
        return self.o_proj(gated.flatten(-2).astype(gate.dtype))

    def _inputs(self, y: mx.array, projected: Projected) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Convolved y [..., 3 * H * D] → normalised q and k, v, log-decay [..., H, D] and beta [..., H], float32."""
        H = self.num_heads
        y = mx.unflatten(y, -1, (3 * H, self.head_dim))
        qk = y[..., : 2 * H, :]
        qk = qk * (mx.rsqrt(mx.square(qk).sum(axis=-1, keepdims=True) + _NORM_EPS) * self._qk_scale)
        g = kda_gate(projected.decay, self.A_log, self.dt_bias, self.lower_bound)
        return qk[..., :H, :], qk[..., H:, :], y[..., 2 * H :, :], g, mx.sigmoid(projected.beta.astype(mx.float32))

    def _join_conv_weight(self) -> mx.array:
        """[kernel, 3 * H * D] float32."""
        weights = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        return mx.concatenate([weight.squeeze(-1).T for weight in weights], axis=-1).astype(mx.float32)

    def _joined_conv_weight(self) -> mx.array:
        """The same, kept for as long as the weights are these."""
        sources = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        kept = self._conv_weight
        if kept is None or any(a is not b for a, b in zip(kept.sources, sources, strict=True)):
            kept = self._conv_weight = _ConvWeight(sources, self._join_conv_weight())
        return kept.joined
