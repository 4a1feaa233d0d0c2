"""How much memory this machine lets us use, and MLX's own limits."""

from __future__ import annotations

import os

import mlx.core as mx
from ling_kernels.device import on_cpu

from ling_serve.model.weights.compute_dtype import free_memory_bytes

WORKING_SET = "max_recommended_working_set_size"
_TOTALS = ("total_memory", "memory_size")


def memory_limit_bytes() -> int:
    """Bytes that weights, caches and steps may take together, before --memory-utilization.

    On Metal what the system recommends to keep resident, on another GPU its memory, on a CPU what is free now.
    """
    info = mx.device_info()
    if mx.metal.is_available() and WORKING_SET in info:
        return int(info[WORKING_SET])
    if on_cpu():
        free = free_memory_bytes()
        return free if free is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _TOTALS:
        if name in info:
            return int(info[name])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_mlx(cache_bytes: int) -> None:
    """Keep at most `cache_bytes` of freed buffers, which otherwise grow without bound; on Metal wire what we use."""
    mx.set_cache_limit(cache_bytes)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()[WORKING_SET]))
