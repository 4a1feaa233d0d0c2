import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_serve.cache.allocator import BlockAllocator, OutOfBlocks, OutOfSlots, SlotAllocator
from ling_serve.errors import InvariantViolated


def test_every_id_is_handed_out_once() -> None:
    blocks = BlockAllocator(5)
    assert sorted(blocks.allocate(2) + blocks.allocate(3)) == [0, 1, 2, 3, 4]
    assert blocks.num_free == 0


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    blocks = BlockAllocator(3)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 of 3 are free"):
        blocks.allocate(4)
    assert blocks.num_free == 3


def test_the_last_slot_is_the_last() -> None:
    slots = SlotAllocator(1)
    slots.allocate()
    with pytest.raises(OutOfSlots, match="0 of 1 are free"):
        slots.allocate()


def test_a_double_free_is_caught() -> None:
    blocks = BlockAllocator(3)
    [one] = blocks.allocate()
    blocks.free([one])
    with pytest.raises(InvariantViolated, match="freed twice"):
        blocks.free([one])


@pytest.mark.parametrize("stranger", [-1, 3])
def test_freeing_an_id_that_never_existed_is_caught(stranger: int) -> None:
    with pytest.raises(InvariantViolated, match="there are 3"):
        BlockAllocator(3).free([stranger])


@given(st.lists(st.integers(0, 6), max_size=60))
def test_free_and_held_always_add_up(sizes: list[int]) -> None:
    blocks, held = BlockAllocator(16), list[list[int]]()
    for size in sizes:
        try:
            held.append(blocks.allocate(size))
        except OutOfBlocks:
            blocks.free(held.pop(0))
        everyone = [one for ids in held for one in ids]
        assert len(everyone) == len(set(everyone))
        assert blocks.num_free + len(everyone) == 16
