"""The short convolution against float64, whole, cut and packed."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from ling_kernels import short_conv, short_conv_packed

from tests.kernels.kda_truth import assert_close

C = 10


def truth(x: np.ndarray, history: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token by token over x [B, T, C]."""
    window = np.concatenate([history, x], axis=1)
    taps = weight.shape[0] - 1
    y = np.stack([(window[:, t : t + taps + 1] * weight).sum(axis=1) for t in range(x.shape[1])], axis=1)
    return y / (1 + np.exp(-y)), window[:, -taps:]


def make(B: int, T: int, taps: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([seed, B, T])
    shapes = ((B, T, C), (B, taps, C), (taps + 1, C))
    x, history, weight = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, history, weight


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("B", [1, 7])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 64, 100])
def test_equals_the_sum_over_taps(T: int, B: int, taps: int) -> None:
    arrays = make(B, T, taps)
    y, history = short_conv(*(mx.array(x) for x in arrays))
    expected, last = truth(*(x.astype(np.float64) for x in arrays))
    assert_close(y, expected, 1e-6, "y")
    assert np.array_equal(np.array(history), last.astype(np.float32))


def test_equals_the_convolution_op() -> None:
    """The order of the taps is that of the checkpoint's Conv1d weights."""
    x, _, weight = (mx.array(value) for value in make(2, 9))
    conv = nn.Conv1d(C, C, 4, groups=C, bias=False)
    conv.weight = weight.T[..., None]
    padded = mx.pad(x, [(0, 0), (3, 0), (0, 0)])
    assert_close(short_conv(x, mx.zeros((2, 3, C)), weight)[0], nn.silu(conv(padded)), 1e-6, "y")


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (50,), (1, 2, 3, 4, 5), (4, 19)])
def test_cut_anywhere_gives_the_same(cuts: tuple[int, ...]) -> None:
    x, history, weight = (mx.array(value) for value in make(2, 51))
    expected, last = short_conv(x, history, weight)
    outputs: list[mx.array] = []
    for start, end in zip((0, *cuts), (*cuts, 51), strict=True):
        y, history = short_conv(x[:, start:end], history, weight)
        outputs.append(y)
    assert_close(mx.concatenate(outputs, axis=1), expected, 1e-6, "y")
    assert mx.array_equal(history, last)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [2, 9, 3, 1, 30, 4]])
def test_packed_pieces_equal_each_alone(lengths: list[int]) -> None:
    borders = np.cumsum([0, *lengths]).tolist()
    x, _, weight = (mx.array(value) for value in make(1, borders[-1]))
    history = mx.array(make(len(lengths), 1)[1])
    y, after = short_conv_packed(x[0], history, weight, borders)
    assert y.shape == (borders[-1], C)
    for row, (start, end) in enumerate(pairwise(borders)):
        expected, last = short_conv(x[:, start:end], history[row : row + 1], weight)
        assert_close(y[start:end], expected[0], 1e-6, f"y of piece {row}")
        assert mx.array_equal(after[row], last[0])


def test_history_keeps_its_dtype_and_the_sum_is_float32() -> None:
    x, history, weight = (mx.array(value).astype(mx.bfloat16) for value in make(2, 20))
    y, after = short_conv(x, history, weight)
    exact, _ = short_conv(*(value.astype(mx.float32) for value in (x, history, weight)))
    assert (y.dtype, after.dtype) == (mx.float32, mx.bfloat16)
    assert mx.array_equal(y, exact)
