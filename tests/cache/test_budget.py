"""Tiny's geometry on an 18 GB Mac, and what happens where it does not fit."""

from dataclasses import replace

import mlx.core as mx
import pytest

from ling_serve.cache import CacheLayout
from ling_serve.cache.budget import MemoryPlan, plan_memory
from ling_serve.config import EngineOptions
from ling_serve.errors import ConfigError

GIB = 1 << 30
TINY = CacheLayout(
    mla_layers=(3, 7, 11, 15, 19, 23),
    kda_layers=tuple(i for i in range(24) if i % 4 != 3),
    latent_width=576,
    latent_dtype=mx.bfloat16,
    conv_taps=3,
    conv_width=3 * 2048,
    conv_dtype=mx.bfloat16,
    num_heads=16,
    key_dim=128,
    value_dim=128,
)


def plan(weights_gib: float = 4.82, options: EngineOptions | None = None, **changes: int) -> MemoryPlan:
    values = {"step_bytes": GIB, "memory_limit_bytes": 12 * GIB, "model_max_len": 131072} | changes
    return plan_memory(TINY, weight_bytes=int(weights_gib * GIB), options=options or EngineOptions(), **values)


def test_the_published_sizes_of_tiny() -> None:
    assert TINY.bytes_per_token == 6912
    assert TINY.bytes_per_slot == 18_874_368 + 663_552  # 18.87 MB fp32 state + 0.66 MB bf16 convolution history


@pytest.mark.parametrize(("name", "weights_gib"), [("4 bit", 4.82), ("mxfp8", 8.04)])
def test_tiny_fits_into_12_gib(name: str, weights_gib: float) -> None:
    made = plan(weights_gib)
    print(f"\nTiny, {name}, 12 GiB\n{made.table()}")
    used = int(weights_gib * GIB) + GIB + (16 + 2) * TINY.bytes_per_slot + (made.num_blocks + 1) * made_block_bytes()
    assert made.max_model_len == 131072
    assert made.num_slots == 16
    assert int(12 * GIB * 0.9) - made_block_bytes() < used <= int(12 * GIB * 0.9)


def made_block_bytes() -> int:
    return 32 * TINY.bytes_per_token


def test_states_are_sized_by_max_num_seqs_alone() -> None:
    """Reserving for 256 sequences would leave nothing on this machine."""
    two, sixteen = plan(8.04, EngineOptions(max_num_seqs=2)), plan(8.04, EngineOptions(max_num_seqs=16))
    assert two.num_slots == 2
    assert (two.num_blocks - sixteen.num_blocks) * made_block_bytes() == pytest.approx(
        14 * TINY.bytes_per_slot, abs=made_block_bytes()
    )


def test_blocks_never_exceed_what_the_sequences_can_use() -> None:
    made = plan(options=EngineOptions(max_num_seqs=2, max_model_len=2048))
    assert made.num_blocks == 2 * 2048 // 32
    assert made.max_model_len == 2048


def test_the_context_shrinks_to_what_fits() -> None:
    made = plan(9.0)
    assert made.max_model_len == made.num_blocks * 32
    assert 2 <= made.max_model_len < 131072
    assert dict(made.rows)["context that fits"].endswith("of 131,072 tokens")


def test_a_step_that_grows_with_its_context_is_paid_for_once() -> None:
    growing = plan(8.04, step_bytes_per_token=4096)
    fixed = plan(8.04)
    assert growing.max_model_len == 131072
    assert (fixed.num_blocks - growing.num_blocks) * made_block_bytes() == pytest.approx(
        131072 * 4096, abs=2 * made_block_bytes()
    )


def test_a_context_that_was_asked_for_and_does_not_fit_is_an_error_with_the_table() -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 131072, but only") as caught:
        plan(9.0, EngineOptions(max_model_len=131072))
    for label in ("device memory", "weights", "largest step", "KDA states", "MLA latents", "context that fits"):
        assert label in caught.value.message


def test_weights_larger_than_memory_are_an_error_with_the_deficit() -> None:
    with pytest.raises(ConfigError, match="raise --memory-utilization") as caught:
        plan(14.7)
    print(caught.value.message)
    assert "left for latents" in caught.value.message
    assert "-5." in caught.value.message


def test_a_deficit_is_not_divided_by_what_a_block_costs() -> None:
    with pytest.raises(ConfigError, match="the caches do not fit"):
        plan(9.8, step_bytes_per_token=4096)
    with pytest.raises(ConfigError, match="the caches do not fit"):
        plan(14.7, step_bytes_per_token=4096)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 131072"):
        plan(options=EngineOptions(max_model_len=131073))


def test_a_model_without_mla_layers_is_not_limited_by_latents() -> None:
    layout = replace(TINY, mla_layers=())
    made = plan_memory(
        layout,
        weight_bytes=0,
        step_bytes=0,
        memory_limit_bytes=GIB,
        options=EngineOptions(),
        model_max_len=100,
    )
    assert made.max_model_len == 100
