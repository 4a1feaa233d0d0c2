"""One token of KDA, and its gate, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from ling_kernels import kda_gate, kda_recurrent, kda_step

from tests.kernels.kda_truth import GATES, assert_close, make_case, recurrence


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("R", "H", "dk", "dv"), [(1, 3, 16, 24), (7, 5, 24, 16), (7, 1, 128, 128)])
def test_equals_the_recurrence(R: int, H: int, dk: int, dv: int, gate: str) -> None:
    case = make_case(1, gate, B=R, H=H, dk=dk, dv=dv)
    *inputs, state = case.arrays()
    o, after = kda_step(*(x[:, 0] for x in inputs), state)
    expected, last = recurrence(case)
    assert_close(o, expected[:, 0], 1e-6, "o")
    assert_close(after, last, 1e-6, "state")


@pytest.mark.parametrize("gate", GATES)
def test_the_token_loop_does_not_drift(gate: str) -> None:
    case = make_case(129, gate, B=2)
    o, state = kda_recurrent(*case.arrays())
    expected, last = recurrence(case)
    assert_close(o, expected, 1e-5, "o")
    assert_close(state, last, 1e-5, "state")


@pytest.mark.parametrize("bound", [-5.0, -10.0, -1.5])
def test_gate(bound: float) -> None:
    random = np.random.default_rng(0)
    f, A_log, dt_bias = random.standard_normal((7, 3, 20)), random.uniform(-2, 2, 3), random.standard_normal((3, 20))
    expected = bound / (1 + np.exp(-np.exp(A_log)[:, None] * (f + dt_bias)))
    arrays = [mx.array(x.astype(np.float32)) for x in (f, A_log, dt_bias)]
    g = kda_gate(*arrays, bound)
    assert g.dtype == mx.float32
    assert_close(g, expected, 1e-6, "log-decay")
    flat = kda_gate(arrays[0], arrays[1], arrays[2].flatten(), bound)
    assert mx.array_equal(g, flat)


def test_gate_of_extreme_inputs_stays_within_the_bound() -> None:
    f = mx.array([-1e30, -300.0, 0.0, 300.0, 1e30]).reshape(1, 1, 5)
    for copies in (1, 512, 8192):  # each of the three ways to evaluate a sigmoid
        g = kda_gate(mx.repeat(f, copies, axis=0), mx.array([1.0]), mx.zeros((5,)), -5.0)
        assert g.min().item() >= -5.0
        assert g.max().item() <= 0.0
        assert_close(g[0, 0], [0.0, 0.0, -2.5, -5.0, -5.0], 1e-6, f"extremes, {copies} rows")


def test_half_precision_inputs_of_the_gate_are_raised_first() -> None:
    f = mx.random.normal((4, 2, 8), key=mx.random.key(0)).astype(mx.bfloat16)
    A_log, dt_bias = mx.array([0.3, -0.7]), mx.random.normal((16,), key=mx.random.key(1))
    assert mx.array_equal(kda_gate(f, A_log, dt_bias, -5.0), kda_gate(f.astype(mx.float32), A_log, dt_bias, -5.0))
