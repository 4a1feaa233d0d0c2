import mlx.core as mx
import pytest

from ling_serve.cache import CacheLayout, LatentPool


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 11])
def test_what_was_written_is_read_back_through_scattered_pages(layout: CacheLayout, num_tokens: int) -> None:
    pool = LatentPool(layout, num_blocks=6, block_size=4)
    pages = [5, 0, 3]
    rows = mx.random.normal((num_tokens, 12))
    write_at = mx.array([pages[t // 4] * 4 + t % 4 for t in range(num_tokens)], dtype=mx.int32)
    pool.write(4, write_at, rows)
    read = pool.pages(4, mx.array([pages], dtype=mx.int32))
    assert read.shape == (1, 12, 12)
    assert mx.array_equal(read[0, :num_tokens], rows)
    assert not mx.any(read[0, num_tokens:])
    assert not mx.any(pool.pages(2, mx.array([pages], dtype=mx.int32)))  # the other layer is untouched


def test_a_write_persists_in_the_array_that_the_runner_evaluates(layout: CacheLayout) -> None:
    pool = LatentPool(layout, num_blocks=2, block_size=4)
    pool.write(2, mx.array([5], dtype=mx.int32), mx.ones((1, 12)))
    mx.eval(pool.arrays())
    first, second = pool.arrays()
    assert first.shape == (3, 4, 12)
    assert mx.array_equal(first[1, 1], mx.ones((12,)))
    assert mx.sum(first).item() == 12
    assert not mx.any(second)


def test_the_scratch_block_is_nobodys(layout: CacheLayout) -> None:
    pool = LatentPool(layout, num_blocks=2, block_size=4)
    pool.write(2, mx.array([pool.scratch_block * 4] * 3, dtype=mx.int32), mx.ones((3, 12)))
    assert not mx.any(pool.pages(2, mx.array([[0, 1]], dtype=mx.int32)))


def test_rows_are_stored_in_the_dtype_of_the_layout(layout: CacheLayout) -> None:
    pool = LatentPool(layout, num_blocks=2, block_size=4)
    pool.write(2, mx.array([0], dtype=mx.int32), mx.ones((1, 12), dtype=mx.bfloat16))
    assert pool.arrays()[0].dtype == mx.float32
