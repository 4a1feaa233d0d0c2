"""Each layer has a cache of its own kind and its own index, and touches no other's."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from ling_serve.cache import LatentPool
from ling_serve.model.bailing_v3 import DecoderLayer
from ling_serve.model.config import AttentionKind, ModelConfig
from ling_serve.model.kda import KdaAttention
from ling_serve.model.mla import MlaAttention
from ling_serve.model.mla_plan import plan_mla
from ling_serve.model.rope import RotaryTurns
from tests.parity.packed_run import BLOCK_SIZE, PackedRun
from tests.parity.random_model import random_model, small_config

VALUES = small_config(num_hidden_layers=5, layer_group_size=2)  # KMKMM: a tail that is MLA without a KDA layer
CONFIG = ModelConfig.from_dict(VALUES)
MLA_LAYERS = (1, 3, 4)
POISON = 1e30


@pytest.fixture
def run() -> PackedRun:
    """Two sequences of 20 and 9 tokens in every cache."""
    made = PackedRun(random_model(VALUES), CONFIG, seed=3)
    made.step({"a": list(range(20)), "b": list(range(40, 49))})
    return made


def poison(pool: LatentPool, layer: int) -> None:
    rows = pool.num_blocks * pool.block_size
    pool.write(layer, mx.arange(rows), mx.full((rows, pool.arrays()[0].shape[-1]), POISON))


def one_layer(run: PackedRun, layer: int, length: int = 1) -> np.ndarray:
    """The layer alone over the next tokens of each sequence, which stay unknown to the run."""
    batch = run.batch([("a", [1] * length), ("b", [2] * length)])
    run.lengths = {name: end - length for name, end in run.lengths.items()}
    x = mx.random.normal((2 * length, 48), key=mx.random.key(layer))
    plan = plan_mla(CONFIG, batch, BLOCK_SIZE, RotaryTurns(CONFIG))
    assert bool(plan.materialised) == (length > 1)
    y = run.model.model.layers[layer](x, batch, run.caches, plan)
    mx.eval(y, run.caches.arrays())
    return np.array(y)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("layer", MLA_LAYERS)
def test_an_mla_layer_reads_its_own_latents_and_no_others(run: PackedRun, layer: int, length: int) -> None:
    """In both forms of attention."""
    pool, expected = run.caches.latents, one_layer(run, layer, length)
    for other in set(MLA_LAYERS) - {layer}:
        poison(pool, other)
    assert np.array_equal(one_layer(run, layer, length), expected)
    poison(pool, layer)
    assert not np.array_equal(one_layer(run, layer, length), expected)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("layer", MLA_LAYERS)
def test_an_mla_layer_writes_its_own_latents_and_no_others(run: PackedRun, layer: int, length: int) -> None:
    for each in MLA_LAYERS:
        poison(run.caches.latents, each)
    one_layer(run, layer, length)
    changed = {
        each
        for each, pool in zip(MLA_LAYERS, run.caches.latents.arrays(), strict=True)
        if (np.array(pool)[:-1] != np.float32(POISON)).any()
    }
    assert changed == {layer}


@pytest.mark.parametrize("layer", [0, 2])
def test_a_kda_layer_moves_its_own_states_and_no_others(run: PackedRun, layer: int) -> None:
    states = run.caches.states
    slots = range(states.num_slots)
    before = {each: np.array(states.read(each, slots).recurrent) for each in (0, 2)}
    one_layer(run, layer)
    moved = {each for each in (0, 2) if not np.array_equal(np.array(states.read(each, slots).recurrent), before[each])}
    assert moved == {layer}


def test_a_layer_that_has_no_latents_is_an_error_and_no_other_layers(run: PackedRun) -> None:
    for kda_layer in (0, 2):
        with pytest.raises(KeyError):
            run.caches.latents.pages(kda_layer, mx.array([[0]]))
        with pytest.raises(KeyError):
            run.caches.latents.blocks(kda_layer)
        with pytest.raises(KeyError):
            run.caches.latents.write(kda_layer, mx.array([0]), mx.zeros((1, 40)))


@pytest.mark.parametrize("group", range(1, 8))
def test_every_layer_has_exactly_one_kind_of_cache(group: int) -> None:
    for count in range(1, 15):
        config = ModelConfig.from_dict(small_config(num_hidden_layers=count, layer_group_size=group))
        layout = config.cache_layout(mx.float32)
        assert sorted([*layout.mla_layers, *layout.kda_layers]) == list(range(count))


def test_what_a_layer_is_made_of_follows_from_its_kind_alone() -> None:
    class Other(Enum):
        LINEAR = "linear"

    for plan in CONFIG.layers:
        attention = DecoderLayer(CONFIG, plan).attention
        assert type(attention) is (MlaAttention if plan.attention is AttentionKind.MLA else KdaAttention)
    with pytest.raises(KeyError, match="LINEAR"):
        DecoderLayer(CONFIG, replace(CONFIG.layers[0], attention=cast("Any", Other.LINEAR)))
