"""Softmax whose division is left to the caller, where it costs less."""

from __future__ import annotations

import mlx.core as mx

from ling_kernels.exponential import exp


def unnormalised_softmax(scores: mx.array) -> tuple[mx.array, mx.array]:
    """scores [..., L] float32 → weights e^(scores - max) [..., L] and their sum [..., 1].

    softmax(scores) @ v = (weights @ v) / sum: the division runs over the columns of v instead of over L.
    """
    weights = exp(scores - scores.max(axis=-1, keepdims=True))
    # A product with ones: MLX sums the rows of a large array ten times slower on a CPU.
    return weights, weights @ mx.ones((scores.shape[-1], 1))
