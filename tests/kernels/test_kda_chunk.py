"""The chunked form of KDA against the float64 recurrence."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from ling_kernels import kda_chunk, kda_chunk_packed, kda_recurrent
from ling_kernels.kda_chunk.reference import unit_lower_inverse

from tests.kernels.kda_truth import GATES, KdaCase, assert_close, make_case, recurrence

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 257)
FLOAT32 = 1e-5
BFLOAT16 = 5e-3


def check(case: KdaCase, tolerance: float = FLOAT32, dtype: mx.Dtype = mx.float32, **options: int) -> None:
    o, state = kda_chunk(*case.arrays(dtype), **options)
    expected, last = recurrence(case)
    assert o.dtype == state.dtype == mx.float32
    assert_close(o, expected, tolerance, "o")
    assert_close(state, last, tolerance, "state")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_equals_the_recurrence(T: int, gate: str) -> None:
    case = make_case(T, gate)
    check(case)
    check(KdaCase(case.q, case.k, case.v, case.g, case.beta, np.zeros_like(case.state)))


@pytest.mark.parametrize("gate", GATES)
def test_bfloat16_operands(gate: str) -> None:
    for T in (17, 129):
        check(make_case(T, gate), BFLOAT16, mx.bfloat16)


@pytest.mark.parametrize("gate", GATES)
def test_the_lowest_bound_that_is_served(gate: str) -> None:
    """Decays of e^-10 a token: e^±80 around a block's middle, still inside float32."""
    check(make_case(100, gate, bound=-10.0))


def test_a_fast_block_behind_a_slow_one() -> None:
    """The exponents of a whole block underflow while single tokens of it still matter."""
    case = make_case(64, "slow", bound=-10.0)
    case.g[:, 33:48] = -10.0
    check(case)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_every_chunk_size(chunk: int, gate: str) -> None:
    for T in (65, 100):
        check(make_case(T, gate), chunk=chunk)


@pytest.mark.parametrize(("B", "H", "dk", "dv"), [(7, 1, 8, 20), (7, 5, 20, 8), (1, 2, 128, 128)])
def test_shapes(B: int, H: int, dk: int, dv: int) -> None:
    for T in (17, 100):
        check(make_case(T, "gate law", B=B, H=H, dk=dk, dv=dv))


@pytest.mark.parametrize("gate", ["gate law", "mixed", "adversarial"])
def test_a_piece_cut_anywhere_gives_the_same(gate: str) -> None:
    T = 130
    case = make_case(T, gate)
    expected, last = recurrence(case)
    for cut in (1, 7, 15, 16, 17, 32, 33, 63, 64, 65, 100, T - 1):
        state = case.arrays()[-1]
        outputs: list[mx.array] = []
        for start, end in ((0, cut), (cut, T)):
            o, state = kda_chunk(*case.piece(start, end, case.state).arrays()[:-1], state)
            outputs.append(o)
        assert_close(mx.concatenate(outputs, axis=1), expected, FLOAT32, f"o, cut at {cut}")
        assert_close(state, last, FLOAT32, f"state, cut at {cut}")


@pytest.mark.parametrize("lengths", [[100], [5, 5], [3, 70, 16, 1, 128, 66, 2]])
def test_packed_pieces_equal_each_alone(lengths: list[int]) -> None:
    cases = [make_case(T, "gate law", seed=seed) for seed, T in enumerate(lengths)]
    inputs = [mx.concatenate([case.arrays()[i][0] for case in cases]) for i in range(5)]
    states = mx.concatenate([case.arrays()[5] for case in cases])
    borders = np.cumsum([0, *lengths]).tolist()
    o, after = kda_chunk_packed(*inputs, states, borders)
    assert o.shape[0] == borders[-1]
    assert after.shape == states.shape
    for row, case in enumerate(cases):
        expected, last = recurrence(case)
        assert_close(o[borders[row] : borders[row + 1]], expected[0], FLOAT32, f"o of piece {row}")
        assert_close(after[row], last[0], FLOAT32, f"state of piece {row}")


@pytest.mark.parametrize("gate", ["gate law", "at the bound", "adversarial"])
def test_gradient_equals_that_of_the_token_loop(gate: str) -> None:
    case = make_case(41, gate, B=2, H=2, dk=8, dv=12)
    inputs = case.arrays()
    mx.random.seed(1)
    weights = [mx.random.normal(case.v.shape), mx.random.normal(case.state.shape)]

    def loss(form: object, *arrays: mx.array) -> mx.array:
        o, state = form(*arrays)  # pyright: ignore[reportCallIssue]
        return (o * weights[0]).sum() + (state * weights[1]).sum()

    chunked = mx.grad(lambda *arrays: loss(kda_chunk, *arrays), argnums=list(range(6)))(*inputs)
    stepped = mx.grad(lambda *arrays: loss(kda_recurrent, *arrays), argnums=list(range(6)))(*inputs)
    for name, actual, expected in zip(("q", "k", "v", "g", "beta", "state"), chunked, stepped, strict=True):
        assert_close(actual, expected, 1e-4, f"gradient of {name}")


def test_inverse_keeps_its_digits_when_keys_repeat() -> None:
    """All ones below the diagonal: the powers of a Neumann series reach 6435 before they cancel."""
    random = np.random.default_rng(0)
    lower = np.tril(np.ones((5, 16, 16)), -1) * random.uniform(0.9, 1.0, (5, 16, 16))
    inverse = unit_lower_inverse(mx.array(lower.astype(np.float32)))
    assert_close(inverse, np.linalg.inv(np.eye(16) + lower.astype(np.float32)), 1e-6, "inverse")
