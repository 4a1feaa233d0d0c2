"""exp, sigmoid and SiLU at every size, where each takes another way."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from ling_kernels import exp, sigmoid, silu

SIZES = (100, 5000, 40000)


@pytest.mark.parametrize("size", SIZES)
def test_relative_error(size: int) -> None:
    for reach, tolerance in ((1.0, 3e-7), (87.0, 4e-6)):
        x = np.linspace(-reach, reach, size).astype(np.float32)
        true = np.exp(x.astype(np.float64))
        error = np.abs(np.array(exp(mx.array(x))) / true - 1).max()
        error_of_sigmoid = np.abs(np.array(sigmoid(mx.array(x))) * (1 + 1 / true) - 1).max()
        print(f"size {size}, |x| <= {reach}: exp {error:.1e}, sigmoid {error_of_sigmoid:.1e}")
        assert max(error, error_of_sigmoid) <= tolerance


@pytest.mark.parametrize("size", SIZES)
def test_exact_at_zero(size: int) -> None:
    """A token whose decay is 0 must leave the state as it is."""
    zeros = mx.zeros((size,))
    assert (exp(zeros) == 1.0).all()
    assert (sigmoid(zeros) == 0.5).all()


@pytest.mark.parametrize("size", SIZES)
def test_extremes(size: int) -> None:
    x = mx.concatenate([mx.array([-np.inf, -1e4, 1e4, np.inf]), mx.zeros((size,))])
    assert np.allclose(np.array(sigmoid(x)[:4]), [0, 0, 1, 1], atol=1e-37)
    small, large = exp(x)[:2], exp(x)[2:4]
    assert (small <= 1.2e-38).all()
    assert (large >= 8e37).all()
    assert mx.isnan(exp(x * mx.array(float("nan")))).all()


@pytest.mark.parametrize("size", SIZES)
def test_gradients(size: int) -> None:
    x = mx.linspace(-8, 8, size)
    s = mx.sigmoid(x)
    for f, expected in ((exp, mx.exp(x)), (sigmoid, s * (1 - s)), (silu, s + x * s * (1 - s))):
        gradient = mx.grad(lambda x, f=f: f(x).sum())(x)
        assert mx.allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_other_dtypes_are_left_to_mlx() -> None:
    x = mx.linspace(-3, 3, 40000).astype(mx.bfloat16)
    assert mx.array_equal(exp(x), mx.exp(x))
    assert mx.array_equal(sigmoid(x), mx.sigmoid(x))
