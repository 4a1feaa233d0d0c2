"""Which kind of device MLX computes on."""

from __future__ import annotations

import mlx.core as mx


def on_cpu() -> bool:
    """Whether MLX's default device is a CPU."""
    return mx.default_device().type == mx.DeviceType.cpu
