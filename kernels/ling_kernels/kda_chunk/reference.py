"""Kimi Delta Attention over many tokens at once, in MLX ops: chunks of 32 or 64 tokens made of blocks of 16.

With G the log-decay summed from the start of the chunk up to and including a token (a row vector per token):

    A[i, j] = β_i Σ_d k_i k_j e^(G_i - G_j)   strictly lower       B[i, j] = Σ_d q_i k_j e^(G_i - G_j)   lower
    U  = (I + A)⁻¹ β (V - (K e^G) Sᵀ)                              O = (Q e^G) Sᵀ + B U
    S' = S e^(G_end) + Uᵀ (K e^(G_end - G))

(flash-linear-attention, `fla/ops/kda`; S kept as [dv, dk].) A, B and the inverse depend on no state, so they are made
for all chunks together; only the last two lines walk from chunk to chunk.

e^(-G) alone would overflow. Inside a block the exponents are taken around the block's middle row, which keeps them
within 8 tokens' decay (80 nats at the lowest bound served, -10). Between blocks, rows decay from a border to the token
and columns from the token to the border: both exponents are negative. The inverse is forward substitution in float32:
the Neumann series loses all digits when keys repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from ling_kernels.exponential import exp

BLOCK = 16
CHUNK = 32
"""Tokens of a chunk unless the caller says otherwise. On two CPU cores 64 takes 10 % longer, 16 as long or longer."""


def kda_chunk(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    chunk: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Advance B sequences by T tokens each. Differentiable where no token decays by more than e^-5.

    q, k [B, T, H, dk] (normalised, q scaled), v [B, T, H, dv], g [B, T, H, dk] log-decay in [-10, 0], beta [B, T, H],
    state [B, H, dv, dk]. Computed in float32 whatever the inputs' dtype. `chunk` is 16, 32 or 64; None = by T.
    Returns o [B, T, H, dv] and the new state, both float32.
    """
    length = q.shape[1]
    chunk = min(CHUNK, padded_length(length)) if chunk is None else chunk
    values = _in_chunks(v, chunk)
    parts = _diagonal_blocks(*(_in_chunks(x, chunk) for x in (q, k, g, beta[..., None])))
    while parts.size < chunk:
        parts = _merge_neighbours(parts)
    outputs, state = _walk(parts, values, state)
    return outputs.flatten(2, 3)[:, :, :length].swapaxes(1, 2), state


def kda_chunk_packed(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    states: mx.array,
    cu_seqlens: Sequence[int],
) -> tuple[mx.array, mx.array]:
    """Advance R sequences by pieces of any lengths, packed one after the other.

    q, k, g [N, H, dk], v [N, H, dv], beta [N, H], states [R, H, dv, dk]; piece r is rows cu_seqlens[r] :
    cu_seqlens[r + 1]. Pieces of equally many chunks run together. Returns o [N, H, dv] and the new states, float32.
    """
    spans = list(pairwise(cu_seqlens))
    if len(spans) == 1:
        o, states = kda_chunk(q[None], k[None], v[None], g[None], beta[None], states)
        return o[0], states
    groups: dict[int, list[int]] = {}
    for piece, (start, end) in enumerate(spans):
        groups.setdefault(padded_length(end - start), []).append(piece)
    outputs: dict[int, mx.array] = {}
    ends: dict[int, mx.array] = {}
    for length, pieces in groups.items():
        rows = [spans[piece] for piece in pieces]
        inputs = [_padded_stack(x, rows, length) for x in (q, k, v, g, beta)]
        inputs.append(mx.stack([states[piece] for piece in pieces]))
        o, after = kda_chunk(*inputs)
        for row, piece in enumerate(pieces):
            outputs[piece] = o[row, : spans[piece][1] - spans[piece][0]]
            ends[piece] = after[row]
    order = range(len(spans))
    return mx.concatenate([outputs[piece] for piece in order]), mx.stack([ends[piece] for piece in order])


def padded_length(length: int) -> int:
    """Rows that a piece of `length` tokens occupies: one block, or whole chunks."""
    return BLOCK if length <= BLOCK else -(-length // CHUNK) * CHUNK


def unit_lower_inverse(strictly_lower: mx.array) -> mx.array:
    """(I + L)⁻¹ of [..., s, s] by forward substitution, one column of L after the other for all matrices together."""
    size = strictly_lower.shape[-1]
    inverse = mx.broadcast_to(mx.eye(size), strictly_lower.shape)
    for j in range(size - 1):
        inverse = inverse - strictly_lower[..., :, j : j + 1] * inverse[..., j : j + 1, :]
    return inverse


@dataclass(frozen=True)
class _Parts:
    """What runs of `size` tokens contribute without knowing the state; leading axes [B, H, chunks, runs in a chunk]."""

    size: int
    rows_q: mx.array
    """[..., size, dk] q e^G, decayed from the run's start."""
    rows_k: mx.array
    """[..., size, dk] k e^G, likewise."""
    columns: mx.array
    """[..., size, dk] k e^(G_end - G), decayed to the run's end."""
    decay: mx.array
    """[..., 1, dk] e^(G_end), of the whole run."""
    beta: mx.array
    """[..., size, 1]"""
    scores: mx.array
    """[..., size, size] B."""
    inverse: mx.array
    """[..., size, size] (I + A)⁻¹."""


def _in_chunks(x: mx.array, chunk: int) -> mx.array:
    """[B, T, H, d] -> [B, H, chunks, chunk, d] float32, contiguous; rows past T are zeros, which change nothing."""
    x = x.astype(mx.float32).swapaxes(1, 2)
    missing = -x.shape[2] % chunk
    x = mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else mx.contiguous(x)
    return mx.unflatten(x, 2, (-1, chunk))


def _diagonal_blocks(q: mx.array, k: mx.array, g: mx.array, beta: mx.array) -> _Parts:
    q, k, g, beta = (mx.unflatten(x, 3, (-1, BLOCK)) for x in (q, k, g, beta))
    total = mx.cumsum(g, axis=-2)
    middle = total[..., BLOCK // 2 - 1 : BLOCK // 2, :]
    around_middle = exp(total - middle)
    rows_q, rows_k, columns = q * around_middle, k * around_middle, k / around_middle
    lower = mx.tri(BLOCK, dtype=mx.bool_)
    strictly_lower = mx.tri(BLOCK, k=-1, dtype=mx.bool_)
    across = columns.swapaxes(-1, -2)
    # `where`, not a product: above the diagonal e^(G_i - G_j) may be infinite.
    scores = mx.where(lower, rows_q @ across, 0.0)
    coupling = mx.where(strictly_lower, rows_k @ across, 0.0) * beta
    to_middle = exp(middle)
    from_middle = exp(total[..., -1:, :] - middle)
    return _Parts(
        size=BLOCK,
        rows_q=rows_q * to_middle,
        rows_k=rows_k * to_middle,
        columns=columns * from_middle,
        decay=to_middle * from_middle,
        beta=beta,
        scores=scores,
        inverse=unit_lower_inverse(coupling),
    )


def _merge_neighbours(parts: _Parts) -> _Parts:
    """Join runs in pairs: the right one's rows meet the left one's columns at their border."""
    across = _left(parts.columns).swapaxes(-1, -2)
    coupling = (_right(parts.rows_k) @ across) * _right(parts.beta)
    inverse_left, inverse_right = _left(parts.inverse), _right(parts.inverse)
    decay_left, decay_right = _left(parts.decay), _right(parts.decay)
    undecayed = mx.ones_like(decay_left)
    from_start = mx.stack([undecayed, decay_left], axis=-3).flatten(-4, -3)
    to_end = mx.stack([decay_right, undecayed], axis=-3).flatten(-4, -3)
    return _Parts(
        size=2 * parts.size,
        rows_q=_joined(parts.rows_q * from_start),
        rows_k=_joined(parts.rows_k * from_start),
        columns=_joined(parts.columns * to_end),
        decay=decay_left * decay_right,
        beta=_joined(parts.beta),
        scores=_lower_blocks(_left(parts.scores), _right(parts.rows_q) @ across, _right(parts.scores)),
        inverse=_lower_blocks(inverse_left, -(inverse_right @ (coupling @ inverse_left)), inverse_right),
    )


def _left(x: mx.array) -> mx.array:
    """The even runs of [..., runs, rows, w]."""
    return x[..., 0::2, :, :]


def _right(x: mx.array) -> mx.array:
    """The odd runs of [..., runs, rows, w]."""
    return x[..., 1::2, :, :]


def _joined(x: mx.array) -> mx.array:
    """[..., runs, rows, w] -> [..., runs / 2, 2 * rows, w]."""
    *lead, runs, rows, width = x.shape
    return x.reshape(*lead, runs // 2, 2 * rows, width)


def _lower_blocks(upper_left: mx.array, lower_left: mx.array, lower_right: mx.array) -> mx.array:
    """[[upper_left, 0], [lower_left, lower_right]]."""
    upper = mx.concatenate([upper_left, mx.zeros_like(lower_left)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([lower_left, lower_right], axis=-1)], axis=-2)


def _walk(parts: _Parts, values: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Carry the state from chunk to chunk. values [B, H, chunks, C, dv] -> o of the same shape, and the last state."""
    rows = mx.concatenate([parts.rows_k, parts.rows_q], axis=-2).squeeze(3)
    columns, decay, scores = parts.columns.squeeze(3), parts.decay.squeeze(3), parts.scores.squeeze(3)
    solve = (parts.inverse * parts.beta.swapaxes(-1, -2)).squeeze(3)
    size = parts.size
    from_state: list[mx.array] = []
    updates: list[mx.array] = []
    for c in range(values.shape[2]):
        seen = rows[:, :, c] @ state.swapaxes(-1, -2)
        update = solve[:, :, c] @ (values[:, :, c] - seen[..., :size, :])
        from_state.append(seen[..., size:, :])
        updates.append(update)
        state = state * decay[:, :, c] + update.swapaxes(-1, -2) @ columns[:, :, c]
    return mx.stack(from_state, axis=2) + scores @ mx.stack(updates, axis=2), state


def _padded_stack(x: mx.array, spans: Sequence[tuple[int, int]], length: int) -> mx.array:
    """[N, ...] -> [len(spans), length, ...], each span's rows followed by zeros."""
    rest = [(0, 0)] * (x.ndim - 1)
    return mx.stack([mx.pad(x[start:end], [(0, length - (end - start)), *rest]) for start, end in spans])
