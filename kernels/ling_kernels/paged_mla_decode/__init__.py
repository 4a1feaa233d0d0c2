"""Attention of a few query tokens over MLA latents that lie in pages.

For now the reference is the only implementation.
"""

from ling_kernels.paged_mla_decode.reference import attend_latents

__all__ = ["attend_latents"]
