"""Absorbed multi-head latent attention over gathered pages, in plain MLX operations."""

from __future__ import annotations

import mlx.core as mx

from ling_kernels.softmax import unnormalised_softmax

TILE_SCORES = 1 << 22
"""Scores that exist at a time (16 MiB), unless those of one token are more."""


def attend_latents(queries: mx.array, latents: mx.array, bias: mx.array, value_width: int) -> mx.array:
    """Attention in latent space: one key and value per token, shared by all heads.

    queries  [r, T, H, W] float32: T tokens of each of r sequences, the key up-projection and the softmax scale
             already applied; W = value_width + rotary width.
    latents  [r, L, W] any float dtype: the pages of each sequence in order, the last one possibly part stale.
    bias     [r, T, L] float32: 0 where a token may look, -inf elsewhere. Every token sees at least one latent.
    Returns  [r, T, H, value_width] float32, each head's mix of latents, before the value up-projection.

    out[r, t, h] = sum_j softmax_j(queries[r, t, h] · latents[r, j] + bias[r, t, j]) · latents[r, j, :value_width]
    """
    r, T, H, W = queries.shape
    keys = latents.astype(mx.float32)
    scores = queries.reshape(r, T * H, W) @ keys.swapaxes(-1, -2)  # [r, T*H, L]
    scores = scores.reshape(r, T, H, -1) + bias[:, :, None, :]
    weights, total = unnormalised_softmax(scores)
    # The product with whole rows, cut afterwards, spares the copy that a product with part of each row would make.
    mixed = (weights.reshape(r, T * H, -1) @ keys).reshape(r, T, H, W)
    return mixed[..., :value_width] / total


def attend_pages(queries: mx.array, pool: mx.array, page_ids: mx.array, bias: mx.array, value_width: int) -> mx.array:
    """`attend_latents` over pages of a pool, a few tokens at a time where the scores of all would be many.

    queries [r, T, H, W] float32, pool [num_blocks, block_size, W], page_ids [r, b] int32 in the order of the tokens,
    bias [r, T, b * block_size] float32 → [r, T, H, value_width] float32.
    """
    (r, T, H, W), L = queries.shape, bias.shape[-1]
    latents = pool[page_ids].reshape(r, L, W).astype(mx.float32)
    tile = max(1, TILE_SCORES // (r * H * L))
    tiles = [
        attend_latents(queries[:, start : start + tile], latents, bias[:, start : start + tile], value_width)
        for start in range(0, T, tile)
    ]
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1)
