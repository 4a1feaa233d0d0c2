"""2^y from products, sums and one addition to the exponent bits."""

from __future__ import annotations

import mlx.core as mx

# Minimax fit of 2^f on [-1/2, 1/2] with 2^0 = 1 exactly: relative error 9.2e-8, highest power first.
_COEFFICIENTS = (
    0.001326471334323287,
    0.009671511128544807,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)
# Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the sum.
_ROUND = 12582912.0
_MANTISSA_BITS = 23


def exp2_polynomial(y: mx.array) -> mx.array:
    """2^y of a float32 array within [-126, 127); outside, the result is meaningless. No gradient."""
    shifted = y + _ROUND
    f = y - (shifted - _ROUND)
    p = f * _COEFFICIENTS[0] + _COEFFICIENTS[1]
    for coefficient in _COEFFICIENTS[2:]:
        p = p * f + coefficient
    exponent = shifted.view(mx.int32) << _MANTISSA_BITS
    return (p.view(mx.int32) + exponent).view(mx.float32)
