"""Carries a plan out: one parameter after another is read, built, evaluated and put in place."""

from __future__ import annotations

from typing import Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from ling_serve.model.weights.plan import Plan
from ling_serve.model.weights.quantized import check_codes
from ling_serve.model.weights.recipe import Kind
from ling_serve.model.weights.tensor_source import TensorSource


class Progress(Protocol):
    """Called after each parameter."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None: ...


def fill_model(model: nn.Module, plan: Plan, dtype: mx.Dtype, progress: Progress | None = None) -> None:
    """Give every parameter of `model` its stored value.

    Never more than one parameter exists twice: its sources are dropped before the next one is read. Raises WeightsError
    if a file ends early or holds NaN or infinite numbers.
    """
    modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
    total = plan.stored_bytes
    done = 0
    with TensorSource() as source:
        for step in plan.steps:
            kept = step.dtype(dtype)
            value = step.build([source.read(tensor, dtype=kept) for tensor in step.sources])
            value = mx.contiguous(value)
            mx.eval(value)
            module = modules[step.target.module]
            if step.target.kind is Kind.CODES:
                check_codes(step.target.path, value, cast("int", module.group_size))
            module[step.target.leaf] = value
            # Freed source buffers are of odd sizes that nothing will ask for again.
            mx.clear_cache()
            done += step.stored_bytes
            if progress is not None:
                progress(done, total)
