"""What one token and one sequence cost in cache, per layer: the contract between a model and the pools."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class CacheLayout:
    """Shapes and dtypes of every cache array of a model.

    MLA layers keep one latent row per token, `[latent_width] = kv_a_layernorm(c) ‖ roped k`.
    KDA layers keep one row per sequence: `conv_taps` past inputs of the short convolutions of q, k and v together,
    and a recurrent state `[num_heads, value_dim, key_dim]` in float32.
    """

    mla_layers: tuple[int, ...]
    """Model layer index of each latent array, ascending."""
    kda_layers: tuple[int, ...]
    """Model layer index of each state array, ascending."""
    latent_width: int
    latent_dtype: mx.Dtype
    conv_taps: int
    """Tokens of history: short_conv_kernel_size - 1."""
    conv_width: int
    """Channels of q, k and v together."""
    conv_dtype: mx.Dtype
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes_per_token(self) -> int:
        """Latent bytes of one token over all MLA layers."""
        return len(self.mla_layers) * self.latent_width * self.latent_dtype.size

    @property
    def bytes_per_slot(self) -> int:
        """State bytes of one sequence over all KDA layers (convolution + float32 recurrent state)."""
        conv = self.conv_taps * self.conv_width * self.conv_dtype.size
        recurrent = self.num_heads * self.value_dim * self.key_dim * mx.float32.size
        return len(self.kda_layers) * (conv + recurrent)
