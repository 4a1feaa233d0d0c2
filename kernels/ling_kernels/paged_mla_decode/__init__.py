"""Attention of a few query tokens over MLA latents that lie in pages."""

from __future__ import annotations

import mlx.core as mx

from ling_kernels.device import on_cpu
from ling_kernels.paged_mla_decode.per_page import attend_page_by_page
from ling_kernels.paged_mla_decode.reference import attend_latents, attend_pages

__all__ = ["attend_latents", "attend_page_by_page", "attend_pages", "paged_mla_decode"]


def paged_mla_decode(
    queries: mx.array, pool: mx.array, page_ids: mx.array, bias: mx.array, value_width: int
) -> mx.array:
    """Each head's mix of latents; see `attend_pages` for shapes. Picks the form for the device and dtype."""
    # MLX's gathered product on a CPU knows float32 only; with more rows its result outgrows the copy that it spares.
    narrow = queries.shape[1] * queries.shape[2] <= pool.shape[1]
    if narrow and pool.dtype == mx.float32 and on_cpu():
        return attend_page_by_page(queries, pool, page_ids, bias, value_width)
    return attend_pages(queries, pool, page_ids, bias, value_width)
