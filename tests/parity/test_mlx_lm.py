"""Logits against mlx-lm's own Bailing V3 model, on random parameters shared by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.bailing_moe_v3 import Model, ModelArgs

from ling_serve.model.config import ModelConfig
from tests.parity.packed_run import PackedRun
from tests.parity.random_model import random_model, random_parameters, relative_rms, small_config

TOLERANCE = 1e-4
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8, "mscale_all_dim": 0.7}

GRID: dict[str, dict[str, Any]] = {
    "q_lora": {},
    "direct_q": {"q_lora_rank": None, "v_head_dim": 24, "first_k_dense_replace": 2},
    "groups_of_2": {"layer_group_size": 2, "num_hidden_layers": 4, "topk_group": 3, "num_experts_per_tok": 4},
    "tail_of_mla": {"layer_group_size": 3, "num_hidden_layers": 5, "num_attention_heads": 3},
    "only_a_tail": {"layer_group_size": 4, "num_hidden_layers": 2, "first_k_dense_replace": 0},
    "one_expert_group": {"n_group": 1, "topk_group": 1, "num_experts": 6, "num_experts_per_tok": 3},
    "all_groups_kept": {"n_group": 2, "topk_group": 2, "num_shared_experts": 2},
    "five_heads": {"num_attention_heads": 5, "head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 20},
    "yarn": {"rope_scaling": YARN, "layer_group_size": 2},
    "yarn_direct_q": {"q_lora_rank": None, "rope_scaling": YARN | {"mscale_all_dim": 0.0}, "layer_group_size": 2},
    "tied_head": {"tie_word_embeddings": True, "kda_lower_bound": -2.5, "routed_scaling_factor": 1.0},
}


@pytest.mark.parametrize("name", GRID)
def test_one_shot_and_chunked(name: str) -> None:
    values = small_config(**GRID[name])
    tokens = random_tokens(150, seed=1)
    expected = mlx_lm_logits(values, tokens)
    model, config = random_model(values), ModelConfig.from_dict(values)
    errors = {}
    for chunk in (1, 7, 64, 512):
        actual = PackedRun(model, config).feed({"only": tokens}, chunk)["only"]
        errors[chunk] = relative_rms(actual, expected)
    print(name, {chunk: f"{error:.1e}" for chunk, error in errors.items()})
    assert max(errors.values()) <= TOLERANCE


def test_a_prompt_of_several_long_chunks() -> None:
    """Long enough that chunks of 512 begin inside the prompt, at offsets that no block or KDA chunk divides."""
    values = small_config(**GRID["yarn"])
    tokens = random_tokens(700, seed=9)
    expected = mlx_lm_logits(values, tokens)
    model, config = random_model(values), ModelConfig.from_dict(values)
    for chunk in (700, 512, 333, 64):
        error = relative_rms(PackedRun(model, config).feed({"only": tokens}, chunk)["only"], expected)
        print(chunk, f"{error:.1e}")
        assert error <= TOLERANCE


@pytest.mark.parametrize("name", ["q_lora", "direct_q", "tail_of_mla", "yarn"])
def test_packed_sequences(name: str) -> None:
    """Sequences that join one after the other, in mixed steps, with scattered pages; unowned pages hold 1e30."""
    values = small_config(**GRID[name])
    tokens = {"a": random_tokens(90, 2), "b": random_tokens(61, 3), "c": random_tokens(5, 4), "d": random_tokens(33, 5)}
    run = PackedRun(random_model(values), ModelConfig.from_dict(values), seed=7)
    run.poison(1e30)
    plan = [
        {"a": 40},
        {"a": 1, "b": 17},
        {"c": 5, "b": 3, "a": 9},
        {"a": 1, "b": 1, "d": 20},
        {"d": 13, "a": 8, "b": 40},
        {"a": 31},
    ]
    parts: dict[str, list[np.ndarray]] = {sequence: [] for sequence in tokens}
    for step in plan:
        starts = {sequence: run.lengths.get(sequence, 0) for sequence in step}
        pieces = {s: tokens[s][starts[s] : starts[s] + count] for s, count in step.items()}
        for sequence, logits in run.step(pieces).items():
            parts[sequence].append(logits)
    errors = {}
    for sequence, logits in parts.items():
        assert sum(map(len, logits)) == len(tokens[sequence])
        errors[sequence] = relative_rms(np.concatenate(logits), mlx_lm_logits(values, tokens[sequence]))
    print(name, {sequence: f"{error:.1e}" for sequence, error in errors.items()})
    assert max(errors.values()) <= TOLERANCE


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def mlx_lm_logits(values: Mapping[str, Any], tokens: list[int]) -> np.ndarray:
    model = Model(ModelArgs.from_dict(dict(values)))
    model.load_weights(list(random_parameters(dict(values)).items()), strict=True)
    return np.array(model(mx.array([tokens]))[0])
