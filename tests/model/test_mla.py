from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ling_kernels.paged_mla_decode import attend_page_by_page, attend_pages, paged_mla_decode, reference
from mlx_lm.models.rope_utils import apply_yarn_mscale, initialize_rope

from ling_serve.model import mla_plan
from ling_serve.model.config import ModelConfig
from ling_serve.model.dense_weights import dense_weight
from ling_serve.model.mla import MlaAttention
from ling_serve.model.mla_plan import plan_mla, prefers_absorbed
from ling_serve.model.rope import RotaryTurns, rotate, softmax_scale
from tests.parity.dense_reference import frequencies
from tests.parity.packed_run import BLOCK_SIZE, PackedRun
from tests.parity.random_model import random_model, relative_rms, small_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8, "mscale_all_dim": 0.7}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "yarn": YARN,
    "yarn_defaults": {"rope_type": "deepseek_yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "linear": {"type": "linear", "factor": 3.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_positions(name: str) -> None:
    """Against float64 at far positions, and against mlx-lm (whose frequencies are float32 powers) at near ones."""
    scaling = SCALINGS[name]
    values = small_config(rope_scaling=scaling, qk_rope_head_dim=32, rope_theta=6e6)
    turns = RotaryTurns(ModelConfig.from_dict(values))
    x = mx.random.normal((5, 3, 32), key=mx.random.key(0))
    positions = [7, 0, 300, 41, 300]
    actual = np.array(rotate(x, turns(mx.array(positions))))

    rope = initialize_rope(32, 6e6, True, scaling)
    expected = np.stack([np.array(rope(x[row][:, None], offset=at))[:, 0] for row, at in enumerate(positions)])
    error = relative_rms(actual, expected)
    assert error <= 5e-6

    far = [131071, 90001]
    rate = frequencies(values) if name != "linear" else 6e6 ** (-np.arange(0, 32, 2) / 32) / 3.0
    expected_far = np.exp(1j * np.outer(far, rate)) * np.linalg.norm(expected[0, 0]) / np.linalg.norm(np.array(x[0, 0]))
    error_far = np.abs(np.array(turns(mx.array(far)))[:, 0] - expected_far).max()
    print(name, f"{error:.1e} {error_far:.1e}")
    assert error_far <= 2e-2  # half a unit in the last place of an angle of 131,071


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_softmax_scale(scaling: dict[str, Any] | None) -> None:
    config = ModelConfig.from_dict(small_config(rope_scaling=scaling))
    assert softmax_scale(config) == pytest.approx(apply_yarn_mscale(24**-0.5, scaling), rel=1e-12)


def test_break_even_by_operations() -> None:
    tiny = ModelConfig.from_dict(
        small_config(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    )
    # T·512·256 + T·L·1088 < L·512·256 + T·L·320, so at a long context below 131072 / 768 ≈ 170 tokens.
    assert prefers_absorbed(tiny, 169, 10**6)
    assert not prefers_absorbed(tiny, 171, 10**6)
    assert not prefers_absorbed(tiny, 100, 100)
    assert prefers_absorbed(tiny, 100, 250)
    assert all(prefers_absorbed(tiny, length, length) for length in range(1, 9))


@pytest.mark.parametrize("overrides", [{}, {"rope_scaling": YARN, "num_attention_heads": 3, "v_head_dim": 20}])
def test_both_forms_agree(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of several lengths over contexts of several lengths, fresh ones too, in every form and tile size."""
    values = small_config(num_hidden_layers=1, layer_group_size=1, first_k_dense_replace=1, **overrides)
    model, config = random_model(values), ModelConfig.from_dict(values)
    rng = np.random.default_rng(0)
    first = {name: rng.integers(0, 97, count).tolist() for name, count in {"a": 37, "b": 64, "c": 5, "d": 100}.items()}
    second = {name: rng.integers(0, 97, count).tolist() for name, count in {"c": 1, "a": 9, "e": 30, "b": 55}.items()}

    def logits(absorbed: bool, tile_scores: int, expanded: int = 1 << 26) -> np.ndarray:
        monkeypatch.setattr(mla_plan, "prefers_absorbed", lambda *_: absorbed)
        monkeypatch.setattr(mla_plan, "TILE_SCORES", tile_scores)
        monkeypatch.setattr(reference, "TILE_SCORES", tile_scores)
        monkeypatch.setattr(mla_plan, "EXPANDED_VALUES", expanded)
        run = PackedRun(model, config)
        return np.concatenate([*run.step(first).values(), *run.step(second).values()])

    expected = logits(absorbed=True, tile_scores=1 << 20)
    errors = {
        "absorbed tiles": relative_rms(logits(absorbed=True, tile_scores=1), expected),
        "least tiles": relative_rms(logits(absorbed=False, tile_scores=1), expected),
        "tiles": relative_rms(logits(absorbed=False, tile_scores=5000), expected),
        "whole": relative_rms(logits(absorbed=False, tile_scores=1 << 20), expected),
        "head by head": relative_rms(logits(absorbed=False, tile_scores=5000, expanded=1), expected),
    }
    print({form: f"{error:.1e}" for form, error in errors.items()})
    assert max(errors.values()) <= 1e-5


def test_quantised_up_projections() -> None:
    """Pieces in either form take the dequantised weights for what they are."""
    values = small_config(num_hidden_layers=1, layer_group_size=1, qk_nope_head_dim=32)
    quantised, plain, config = random_model(values), random_model(values), ModelConfig.from_dict(values)
    for name in ("embed_q", "unembed_out"):
        attention = quantised.model.layers[0].attention
        setattr(attention, name, getattr(attention, name).to_quantized(group_size=32, bits=8))
        weight = dense_weight(getattr(attention, name), slice(0, 2))
        getattr(plain.model.layers[0].attention, name).weight = weight
        assert np.array_equal(np.array(dense_weight(getattr(attention, name), slice(1, 2))), np.array(weight[1:]))
    tokens = list(range(60))
    for chunk in (1, 60):
        actual = PackedRun(quantised, config).feed({"a": tokens}, chunk)["a"]
        expected = PackedRun(plain, config).feed({"a": tokens}, chunk)["a"]
        error = relative_rms(actual, expected)
        print(chunk, f"{error:.1e}")
        assert error <= 1e-5


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("tokens", [1, 3])
def test_absorbed_attention_over_pages(tokens: int, block_size: int) -> None:
    """Both forms against float64, at contexts around a block's borders, pages out of order, unused ones poisoned."""
    rng = np.random.default_rng(0)
    H, W, V, b = 3, 20, 12, 3
    ends = [tokens, block_size - 1, block_size, block_size + 1, 3 * block_size]
    pool = np.full((2 + b * len(ends), block_size, W), 1e30, dtype=np.float32)
    page_ids = rng.permutation(len(pool))[: b * len(ends)].reshape(len(ends), b)
    queries = rng.standard_normal((len(ends), tokens, H, W)).astype(np.float32)
    bias = np.full((len(ends), tokens, b * block_size), -np.inf, dtype=np.float32)
    expected = np.zeros((len(ends), tokens, H, V))
    for r, end in enumerate(ends):
        latents = rng.standard_normal((end, W)).astype(np.float32)
        for at, row in enumerate(latents):
            pool[page_ids[r, at // block_size], at % block_size] = row
        for t in range(tokens):
            seen = latents[: end - tokens + t + 1].astype(np.float64)
            bias[r, t, : len(seen)] = 0.0
            weights = np.exp(queries[r, t].astype(np.float64) @ seen.T)
            expected[r, t] = (weights / weights.sum(-1, keepdims=True) @ seen)[:, :V]
    arrays = [mx.array(a) for a in (queries, pool, page_ids.astype(np.int32), bias)]
    for form in (attend_pages, attend_page_by_page, paged_mla_decode):
        error = relative_rms(np.array(form(*arrays, V)), expected)
        print(form.__name__, f"{error:.1e}")
        assert error <= 1e-5


def test_the_latents_are_stored_where_the_batch_says() -> None:
    """Read back from the pool: kv_a_layernorm(c) ‖ rotated k; every other row keeps its bits."""
    values = small_config(num_hidden_layers=1, layer_group_size=1)
    config = ModelConfig.from_dict(values)
    run = PackedRun(random_model(values), config)
    run.poison(1e30)
    attention = run.model.model.layers[0].attention
    assert isinstance(attention, MlaAttention)
    x = mx.random.normal((12, 48), key=mx.random.key(1))
    batch = run.batch([("a", [0]), ("b", [0] * 2), ("c", [0] * 9)])
    turns = RotaryTurns(config)
    attention(x, batch, run.caches, 0, plan_mla(config, batch, BLOCK_SIZE, turns))
    (pool,) = run.caches.latents.arrays()
    rows = np.array(pool).reshape(-1, config.latent_width)

    c, k = mx.split(attention.kv_a_proj_with_mqa(x), [32], axis=-1)
    expected = mx.concatenate([attention.kv_a_layernorm(c), rotate(k[:, None], turns(batch.positions))[:, 0]], axis=-1)
    written = np.array(batch.write_at)
    assert np.array_equal(rows[written], np.array(expected))
    own_blocks = set(written // BLOCK_SIZE) | {run.caches.latents.scratch_block}
    unowned = [row for row in range(len(rows)) if row // BLOCK_SIZE not in own_blocks]
    assert (rows[unowned] == np.float32(1e30)).all()


def test_groups_of_similar_length() -> None:
    """Each piece is in one group, padding at most doubles a gather, and `back` undoes the regrouping."""
    config = ModelConfig.from_dict(small_config())
    contexts = [40, 900, 300, 2000, 513, 1024, 700, 16, 5000, 45]
    pieces = [1, 1, 1, 1, 1, 1, 1, 3, 3, 40]
    run = PackedRun(random_model(small_config()), config, num_blocks=1000, num_slots=10)
    for number, (context, piece) in enumerate(zip(contexts, pieces, strict=True)):
        run.lengths[str(number)] = context - piece
    batch = run.batch([(str(number), [0] * piece) for number, piece in enumerate(pieces)])
    plan = plan_mla(config, batch, BLOCK_SIZE, RotaryTurns(config))
    assert plan.back is not None
    order: list[int] = []
    for group in plan.absorbed:
        rows = list(range(50))[group.rows] if isinstance(group.rows, slice) else np.array(group.rows).tolist()
        order += rows
        visible = (np.array(group.bias) == 0).sum(axis=-1)
        assert visible.flatten().tolist() == (np.array(batch.positions)[rows] + 1).tolist()
        gathered = group.bias.shape[-1]
        assert gathered == group.page_ids.shape[1] * BLOCK_SIZE
        assert all(gathered < 2 * seen + BLOCK_SIZE or gathered <= 512 for seen in visible[:, -1])
    order += [row for piece in plan.materialised for row in range(piece.rows.start, piece.rows.stop)]
    assert sorted(order) == list(range(sum(pieces)))
    assert [order[place] for place in np.array(plan.back)] == list(range(sum(pieces)))
    assert len(plan.absorbed) < 7


def test_a_gather_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_plan, "GATHER_TOKENS", 1024)
    config = ModelConfig.from_dict(small_config())
    run = PackedRun(random_model(small_config()), config)
    batch = run.batch([(str(number), [0]) for number in range(5)])
    plan = plan_mla(config, batch, BLOCK_SIZE, RotaryTurns(config))
    assert [group.page_ids.shape[0] for group in plan.absorbed] == [2, 2, 1]
