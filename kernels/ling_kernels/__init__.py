"""The operations Ling-3.0 is made of, each with a reference in plain MLX ops.

Nothing here knows the server: arrays in, arrays out.
"""

from ling_kernels.exponential import exp, sigmoid, silu
from ling_kernels.kda_chunk import kda_chunk, kda_chunk_packed
from ling_kernels.kda_step import kda_gate, kda_recurrent, kda_step
from ling_kernels.paged_mla_decode import paged_mla_decode
from ling_kernels.short_conv import short_conv, short_conv_packed

__all__ = [
    "exp",
    "kda_chunk",
    "kda_chunk_packed",
    "kda_gate",
    "kda_recurrent",
    "kda_step",
    "paged_mla_decode",
    "short_conv",
    "short_conv_packed",
    "sigmoid",
    "silu",
]
