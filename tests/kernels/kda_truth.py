"""Kimi Delta Attention as a float64 loop over tokens, the inputs it is tried on, and how errors are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

GATES = ("at the bound", "uniform", "slow", "mixed", "gate law", "adversarial")


@dataclass(frozen=True)
class KdaCase:
    """Float64 inputs of one call: q, k, g [B, T, H, dk], v [B, T, H, dv], beta [B, T, H], state [B, H, dv, dk]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray

    def arrays(self, operand_dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        """As MLX arrays, q, k and v in `operand_dtype`, the rest in float32."""
        values = [mx.array(x.astype(np.float32)) for x in (self.q, self.k, self.v, self.g, self.beta, self.state)]
        return [x.astype(operand_dtype) for x in values[:3]] + values[3:]

    def piece(self, start: int, end: int, state: np.ndarray) -> KdaCase:
        rows = (x[:, start:end] for x in (self.q, self.k, self.v, self.g, self.beta))
        return KdaCase(*rows, state)


def make_case(
    T: int, gate: str, *, B: int = 1, H: int = 3, dk: int = 16, dv: int = 24, bound: float = -5.0, seed: int = 0
) -> KdaCase:
    """Random inputs whose decays follow `gate`. All are values of float32: only arithmetic differs."""
    random = np.random.default_rng([seed, T, GATES.index(gate)])
    q, k = (unit(random.standard_normal((B, T, H, dk))) for _ in range(2))
    v = random.standard_normal((B, T, H, dv))
    beta = 1 / (1 + np.exp(-random.standard_normal((B, T, H))))
    shape = (B, T, H, dk)
    if gate == "at the bound":
        g = np.full(shape, bound)
    elif gate == "uniform":
        g = random.uniform(bound, 0, shape)
    elif gate == "slow":
        g = random.uniform(-0.01, 0, shape)
    elif gate == "mixed":
        g = np.where(random.random(shape) < 0.5, random.uniform(bound, 0.8 * bound, shape), -1e-3)
    elif gate == "gate law":
        g = bound / (1 + np.exp(-np.exp(random.uniform(-1, 2, (H, 1))) * random.standard_normal(shape)))
    else:  # one key again and again, written in full and hardly forgotten
        k = np.broadcast_to(k[:, :1], k.shape)
        beta, g = np.ones_like(beta), np.full(shape, -1e-4)
    state = 0.5 * random.standard_normal((B, H, dv, dk))
    return KdaCase(*(x.astype(np.float32).astype(np.float64) for x in (q * dk**-0.5, k, v, g, beta, state)))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def recurrence(case: KdaCase) -> tuple[np.ndarray, np.ndarray]:
    """S = S diag(e^g); u = beta (v - S k); S = S + u k^T; o = S q. Returns o [B, T, H, dv] and the last state."""
    S = case.state.copy()
    outputs = np.zeros(case.v.shape)
    for t in range(case.q.shape[1]):
        S = S * np.exp(case.g[:, t])[..., None, :]
        u = case.beta[:, t, :, None] * (case.v[:, t] - np.einsum("bhvk,bhk->bhv", S, case.k[:, t]))
        S = S + u[..., :, None] * case.k[:, t][..., None, :]
        outputs[:, t] = np.einsum("bhvk,bhk->bhv", S, case.q[:, t])
    return outputs, S


def relative_rms(actual: Any, expected: Any) -> float:
    """RMS of the difference over the RMS of what was expected (with a floor, for expectations of zero)."""
    actual, expected = (np.asarray(x, dtype=np.float64) for x in (_plain(actual), _plain(expected)))
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / max(np.sqrt(np.mean(expected**2)), 1e-6))


def assert_close(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    """Assert on the relative RMS and print it; NaN fails."""
    error = relative_rms(actual, expected)
    print(f"{what}: relative RMS {error:.2e} (at most {tolerance:.0e})")
    assert error <= tolerance, f"{what}: relative RMS {error:.2e} is above {tolerance:.0e}"


def _plain(x: Any) -> Any:
    return np.array(x.astype(mx.float32)) if isinstance(x, mx.array) else x
