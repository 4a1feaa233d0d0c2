"""Parts of stacked weights as float32 matrices, whatever they are stored as."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn


def dense_weight(module: nn.Module, part: int | slice) -> mx.array:
    """`module.weight[part]`, the part being of the first axis (experts, heads), in float32; dequantised if need be."""
    weight = cast("mx.array", module["weight"])[part]
    if "scales" not in module:
        return weight.astype(mx.float32)
    biases = cast("mx.array | None", module.get("biases"))
    dense = mx.dequantize(
        weight,
        cast("mx.array", module["scales"])[part],
        None if biases is None else biases[part],
        group_size=cast("int", module.group_size),
        bits=cast("int", module.bits),
        mode=cast("str", module.mode),
    )
    return dense.astype(mx.float32)
