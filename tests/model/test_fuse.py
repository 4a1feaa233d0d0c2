"""Weights rearranged for a CPU compute what they did as stored, in one model's worth of memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig
from ling_serve.model.experts import InputMajorExperts, RoutedExperts
from ling_serve.model.kda import KdaAttention
from tests.parity.packed_run import PackedRun
from tests.parity.random_model import FLASH_LIKE, random_model, relative_rms, small_config

LIMITED = {"expert_swiglu_limit_list": [0, 0.3, 0, 0.2], "share_expert_swiglu_limit_list": [0, 0, 0, 0.4]}


def paths(model: nn.Module) -> list[str]:
    return [path for path, _ in tree_flatten(model.parameters())]


def answers(model: BailingV3, config: ModelConfig) -> np.ndarray:
    """Logits of a short batch, a long one, steps of one token each, and steps of both kinds of piece together."""
    source = np.random.default_rng(3)
    tokens = {name: source.integers(0, 97, 160).tolist() for name in "abcde"}
    run = PackedRun(model, config)
    results = [run.step({name: tokens[name][:3] for name in "abc"}), run.step({"d": tokens["d"][:140]})]
    results += [run.step({name: [tokens[name][at]] for name in "abcd"}) for at in (140, 141)]
    results.append(run.step({"a": tokens["a"][3:4], "b": tokens["b"][3:9], "c": tokens["c"][3:60], "e": tokens["e"]}))
    return np.concatenate([logits for result in results for logits in result.values()])


@pytest.mark.parametrize("overrides", [{}, FLASH_LIKE, LIMITED, {"num_shared_experts": 0}])
def test_fused_model_answers_as_before(overrides: dict[str, Any]) -> None:
    values = small_config(**overrides)
    model, config = random_model(values), ModelConfig.from_dict(values)
    before = answers(model, config)
    model.fuse()
    error = relative_rms(answers(model, config), before)
    print(f"relative RMS {error:.1e}")
    assert error <= 2e-6  # six layers of float32 sums taken in another order
    assert not any("q_proj" in path and "conv" not in path for path in paths(model.model.layers[0]))
    assert isinstance(model.model.layers[-1].mlp.switch_mlp, InputMajorExperts)


def test_fusing_twice_changes_nothing_more() -> None:
    model = random_model(small_config())
    model.fuse()
    once = paths(model)
    model.fuse()
    assert paths(model) == once


@pytest.mark.parametrize("kind", ["bfloat16", "quantised"])
def test_other_weights_stay_as_they_are(kind: str) -> None:
    model = random_model(small_config(hidden_size=64, moe_intermediate_size=64, head_dim=32))
    if kind == "bfloat16":
        model.set_dtype(mx.bfloat16)
    else:
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda _, m: (
                isinstance(m.get("weight"), mx.array) and hasattr(m, "to_quantized") and m["weight"].shape[-1] % 32 == 0
            ),
        )
    before = paths(model)
    model.fuse()
    assert isinstance(model.model.layers[-1].mlp.switch_mlp, RoutedExperts)
    assert paths(model) == before


def test_memory_holds_one_model_and_no_more_than_a_layer_twice() -> None:
    model = random_model(small_config(hidden_size=128, num_experts=32, moe_intermediate_size=128))
    mx.eval(model.parameters())
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    layer = sum(array.nbytes for _, array in tree_flatten(model.model.layers[-1].parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model.fuse()
    peak = mx.get_peak_memory() - before
    print(f"weights {weights / 1e6:.1f} MB, a layer {layer / 1e6:.1f} MB, peak above them {peak / 1e6:.1f} MB")
    assert peak <= layer
    assert mx.get_active_memory() - before <= 0.01 * weights
    assert mx.get_cache_memory() == 0


def test_dense_form_stays_differentiable() -> None:
    """Training knows the layer as stored; one whose weights were joined has the same gradient for its input."""
    layer = next(layer.attention for layer in random_model(small_config()).model.layers)
    assert isinstance(layer, KdaAttention)
    x = mx.random.normal((2, 20, 48))
    slope = mx.grad(lambda x: layer.dense(x).square().sum())
    before = np.array(slope(x))
    layer.fuse()
    error = relative_rms(np.array(slope(x)), before)
    print(f"relative RMS {error:.1e}")
    assert error <= 1e-5
