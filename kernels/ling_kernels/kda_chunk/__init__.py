"""Kimi Delta Attention over pieces of many tokens (prefill and training)."""

from ling_kernels.kda_chunk.reference import kda_chunk, kda_chunk_packed

__all__ = ["kda_chunk", "kda_chunk_packed"]
