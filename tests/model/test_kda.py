"""The KDA layer: against mlx-lm's, and against itself when sequences are cut, mixed, moved and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.bailing_moe_v3 import BailingKDA, ModelArgs

from ling_serve.cache.caches import Caches
from ling_serve.model.config import ModelConfig
from ling_serve.model.forward_batch import SHORT_PIECE, ForwardBatch
from ling_serve.model.kda import KdaAttention
from tests.checkpoints import tiny_config
from tests.kernels.kda_truth import assert_close

LAYER = 1
SAME = 1e-5
SHAPE = {"hidden_size": 32, "num_attention_heads": 3, "head_dim": 8}


def config_values(**overrides: object) -> dict[str, object]:
    return tiny_config(**SHAPE, **overrides)


def random_weights(module: nn.Module, seed: int = 0) -> list[tuple[str, mx.array]]:
    """Weights large enough for gates all over their range; keys far from orthogonal."""
    mx.random.seed(seed)
    return [
        (name, mx.random.normal(value.shape) * (0.4 if value.ndim > 1 else 1.0))
        for name, value in tree_flatten(module.parameters())
    ]


def make_layer(seed: int = 0, **overrides: object) -> KdaAttention:
    layer = KdaAttention(ModelConfig.from_dict(config_values(**overrides)))
    layer.load_weights(random_weights(layer, seed))
    return layer


def make_caches(num_slots: int = 6, dtype: mx.Dtype = mx.float32) -> Caches:
    layout = ModelConfig.from_dict(config_values()).cache_layout(dtype)
    return Caches.allocate(layout, num_blocks=1, block_size=16, num_slots=num_slots)


def inputs(T: int, seed: int = 0) -> mx.array:
    return mx.random.normal((T, SHAPE["hidden_size"]), key=mx.random.key(100 + seed))


@dataclass(frozen=True)
class Piece:
    x: mx.array
    read: int
    write: int


def run(layer: KdaAttention, caches: Caches, pieces: Sequence[Piece]) -> list[mx.array]:
    """One step over `pieces`, shortest first as batches are; the outputs come back in the order given."""
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].x))
    lengths = [len(pieces[i].x) for i in order]
    borders = tuple(accumulate(lengths, initial=0))
    nothing = mx.zeros((borders[-1],), mx.int32)
    batch = ForwardBatch(
        tokens=nothing,
        positions=nothing,
        cu_seqlens=borders,
        num_short=sum(length <= SHORT_PIECE for length in lengths),
        page_table=mx.zeros((len(pieces), 1), mx.int32),
        context_lens=tuple(lengths),
        write_at=nothing,
        read_slots=tuple(pieces[i].read for i in order),
        write_slots=tuple(pieces[i].write for i in order),
        logit_rows=nothing,
    )
    y = layer(mx.concatenate([pieces[i].x for i in order]), batch, caches, LAYER)
    mx.eval(y, caches.arrays())
    by_piece = {i: y[borders[row] : borders[row + 1]] for row, i in enumerate(order)}
    return [by_piece[i] for i in range(len(pieces))]


def run_cut(layer: KdaAttention, caches: Caches, x: mx.array, cuts: Sequence[int], slot: int = 0) -> mx.array:
    """One sequence alone, cut at `cuts`, from the zero slot."""
    outputs: list[mx.array] = []
    for start, end in zip((0, *cuts), (*cuts, len(x)), strict=True):
        read = slot if start else caches.states.zero_slot
        outputs += run(layer, caches, [Piece(x[start:end], read, slot)])
    return mx.concatenate(outputs)


def test_parameters_are_named_and_shaped_as_in_mlx_lm() -> None:
    ours, theirs = make_layer(), BailingKDA(ModelArgs.from_dict(config_values()))
    shapes = {name: value.shape for name, value in tree_flatten(ours.parameters())}
    assert shapes == {name: value.shape for name, value in tree_flatten(theirs.parameters())}


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("bound", [-5.0, -1.5])
def test_values_and_gradients_equal_mlx_lm(kernel: int, bound: float) -> None:
    overrides = {"short_conv_kernel_size": kernel, "kda_lower_bound": bound}
    ours, theirs = make_layer(**overrides), BailingKDA(ModelArgs.from_dict(config_values(**overrides)))
    theirs.load_weights(tree_flatten(ours.parameters()))
    x = mx.stack([inputs(37, seed) for seed in range(2)])
    assert_close(ours.dense(x), theirs(x), SAME, "y")
    weights = mx.random.normal(x.shape, key=mx.random.key(7))

    def gradients(module: nn.Module, forward: Callable[[mx.array], mx.array]) -> dict[str, mx.array]:
        loss = nn.value_and_grad(module, lambda x: (forward(x) * weights).sum())
        return dict(tree_flatten(loss(x)[1]))

    expected = gradients(theirs, theirs)
    for name, gradient in gradients(ours, ours.dense).items():
        assert_close(gradient, expected[name], 1e-4, f"gradient of {name}")


@pytest.mark.parametrize("step", [1, 2, 7, 16, 64])
def test_cut_at_any_length_gives_the_same(step: int) -> None:
    layer, x = make_layer(), inputs(150)
    expected = layer.dense(x[None])[0]
    y = run_cut(layer, make_caches(), x, range(step, len(x), step))
    assert_close(y, expected, SAME, f"pieces of {step}")


@pytest.mark.parametrize("cuts", [(), (1,), (15,), (17, 18, 19), (64,), (100, 101, 103, 149)])
def test_prefill_then_decode_gives_the_same(cuts: tuple[int, ...]) -> None:
    layer, x = make_layer(), inputs(150)
    assert_close(run_cut(layer, make_caches(), x, cuts), layer.dense(x[None])[0], SAME, f"cut at {cuts}")


def test_short_and_long_pieces_in_one_step_equal_each_alone() -> None:
    layer, caches = make_layer(), make_caches()
    lengths = [(40, 1, 1), (1, 70, 1), (90, 33, 2), (5, 1, 64), (33, 90, 90)]
    sequences = [inputs(sum(steps), seed) for seed, steps in enumerate(lengths)]
    outputs: list[list[mx.array]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in range(3):
        pieces = [
            Piece(x[done[i] : done[i] + lengths[i][step]], i if step else caches.states.zero_slot, i)
            for i, x in enumerate(sequences)
        ]
        for i, y in enumerate(run(layer, caches, pieces)):
            outputs[i].append(y)
            done[i] += lengths[i][step]
    for i, x in enumerate(sequences):
        assert_close(mx.concatenate(outputs[i]), layer.dense(x[None])[0], SAME, f"sequence {i}")


def test_sequences_may_change_order_and_slots_between_steps() -> None:
    layer, caches = make_layer(), make_caches(num_slots=9)
    sequences = [inputs(12, seed) for seed in range(4)]
    slots = [5, 0, 7, 2]
    outputs = [[y] for y in run(layer, caches, _next(sequences, 0, 8, [caches.states.zero_slot] * 4, slots))]
    orders = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (1, 3), (2, 3, 1, 0)]
    done = [8] * 4
    for turn, order in enumerate(orders):
        target = {i: slots[i] if turn % 2 else (slots[i] + 1) % 9 for i in order}  # moved, or left where it is
        pieces = [Piece(sequences[i][done[i] : done[i] + 1], slots[i], target[i]) for i in order]
        for i, y in zip(order, run(layer, caches, pieces), strict=True):
            outputs[i].append(y)
            slots[i], done[i] = target[i], done[i] + 1
    for i, x in enumerate(sequences):
        assert_close(mx.concatenate(outputs[i]), layer.dense(x[None])[0], SAME, f"sequence {i}")


def _next(
    sequences: Sequence[mx.array], start: int, end: int, reads: Sequence[int], writes: Sequence[int]
) -> list[Piece]:
    return [Piece(x[start:end], read, write) for x, read, write in zip(sequences, reads, writes, strict=True)]


@pytest.mark.parametrize("first_length", [1, 20])
def test_a_new_owner_of_a_slot_starts_from_zero(first_length: int) -> None:
    """Reading the slot itself instead of the zero slot carries the last owner's state over, and shows."""
    layer, caches = make_layer(), make_caches()
    run_cut(layer, caches, inputs(50, seed=1), (20, 49))
    x = inputs(40, seed=2)
    expected = layer.dense(x[None])[0]
    assert_close(run_cut(layer, caches, x, (first_length,)), expected, SAME, "after reuse")
    stale = run(layer, caches, [Piece(x, 0, 0)])[0]
    assert mx.abs(stale - expected).max().item() > 1e-2


def test_a_reset_slot_reads_as_zero() -> None:
    layer, caches = make_layer(), make_caches()
    run_cut(layer, caches, inputs(50, seed=1), (49,))
    caches.states.reset(0)
    x = inputs(9, seed=2)
    assert_close(run(layer, caches, [Piece(x, 0, 0)])[0], layer.dense(x[None])[0], SAME, "after reset")


def test_dropped_rows_and_strangers_leave_live_slots_alone() -> None:
    """Scratch rows are dropped, and a slot that no piece writes comes back bit for bit."""
    layer, caches = make_layer(), make_caches()
    states = caches.states
    run(layer, caches, _next([inputs(30, seed) for seed in range(3)], 0, 30, [states.zero_slot] * 3, [0, 1, 2]))
    before = states.read(LAYER, [0, 1, 2])
    kept = [mx.array(before.conv), mx.array(before.recurrent)]
    poison = 1e30 * mx.ones((1, SHAPE["hidden_size"]))
    pieces = [
        Piece(poison, states.zero_slot, states.scratch_slot),
        Piece(poison, 1, states.scratch_slot),
        Piece(mx.repeat(poison, 20, axis=0), 2, states.scratch_slot),
        Piece(inputs(1, seed=9), 0, 4),
    ]
    run(layer, caches, pieces)
    after = states.read(LAYER, [0, 1, 2])
    assert mx.array_equal(after.conv, kept[0])
    assert mx.array_equal(after.recurrent, kept[1])
    assert not states.read(LAYER, [states.zero_slot]).recurrent.any().item()


def test_a_fork_reads_its_source_as_it_was_before_the_step() -> None:
    layer, caches = make_layer(), make_caches()
    prompt, a, b = inputs(20), inputs(1, seed=1), inputs(40, seed=2)
    run(layer, caches, [Piece(prompt, caches.states.zero_slot, 0)])
    outputs = run(layer, caches, [Piece(a, 0, 0), Piece(b, 0, 1)])  # the short piece moves slot 0 on
    for name, x, y in (("kept", a, outputs[0]), ("forked", b, outputs[1])):
        whole = layer.dense(mx.concatenate([prompt, x])[None])[0]
        assert_close(y, whole[len(prompt) :], SAME, name)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_weights(dtype: mx.Dtype) -> None:
    layer, caches, x = make_layer(), make_caches(dtype=dtype), inputs(100)
    layer.apply_to_modules(lambda _, module: isinstance(module, nn.Linear) and module.set_dtype(dtype))
    expected = layer.dense(x[None])[0]
    y = run_cut(layer, caches, x.astype(dtype), (30, 31, 32, 90))
    state = caches.states.read(LAYER, [0])
    assert (y.dtype, state.conv.dtype, state.recurrent.dtype) == (dtype, dtype, mx.float32)
    assert_close(y, expected, 2e-2, f"{dtype} against float32 inputs")
    assert_close(y, layer.dense(x.astype(dtype)[None])[0], 5e-3, f"{dtype}, cut against whole")


def test_new_weights_replace_the_convolution_made_from_the_old() -> None:
    layer, x = make_layer(seed=0), inputs(9)
    run_cut(layer, make_caches(), x, (8,))
    layer.load_weights(random_weights(layer, seed=1))
    assert_close(run_cut(layer, make_caches(), x, (8,)), make_layer(seed=1).dense(x[None])[0], SAME, "y")
