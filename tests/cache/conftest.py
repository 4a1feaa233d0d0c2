"""A small layout, and pools of it."""

import mlx.core as mx
import pytest

from ling_serve.cache import CacheLayout


@pytest.fixture
def layout() -> CacheLayout:
    """Two MLA and three KDA layers; dk ≠ dv."""
    return CacheLayout(
        mla_layers=(2, 4),
        kda_layers=(0, 1, 3),
        latent_width=12,
        latent_dtype=mx.float32,
        conv_taps=3,
        conv_width=10,
        conv_dtype=mx.float32,
        num_heads=2,
        key_dim=4,
        value_dim=5,
    )
