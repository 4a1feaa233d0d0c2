"""The short causal convolution in front of KDA's queries, keys and values."""

from ling_kernels.short_conv.reference import short_conv, short_conv_packed

__all__ = ["short_conv", "short_conv_packed"]
