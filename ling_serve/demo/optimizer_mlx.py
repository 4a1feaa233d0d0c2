"""One optimiser step over a flat dictionary of parameters: Muon for the hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ling_serve.demo.optimizer import NEWTON_SCHULZ, NEWTON_SCHULZ_ROUNDS, OptimizerOptions, uses_muon

Arrays = dict[str, mx.array]


class MlxOptimizer:
    def __init__(self, options: OptimizerOptions | None = None) -> None:
        self._options = options or OptimizerOptions()

    def initial_state(self, parameters: Mapping[str, mx.array]) -> Arrays:
        """Zero moments: `NAME:m` for all, `NAME:v` where AdamW applies."""
        state: Arrays = {}
        for name, value in parameters.items():
            state[f"{name}:m"] = mx.zeros_like(value)
            if not uses_muon(name, value.shape):
                state[f"{name}:v"] = mx.zeros_like(value)
        return state

    def apply(
        self, parameters: Arrays, gradients: Mapping[str, mx.array], state: Arrays, rate: mx.array, step: mx.array
    ) -> mx.array:
        """Update `parameters` and `state` in place (names in `gradients` only); returns the gradient's norm.

        `rate` and `step` (from 1) are float32 scalars.
        """
        norm = mx.sqrt(sum(((g.astype(mx.float32) ** 2).sum() for g in gradients.values()), mx.array(0.0)))
        scale = mx.minimum(1.0, self._options.max_norm / (norm + 1e-6))
        updates: Arrays = {}
        matrices: Arrays = {}
        for name, gradient in gradients.items():
            gradient = gradient.astype(mx.float32) * scale
            if uses_muon(name, parameters[name].shape):
                moment = self._options.momentum * state[f"{name}:m"] + gradient
                matrices[name] = self._options.momentum * moment + gradient
                state[f"{name}:m"] = moment
            else:
                updates[name] = self._adam(name, gradient, state, step)
        updates = {name: update * self._options.adam_share for name, update in updates.items()}
        updates |= orthogonal(matrices, self._options.update_rms)
        for name, update in updates.items():
            value = parameters[name]
            decay = self._options.weight_decay if value.ndim > 1 else 0.0
            parameters[name] = value * (1.0 - rate * decay) - rate * update
        return norm

    def _adam(self, name: str, gradient: mx.array, state: Arrays, step: mx.array) -> mx.array:
        first, second = self._options.betas
        m = first * state[f"{name}:m"] + (1.0 - first) * gradient
        v = second * state[f"{name}:v"] + (1.0 - second) * gradient * gradient
        state[f"{name}:m"], state[f"{name}:v"] = m, v
        return (m / (1.0 - first**step)) / (mx.sqrt(v / (1.0 - second**step)) + self._options.eps)


def orthogonal(matrices: Arrays, update_rms: float) -> Arrays:
    """About the nearest semi-orthogonal matrix of each, scaled to elements of this root mean square."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, value in matrices.items():
        small, large = sorted(value.shape[-2:])
        groups.setdefault((small, large), []).append(name)
    result: Arrays = {}
    for (small, large), names in groups.items():
        flat = [_wide(matrices[name]).reshape(-1, small, large) for name in names]
        solved = _newton_schulz(mx.concatenate(flat))
        factor = update_rms * large**0.5
        start = 0
        for name, part in zip(names, flat, strict=True):
            shape = matrices[name].shape
            piece = solved[start : start + part.shape[0]] * factor
            start += part.shape[0]
            piece = piece.swapaxes(-1, -2) if shape[-2] > shape[-1] else piece
            result[name] = piece.reshape(shape).astype(mx.float32)
    return result


def _wide(matrix: mx.array) -> mx.array:
    return matrix.swapaxes(-1, -2) if matrix.shape[-2] > matrix.shape[-1] else matrix


def _newton_schulz(x: mx.array, rounds: int = NEWTON_SCHULZ_ROUNDS) -> mx.array:
    """[batch, small, large] with its singular values pushed to about 1."""
    a, b, c = NEWTON_SCHULZ
    x = x / (mx.sqrt((x * x).sum(axis=(-2, -1), keepdims=True)) + 1e-7)
    x = x.astype(mx.bfloat16)
    for _ in range(rounds):
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
