"""Logits against the float64 reference, also where mlx-lm's model leaves the SwiGLU clamp out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.bailing_moe_v3 import Model, ModelArgs

from ling_serve.model.config import ModelConfig
from tests.parity.dense_reference import dense_logits
from tests.parity.packed_run import PackedRun
from tests.parity.random_model import FLASH_LIKE, random_model, random_parameters, relative_rms, small_config

TOKENS = np.random.default_rng(11).integers(0, 97, 100).tolist()
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_like": {},
    "flash_like": FLASH_LIKE,
    "unnormalised_router": {"norm_topk_prob": False, "routed_scaling_factor": 1.3},
    "no_shared_expert": {"num_shared_experts": 0},
    "heads_of_three_widths": {"head_dim": 20, "v_head_dim": 12, "qk_nope_head_dim": 28, "num_attention_heads": 3},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str) -> None:
    values = small_config(**CONFIGS[name])
    expected = dense_logits(values, random_parameters(values), TOKENS)
    model, config = random_model(values), ModelConfig.from_dict(values)
    errors = {
        chunk: relative_rms(PackedRun(model, config).feed({"only": TOKENS}, chunk)["only"], expected)
        for chunk in (1, 8, 33, 512)
    }
    print(name, {chunk: f"{error:.1e}" for chunk, error in errors.items()})
    assert max(errors.values()) <= 1e-4


def test_the_clamps_of_the_flash_like_config_bite() -> None:
    """Otherwise the comparison above would not show whether they are applied."""
    values = small_config(**FLASH_LIKE)
    with_clamp = dense_logits(values, random_parameters(values), TOKENS)
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        without = dense_logits(values | {name: None}, random_parameters(values), TOKENS)
        change = relative_rms(without, with_clamp)
        print(name, f"{change:.1e}")
        assert change > 1e-2


def test_mlx_lm_leaves_the_clamp_out() -> None:
    """Shows why the float64 reference is needed; when this fails, mlx-lm's model can be the reference again."""
    values = small_config(**FLASH_LIKE)
    model = Model(ModelArgs.from_dict(values))
    model.load_weights(list(random_parameters(values).items()), strict=True)
    error = relative_rms(
        np.array(model(mx.array([TOKENS]))[0]), dense_logits(values, random_parameters(values), TOKENS)
    )
    assert error > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 6e-2), (mx.float16, 1e-2)])
@pytest.mark.parametrize("name", ["tiny_like", "flash_like"])
def test_half_precision_weights(name: str, dtype: mx.Dtype, tolerance: float) -> None:
    """Finite, and as near to the same half-precision weights in float64 as that many bits allow."""
    values = small_config(**CONFIGS[name], num_experts=4, n_group=1, topk_group=1, num_experts_per_tok=4)
    rounded = {key: array.astype(dtype).astype(mx.float32) for key, array in random_parameters(values).items()}
    expected = dense_logits(values, rounded, TOKENS)
    run = PackedRun(random_model(values, dtype=dtype), ModelConfig.from_dict(values), dtype)
    actual = run.feed({"only": TOKENS}, 70)["only"]
    error = relative_rms(actual, expected)
    print(name, dtype, f"{error:.1e}")
    assert np.isfinite(actual).all()
    assert error <= tolerance
