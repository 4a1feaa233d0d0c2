"""A depthwise causal convolution over a few tokens, followed by SiLU, as shifted products.

    y[t] = silu(Σ_j weight[j] x[t - (taps - j)])    j = 0 .. taps, x before the piece = its history

(The oldest token meets the first weight, as in PyTorch's and MLX's `Conv1d`.) A grouped convolution op takes five times
as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from ling_kernels.exponential import silu


def short_conv(x: mx.array, history: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Advance B sequences by T tokens each.

    x [B, T, C], history [B, taps, C] the inputs before x, weight [taps + 1, C]; any float dtype, computed in float32.
    Returns y [B, T, C] float32 and the new history [B, taps, C] in the history's dtype.
    """
    length, taps = x.shape[1], history.shape[1]
    window = mx.concatenate([history, x.astype(history.dtype)], axis=1)
    return silu(_shifted_products(window, weight, length)), window[:, length : length + taps]


def short_conv_packed(
    x: mx.array, history: mx.array, weight: mx.array, cu_seqlens: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Advance R sequences by pieces of any lengths, packed one after the other.

    x [N, C], history [R, taps, C], weight [taps + 1, C]; piece r is rows cu_seqlens[r] : cu_seqlens[r + 1].
    Returns y [N, C] float32 and the new history [R, taps, C] in the history's dtype.
    """
    spans = list(pairwise(cu_seqlens))
    if len(spans) == 1:
        y, history = short_conv(x[None], history, weight)
        return y[0], history
    taps = history.shape[1]
    x = x.astype(history.dtype)
    # Each piece behind its history in one long list: a row is right where its window lies within its own piece.
    rows: list[mx.array] = []
    for piece, (start, end) in enumerate(spans):
        rows += [history[piece], x[start:end]]
    window = mx.concatenate(rows)
    y = _shifted_products(window[None], weight, window.shape[0] - taps)[0]
    first = [start + piece * taps for piece, (start, _) in enumerate(spans)]
    lengths = [end - start for start, end in spans]
    outputs = mx.concatenate([y[at : at + length] for at, length in zip(first, lengths, strict=True)])
    kept = [window[at + length : at + length + taps] for at, length in zip(first, lengths, strict=True)]
    return silu(outputs), mx.stack(kept)


def _shifted_products(window: mx.array, weight: mx.array, length: int) -> mx.array:
    """window [B, taps + length, C], weight [taps + 1, C] -> [B, length, C] float32."""
    window, weight = window.astype(mx.float32), weight.astype(mx.float32)
    if length == 1:
        return (window * weight).sum(axis=1, keepdims=True)
    y = window[:, :length] * weight[0]
    for j in range(1, weight.shape[0]):
        y = y + window[:, j : j + length] * weight[j]
    return y
