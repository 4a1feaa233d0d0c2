from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from ling_serve.model import experts as experts_module
from ling_serve.model.config import ModelConfig
from ling_serve.model.mlp import clamped_swiglu
from ling_serve.model.moe import ExpertRouter, MixtureOfExperts
from tests.parity.dense_reference import gated_mlp, sigmoid
from tests.parity.dense_reference import moe as dense_moe
from tests.parity.random_model import relative_rms, small_config


def random_layer(values: dict[str, Any], seed: int = 0) -> tuple[MixtureOfExperts, dict[str, np.ndarray]]:
    """The last layer's block, and its parameters in float64 under the names of the dense reference."""
    config = ModelConfig.from_dict(values)
    layer = MixtureOfExperts(config, config.layers[-1])
    rng = np.random.default_rng(seed)

    def randomise(path: str, array: mx.array) -> mx.array:
        scale = 0.3 if path.endswith("expert_bias") else array.shape[-1] ** -0.5
        return mx.array((rng.standard_normal(array.shape) * scale).astype(np.float32))

    layer.update(tree_map_with_path(randomise, layer.parameters()))
    flat = tree_flatten(layer.parameters())
    return layer, {f"mlp.{path}": np.array(array, dtype=np.float64) for path, array in flat}


ROUTERS: dict[str, dict[str, Any]] = {
    "groups": {"num_experts": 24, "n_group": 6, "topk_group": 2, "num_experts_per_tok": 5},
    "one_kept_group": {"num_experts": 16, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 4},
    "no_groups": {"num_experts": 7, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "all_groups": {"num_experts": 8, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 2},
    "every_expert": {"num_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 4},
    "unnormalised": {"num_experts": 8, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router(name: str) -> None:
    """Chosen by biased scores within the best groups, weighted by unbiased ones."""
    values = small_config(**ROUTERS[name])
    layer, p = random_layer(values)
    x = np.random.default_rng(1).standard_normal((50, 48)).astype(np.float32)
    experts, weights = (np.array(a) for a in layer.gate(mx.array(x)))

    scores = sigmoid(x.astype(np.float64) @ p["mlp.gate.weight"].T)
    biased = scores + p["mlp.gate.expert_bias"]
    for t in range(50):
        groups = biased[t].reshape(values["n_group"], -1)
        strength = np.sort(groups, axis=-1)[:, -2:].sum(-1)
        kept = set(np.argsort(-strength)[: values["topk_group"]].tolist())
        allowed = [e for e in range(values["num_experts"]) if e // groups.shape[1] in kept]
        best = sorted(allowed, key=lambda e: -biased[t, e])[: values["num_experts_per_tok"]]
        assert set(experts[t].tolist()) == set(best)
        expected = scores[t, experts[t]]
        expected = expected / expected.sum() if values["norm_topk_prob"] else expected
        assert np.allclose(weights[t], 2.5 * expected, rtol=1e-5)


def test_router_is_float32_for_half_precision_input() -> None:
    layer, _ = random_layer(small_config())
    layer.gate.weight = layer.gate.weight.astype(mx.bfloat16)
    _, weights = layer.gate(mx.random.normal((3, 48)).astype(mx.bfloat16))
    assert weights.dtype == mx.float32
    assert np.allclose(np.array(weights).sum(-1), 2.5, rtol=1e-6)


LIMITS = {"expert_swiglu_limit_list": [0, 0, 0, 0.2], "share_expert_swiglu_limit_list": [0, 0, 0, 0.4]}


@pytest.mark.parametrize("limits", [{}, LIMITS])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 200])
def test_experts_gathered_sorted_and_looped(
    num_tokens: int, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small_config(**limits, **ROUTERS["groups"])
    layer, p = random_layer(values)
    x = np.random.default_rng(2).standard_normal((num_tokens, 48)).astype(np.float32) * 3
    routed_limit, shared_limit = (0.2, 0.4) if limits else (None, None)
    expected = dense_moe(x, p, values, routed_limit) + gated_mlp(x, p, "mlp.shared_experts.", shared_limit)
    errors = {}
    for form, (least_sorted, least_looped) in {
        "gathered": (10**9, 10**9),
        "sorted": (0, 10**9),
        "looped": (0, 0),
    }.items():
        monkeypatch.setattr(experts_module, "MIN_SORTED_ROWS", least_sorted)
        monkeypatch.setattr(experts_module, "MIN_ROWS_PER_EXPERT", least_looped)
        errors[form] = relative_rms(np.array(layer(mx.array(x))), expected)
    print(num_tokens, {form: f"{error:.1e}" for form, error in errors.items()})
    assert max(errors.values()) <= 1e-5


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "mxfp8"), (4, "mxfp4")])
def test_quantised_experts_looped_equal_gathered(bits: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = small_config(hidden_size=64, moe_intermediate_size=32)
    layer, _ = random_layer(values)
    nn.quantize(layer.switch_mlp, group_size=32, bits=bits, mode=mode)
    x = mx.random.normal((40, 64), key=mx.random.key(0))
    experts, _ = layer.gate(x)
    monkeypatch.setattr(experts_module, "MIN_ROWS_PER_EXPERT", 10**9)
    gathered = np.array(layer.switch_mlp(x, experts))
    monkeypatch.setattr(experts_module, "MIN_ROWS_PER_EXPERT", 0)
    error = relative_rms(np.array(layer.switch_mlp(x, experts)), gathered)
    print(mode, f"{error:.1e}")
    assert error <= 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("num_tokens", [1, 60])
def test_half_precision_experts(dtype: mx.Dtype, num_tokens: int) -> None:
    """All experts are chosen, so that rounding cannot choose others."""
    layer, _ = random_layer(small_config(**ROUTERS["every_expert"]))
    x = mx.random.normal((num_tokens, 48), key=mx.random.key(3))
    expected = np.array(layer(x))
    layer.set_dtype(dtype)
    out = layer(x.astype(dtype))
    assert out.dtype == dtype
    error = relative_rms(np.array(out.astype(mx.float32)), expected)
    print(dtype, f"{error:.1e}")
    assert error <= 3e-2


def test_no_shared_experts() -> None:
    values = small_config(num_shared_experts=0)
    layer, p = random_layer(values)
    x = np.random.default_rng(4).standard_normal((5, 48)).astype(np.float32)
    assert relative_rms(np.array(layer(mx.array(x))), dense_moe(x, p, values, None)) <= 1e-5


def test_the_clamp_comes_after_silu_and_cuts_the_gate_only_from_above() -> None:
    gate, up = mx.array([-20.0, -1.0, 1.0, 5.0, 5.0]), mx.array([1.0, 9.0, -9.0, 9.0, 0.5])
    silu = np.array(gate) * sigmoid(np.array(gate, dtype=np.float64))
    expected = np.minimum(silu, 2.0) * np.array([1.0, 2.0, -2.0, 2.0, 0.5])
    assert np.allclose(np.array(clamped_swiglu(gate, up, 2.0)), expected, atol=1e-6)
    assert np.allclose(np.array(clamped_swiglu(gate, up, None)), silu * np.array(up), atol=1e-5)


def test_a_tie_within_the_router_still_chooses_distinct_experts() -> None:
    router = ExpertRouter(ModelConfig.from_dict(small_config(num_experts_per_tok=4)))
    experts, weights = router(mx.zeros((2, 48)))
    assert all(len(set(row)) == 4 for row in np.array(experts).tolist())
    assert np.allclose(np.array(weights), 2.5 / 4)
