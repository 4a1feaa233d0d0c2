from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.bailing_moe_v3 import Model, ModelArgs

from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig
from tests.parity.packed_run import PackedRun
from tests.parity.random_model import FLASH_LIKE, random_model, relative_rms, small_config


@pytest.mark.parametrize("overrides", [{}, FLASH_LIKE, {"tie_word_embeddings": True}])
def test_parameter_paths_are_those_of_mlx_lm(overrides: dict[str, Any]) -> None:
    values = small_config(**overrides)
    ours = BailingV3(ModelConfig.from_dict(values)).parameters()
    theirs = Model(ModelArgs.from_dict(values)).parameters()
    assert {path: array.shape for path, array in tree_flatten(ours)} == {
        path: array.shape for path, array in tree_flatten(theirs)
    }


@pytest.mark.parametrize(("fused", "products_per_layer"), [(False, 3), (True, 2)])
def test_weights_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch, fused: bool, products_per_layer: int) -> None:
    """The head and each layer's expert projections run once, for 1 sequence and for 16, as stored and as served."""
    values = small_config()
    model = random_model(values)
    if fused:
        model.fuse()
    expert_calls: list[int] = []
    head_calls: list[tuple[int, ...]] = []
    multiply, head = mx.gather_mm, model.lm_head

    def count_experts(rows: mx.array, weight: mx.array, **options: Any) -> mx.array:
        if weight.shape[0] == values["num_experts"]:  # latents are multiplied page by page with it too
            expert_calls.append(weight.shape[0])
        return multiply(rows, weight, **options)

    def count_head(hidden: mx.array) -> mx.array:
        head_calls.append(hidden.shape)
        return head(hidden)

    monkeypatch.setattr(mx, "gather_mm", count_experts)
    monkeypatch.setitem(model, "lm_head", count_head)
    for sequences in (1, 16):
        expert_calls.clear()
        head_calls.clear()
        run = PackedRun(model, ModelConfig.from_dict(values), num_slots=16)
        run.step({str(number): [number] for number in range(sequences)})
        print(sequences, len(expert_calls), head_calls)
        assert len(expert_calls) == products_per_layer * 3  # gate, up (joined when fused) and down of three layers
        assert head_calls == [(sequences, 48)]


@pytest.mark.parametrize("overrides", [{}, FLASH_LIKE])
def test_batched_logits_equal_solo_logits(overrides: dict[str, Any]) -> None:
    values = small_config(**overrides)
    model, config = random_model(values), ModelConfig.from_dict(values)
    rng = np.random.default_rng(0)
    prompts = {str(n): rng.integers(0, 97, 3 + 17 * n).tolist() for n in range(6)}
    together = PackedRun(model, config).feed(prompts, 24)
    for name, prompt in prompts.items():
        alone = PackedRun(model, config, seed=5).feed({name: prompt}, 512)[name]
        error = relative_rms(together[name], alone)
        print(name, f"{error:.1e}")
        assert error <= 1e-5


def test_a_dropped_write_leaves_the_sequence_where_it_was() -> None:
    """A rejected draft: its states go to the scratch slot, its latents are overwritten by the tokens that come."""
    values = small_config()
    model, config = random_model(values), ModelConfig.from_dict(values)
    run, expected_run = PackedRun(model, config), PackedRun(model, config)
    prompt, draft, taken = [5, 6, 7, 8, 9, 10], [1, 2, 3], [4, 50, 60, 70]
    for each in (run, expected_run):
        each.step({"a": prompt})
    batch = run.batch([("a", draft)])
    model(dataclasses.replace(batch, write_slots=(run.caches.states.scratch_slot,)), run.caches)
    run.lengths["a"] -= len(draft)
    actual, expected = run.step({"a": taken})["a"], expected_run.step({"a": taken})["a"]
    assert np.array_equal(actual, expected)


def test_a_fork_reads_one_slot_and_writes_another() -> None:
    values = small_config()
    model, config = random_model(values), ModelConfig.from_dict(values)
    run = PackedRun(model, config)
    prompt = list(range(20))
    run.step({"a": prompt})
    batch = run.batch([("a", [21])])
    forked = dataclasses.replace(batch, write_slots=(run.caches.states.num_slots - 1,))
    first = np.array(model.logits(model(forked, run.caches)))
    again = np.array(model.logits(model(batch, run.caches)))
    assert np.array_equal(first, again)
