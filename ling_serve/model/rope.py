"""Rotary positions of packed tokens, each at its own position, with the frequencies of RoPE and YaRN."""

from __future__ import annotations

import math

import mlx.core as mx

from ling_serve.model.config import ModelConfig, RopeKind, RopeScaling


class RotaryTurns:
    """Turns neighbouring pairs (x[2i], x[2i + 1]), read as complex numbers, by position · frequency[i]."""

    def __init__(self, config: ModelConfig) -> None:
        frequencies = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = mx.array(frequencies, dtype=mx.float32)  # [D / 2]
        self._amplitude = rotary_amplitude(config.rope_scaling)

    def __call__(self, positions: mx.array) -> mx.array:
        """positions [N] int32 → [N, 1, D / 2] complex64, the factor of every pair; all layers share it."""
        angles = positions.astype(mx.float32)[:, None, None] * self._frequencies
        turns = mx.cos(angles) + 1j * mx.sin(angles)
        return turns if self._amplitude == 1.0 else turns * self._amplitude


def rotate(x: mx.array, turns: mx.array) -> mx.array:
    """x [N, H, D] → the same shape in float32; turns [N, 1, D / 2] complex64."""
    return (x.astype(mx.float32).view(mx.complex64) * turns).view(mx.float32)


def rotary_frequencies(dims: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Radians per position of each of the dims / 2 pairs.

    YaRN (Peng et al. 2023, section 3.2) divides slow frequencies by `factor`, keeps fast ones, and blends between the
    pairs that make `beta_fast` and `beta_slow` turns over the original context.
    """
    plain = [theta ** (-2.0 * pair / dims) for pair in range(dims // 2)]
    if scaling.kind is RopeKind.PLAIN:
        return plain
    if scaling.kind is RopeKind.LINEAR:
        return [frequency / scaling.factor for frequency in plain]

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return dims * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dims - 1)
    width = (high - low) or 0.001  # a step, where both ends are the same pair
    slow = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(dims // 2)]
    return [f * (1.0 - s) + f / scaling.factor * s for f, s in zip(plain, slow, strict=True)]


def rotary_amplitude(scaling: RopeScaling) -> float:
    """What YaRN multiplies rotated queries and keys with: m(mscale) / m(mscale_all_dim)."""
    if scaling.kind is not RopeKind.YARN:
        return 1.0
    return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(query width), times m(mscale_all_dim)² under YaRN."""
    scale = config.qk_head_dim**-0.5
    scaling = config.rope_scaling
    if scaling.kind is not RopeKind.YARN:
        return scale
    return scale * _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def _magnitude(factor: float, mscale: float) -> float:
    """m(s) = 0.1 · s · ln(factor) + 1: how much longer contexts sharpen attention."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
