"""The latents of every MLA layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ling_serve.cache.layout import CacheLayout


class LatentPool:
    """One dense array `[num_blocks + 1, block_size, latent_width]` per MLA layer; the last block is scratch.

    On a CPU MLX scatters into the buffer it was given, and copies nothing, as long as nobody else refers to it. So a
    layer writes first and reads afterwards, every step is evaluated before the next one is built, and nothing outside
    keeps an array of this pool.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_block = num_blocks
        shape = (num_blocks + 1, block_size, layout.latent_width)
        self._pools = {layer: mx.zeros(shape, layout.latent_dtype) for layer in layout.mla_layers}
        self._width = layout.latent_width
        mx.eval(self.arrays())

    def write(self, layer: int, write_at: mx.array, rows: mx.array) -> None:
        """Store `rows` [N, latent_width] at `write_at` [N] int32 = block * block_size + offset."""
        pool = self._pools[layer]
        pool[write_at // self.block_size, write_at % self.block_size] = rows.astype(pool.dtype)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        index = mx.array(list(blocks), dtype=mx.int32)
        for pool in self._pools.values():
            pool[index] = mx.array(0, dtype=pool.dtype)

    def pages(self, layer: int, page_ids: mx.array) -> mx.array:
        """Gather `page_ids` [r, b] int32 → [r, b * block_size, latent_width], in page order."""
        r, b = page_ids.shape
        return self._pools[layer][page_ids].reshape(r, b * self.block_size, self._width)

    def blocks(self, layer: int) -> mx.array:
        """All blocks [num_blocks + 1, block_size, latent_width], for an operation of this step; keep no reference."""
        return self._pools[layer]

    def arrays(self) -> list[mx.array]:
        return list(self._pools.values())
