import pytest

from ling_serve.cache.allocator import BlockAllocator, OutOfBlocks
from ling_serve.cache.page_table import PageTable


def test_blocks_grow_with_the_tokens() -> None:
    allocator = BlockAllocator(8)
    table = PageTable(allocator, block_size=4)
    counts = []
    for num_tokens in (0, 1, 4, 5, 5, 9):
        table.ensure("a", num_tokens)
        counts.append(len(table.blocks("a")))
    assert counts == [0, 1, 1, 2, 2, 3]
    assert table.num_owned == 3


def test_blocks_stay_in_token_order_and_apart() -> None:
    table = PageTable(BlockAllocator(8), block_size=4)
    table.ensure("a", 4)
    before = list(table.blocks("a"))
    table.ensure("b", 8)
    table.ensure("a", 12)
    assert table.blocks("a")[:1] == before
    assert not set(table.blocks("a")) & set(table.blocks("b"))


def test_a_refused_ensure_changes_nothing() -> None:
    allocator = BlockAllocator(2)
    table = PageTable(allocator, block_size=4)
    table.ensure("a", 4)
    assert table.missing("a", 13) == 3
    with pytest.raises(OutOfBlocks):
        table.ensure("a", 13)
    assert len(table.blocks("a")) == 1
    assert allocator.num_free == 1


def test_release_gives_the_blocks_back_and_detach_keeps_them() -> None:
    allocator = BlockAllocator(4)
    table = PageTable(allocator, block_size=4)
    table.ensure("a", 8)
    table.ensure("b", 8)
    table.release("a")
    assert allocator.num_free == 2
    assert len(table.detach("b")) == 2
    assert allocator.num_free == 2
    table.release("nobody")
    assert allocator.num_free == 2
