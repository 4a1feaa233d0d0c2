"""Absorbed latent attention without a copy of the pages: one small product per page, straight from the pool."""

from __future__ import annotations

import mlx.core as mx

from ling_kernels.exponential import exp


def attend_page_by_page(
    queries: mx.array, pool: mx.array, page_ids: mx.array, bias: mx.array, value_width: int
) -> mx.array:
    """What `attend_pages` computes, for a float32 pool.

    On a CPU a page fits the nearest cache, and products this narrow gain more from that than they lose to their
    number: 16 sequences of 2,048 tokens take 6.9 ms instead of 10.1 ms (4 heads, latents of 160 values).
    """
    r, T, H, W = queries.shape
    b, block_size = page_ids.shape[1], pool.shape[1]
    pages = page_ids.astype(mx.uint32)
    sequence_of_page = mx.broadcast_to(mx.arange(r, dtype=mx.uint32)[:, None], (r, b))
    rows = queries.reshape(r, T * H, W)
    scores = mx.gather_mm(rows, pool.swapaxes(-1, -2), lhs_indices=sequence_of_page, rhs_indices=pages)
    scores = scores.reshape(r, b, T, H, block_size) + bias.reshape(r, T, b, 1, block_size).swapaxes(1, 2)
    weights = exp(scores - scores.max(axis=(1, 4), keepdims=True))
    total = weights.sum(axis=(1, 4))  # [r, T, H]
    places = mx.arange(r * b, dtype=mx.uint32).reshape(r, b)
    mixed = mx.gather_mm(
        weights.reshape(r * b, T * H, block_size), pool, lhs_indices=places, rhs_indices=pages
    )  # [r, b, T*H, W]
    return mixed.sum(axis=1).reshape(r, T, H, W)[..., :value_width] / total[..., None]
