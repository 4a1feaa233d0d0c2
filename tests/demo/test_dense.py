"""The training forward computes what the served model computes, and its hand-made parts have the right gradients."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ling_serve.demo import dense, parameters
from ling_serve.model.config import ModelConfig
from tests.parity.packed_run import PackedRun
from tests.parity.random_model import random_model, random_parameters, relative_rms, small_config


@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": None, "num_hidden_layers": 6, "n_group": 2}])
def test_it_agrees_with_the_served_model(overrides: dict[str, Any]) -> None:
    values = small_config(**overrides)
    config = ModelConfig.from_dict(values)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 48))
    logits, chosen = dense.forward(random_parameters(values), config, mx.array(tokens), mx.float32)
    served = PackedRun(random_model(values), config).feed({str(i): row.tolist() for i, row in enumerate(tokens)}, 48)
    error = max(relative_rms(np.array(logits[i]), served[str(i)]) for i in range(2))
    print(f"relative RMS {error:.1e}")
    assert error < 1e-5
    assert (np.array(chosen.sum(axis=-1)) == config.num_experts_per_tok).all()


def test_sequences_that_share_a_row_know_nothing_of_each_other() -> None:
    values = small_config()
    config = ModelConfig.from_dict(values)
    weights = random_parameters(values)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, 64))
    sequence = np.repeat([1, 2, 4, 4], 16)[None]
    together, _ = dense.forward(weights, config, mx.array(tokens), mx.float32, mx.array(sequence))
    parts = [
        dense.forward(weights, config, mx.array(tokens[:, sequence[0] == name]), mx.float32)[0] for name in (1, 2, 4)
    ]
    error = relative_rms(np.array(together), np.concatenate([np.array(part) for part in parts], axis=1))
    print(f"relative RMS {error:.1e}")
    assert error < 1e-5
    alone, _ = dense.forward(weights, config, mx.array(tokens), mx.float32)
    assert relative_rms(np.array(together), np.array(alone)) > 0.05


def recurrent(q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array) -> mx.array:
    """The delta rule token by token, from its definition."""
    state = mx.zeros((*q.shape[:2], q.shape[-1], v.shape[-1]))
    out: list[mx.array] = []
    for t in range(q.shape[2]):
        state = mx.exp(decay[:, :, t])[..., None] * state
        key, query = k[:, :, t, :, None], q[:, :, t, :, None]
        update = beta[:, :, t, None] * (v[:, :, t] - (key * state).sum(axis=-2))
        state = state + key * update[:, :, None]
        out.append((query * state).sum(axis=-2))
    return mx.stack(out, axis=2)


@pytest.mark.parametrize("strength", [0.1, 5.0])
def test_chunked_kda_and_its_gradient(strength: float) -> None:
    mx.random.seed(3)
    shape = (1, 2, 48, 8)
    q, k, v, g, weight = (mx.random.normal(shape) for _ in range(5))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    inputs = [q, k, v, -strength * mx.sigmoid(4.0 * g), mx.random.uniform(shape=shape[:3])]
    sequence = mx.zeros((1, 48), dtype=mx.int32)
    grad = tuple(range(5))
    chunked = mx.value_and_grad(lambda *a: (weight * dense.kda_chunked(*a, sequence)).sum(), argnums=grad)(*inputs)
    plain = mx.value_and_grad(lambda *a: (weight * recurrent(*a)).sum(), argnums=grad)(*inputs)
    errors = [relative_rms(np.array(a), np.array(b)) for a, b in zip(chunked[1], plain[1], strict=True)]
    print("gradients of q, k, v, decay, beta:", [f"{error:.1e}" for error in errors])
    assert abs(chunked[0].item() - plain[0].item()) < 1e-3
    assert max(errors) < 2e-5


def test_the_official_layout_and_back() -> None:
    config = ModelConfig.from_dict(small_config())
    fresh = parameters.initial_parameters(config, seed=4)
    assert {name: value.shape for name, value in fresh.items()} == {
        name: value.shape for name, value in random_parameters(small_config()).items()
    }
    official = parameters.official_layout(fresh, config)
    assert official["model.layers.0.attention.q_conv1d.weight"].shape == (32, 1, 4)
    assert official["model.layers.3.attention.kv_b_proj.weight"].shape == (2 * 32, 32)
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in official
    back = parameters.from_official_layout(official, config)
    assert all((back[name] == value).all() for name, value in fresh.items())
    assert set(back) == set(fresh)
