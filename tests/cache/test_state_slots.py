import gc
import random
from dataclasses import replace

import mlx.core as mx
import pytest

from ling_serve.cache import CacheLayout, KdaState, StateSlotPool
from ling_serve.errors import InvariantViolated


def filled(layout: CacheLayout, *values: float) -> KdaState:
    """One row per value."""
    column = mx.array(values)
    return KdaState(
        mx.broadcast_to(column[:, None, None], (len(values), layout.conv_taps, layout.conv_width)),
        mx.broadcast_to(column[:, None, None, None], (len(values), layout.num_heads, layout.value_dim, layout.key_dim)),
    )


def values(state: KdaState) -> list[float]:
    """The value of each row, after checking that all of the row has it."""
    found = state.conv[:, 0, 0]
    assert mx.array_equal(state.conv, mx.broadcast_to(found[:, None, None], state.conv.shape))
    assert mx.array_equal(state.recurrent, mx.broadcast_to(found[:, None, None, None], state.recurrent.shape))
    return found.tolist()


def held_bytes(pool: StateSlotPool) -> int:
    return sum(array.nbytes for array in pool.arrays())


def test_steady_decoding_reads_the_arrays_it_wrote(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=4)
    pool.write(1, [2, 0], filled(layout, 1.0, 2.0))
    held = pool.arrays()
    state = pool.read(1, [2, 0])
    assert state.conv is held[0]
    assert state.recurrent is held[1]


def test_any_order_and_choice_of_slots_is_gathered(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=6)
    pool.write(1, [3, 0, 5], filled(layout, 30.0, 0.5, 50.0))
    pool.write(1, [1, 2], filled(layout, 10.0, 20.0))
    assert values(pool.read(1, [5, 2, 0, 1, 3])) == [50.0, 20.0, 0.5, 10.0, 30.0]
    assert values(pool.read(1, [1, 1, 3])) == [10.0, 10.0, 30.0]  # two sequences fork from one state
    assert values(pool.read(1, [4, pool.zero_slot, 1])) == [0.0, 0.0, 10.0]
    assert values(pool.read(0, [3, 0, 5])) == [0.0, 0.0, 0.0]  # the other layers are untouched


def test_reading_one_slot_and_writing_another_leaves_the_first(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=3)
    pool.write(0, [0, 1], filled(layout, 1.0, 2.0))
    pool.write(0, [2], filled(layout, 9.0))
    assert values(pool.read(0, [0, 1, 2])) == [1.0, 2.0, 9.0]


def test_a_row_for_the_scratch_slot_is_dropped(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=3)
    pool.write(0, [pool.scratch_slot, 1, pool.scratch_slot], filled(layout, 7.0, 1.0, 8.0))
    assert values(pool.read(0, [0, 1, 2])) == [0.0, 1.0, 0.0]
    assert held_bytes(pool) * 3 == layout.bytes_per_slot


def test_a_reset_slot_reads_as_zeros_in_every_layer(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=3)
    for layer in layout.kda_layers:
        pool.write(layer, [0, 1, 2], filled(layout, 1.0, 2.0, 3.0))
    pool.reset(1)
    for layer in layout.kda_layers:
        assert values(pool.read(layer, [0, 1, 2])) == [1.0, 0.0, 3.0]
        assert values(pool.read(layer, [0, 2])) == [1.0, 3.0]


@pytest.mark.parametrize("slots", [[1, 1], [3], [-1], [9]])
def test_slots_that_cannot_be_written_are_refused(layout: CacheLayout, slots: list[int]) -> None:
    pool = StateSlotPool(layout, num_slots=3)
    with pytest.raises(InvariantViolated, match="distinct slots below 3"):
        pool.write(0, slots, filled(layout, *[1.0] * len(slots)))


def test_states_of_another_shape_are_refused(layout: CacheLayout) -> None:
    pool = StateSlotPool(layout, num_slots=3)
    transposed = replace(filled(layout, 1.0), recurrent=mx.zeros((1, 2, 4, 5)))
    with pytest.raises(InvariantViolated, match=r"\(1, 2, 5, 4\)"):
        pool.write(0, [0], transposed)


def test_random_reads_and_writes_agree_with_a_dictionary(layout: CacheLayout) -> None:
    """400 operations on 8 slots; the bytes held stay those of the slots in use."""
    draw = random.Random(3)
    pool, truth = StateSlotPool(layout, num_slots=8), dict.fromkeys(range(8), 0.0)
    written: set[int] = set()
    for step in range(400):
        slots = draw.sample(range(8), draw.randint(1, 8))
        match draw.choice(["write", "write", "read", "reset"]):
            case "write":
                rows = [step + row / 16 for row in range(len(slots))]
                for layer in layout.kda_layers:
                    pool.write(layer, slots, filled(layout, *rows))
                truth.update(zip(slots, rows, strict=True))
                written.update(slots)
            case "reset":
                pool.reset(slots[0])
                truth[slots[0]] = 0.0
                written.discard(slots[0])
            case _:
                assert values(pool.read(3, slots)) == [truth[slot] for slot in slots]
        mx.eval(pool.arrays())
        assert held_bytes(pool) == len(written) * layout.bytes_per_slot


def test_a_slice_of_an_activation_does_not_keep_the_activation_alive(layout: CacheLayout) -> None:
    """A model may hand over the last rows of a long array: the pool keeps copies, not views."""
    big = replace(layout, conv_width=4096)
    pool = StateSlotPool(big, num_slots=2)
    before = mx.get_active_memory()
    activations = mx.random.normal((1, 2000, 4096))
    pool.write(0, [0], replace(filled(big, 1.0), conv=activations[:, -3:]))
    mx.eval(pool.arrays(), activations)
    del activations
    gc.collect()
    rise = mx.get_active_memory() - before
    print(f"active memory rose by {rise} bytes for a state of {big.bytes_per_slot // 3}")
    assert rise < 10 * big.bytes_per_slot // 3


def test_overwriting_all_rows_of_a_group_in_two_writes_copies_nothing(layout: CacheLayout) -> None:
    """A step writes its short and its long pieces apart; the group they shared is compacted lazily, so never."""
    big = replace(layout, key_dim=512, value_dim=512, num_heads=4, kda_layers=(0,))
    pool = StateSlotPool(big, num_slots=4)
    pool.write(0, [0, 1, 2, 3], filled(big, 1.0, 2.0, 3.0, 4.0))
    mx.eval(pool.arrays())
    short, long = filled(big, 5.0, 6.0), filled(big, 7.0, 8.0)
    short, long = short.dense(), long.dense()
    mx.eval(short.recurrent, long.recurrent, short.conv, long.conv)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.write(0, [0, 1], short)
    pool.write(0, [2, 3], long)
    del short, long
    mx.eval(pool.arrays())
    rise = mx.get_peak_memory() - before
    print(f"peak rose by {rise} bytes beside rows of {big.bytes_per_slot}")
    assert rise < big.bytes_per_slot // 8
    assert values(pool.read(0, [3, 1, 0, 2])) == [8.0, 6.0, 5.0, 7.0]
