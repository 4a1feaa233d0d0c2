"""Which dtype a model computes in when the user leaves the choice to us."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx

from ling_serve.config import DTypeName
from ling_serve.model.weights.plan import Plan
from ling_serve.model.weights.recipe import Kind

FLOAT32_SHARE = 0.7
"""Share of the free memory that float32 weights may take on a CPU; the rest is for caches and the step."""

_UNLIKE_THE_REST = ("A_log", "dt_bias", "expert_bias", ".mlp.gate.weight")
"""Kept in float32 by some checkpoints whatever the rest is in."""

_STORED = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}
_NAMED = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def choose_dtype(name: DTypeName, plan: Plan, *, on_cpu: bool, free_bytes: int | None) -> tuple[mx.Dtype, str]:
    """The dtype and the reason in words.

    `auto` on a CPU is float32, several times faster there than 16-bit floats, if the model then fits into 70 % of
    `free_bytes` (None = unknown, taken as enough). Otherwise it is the dtype most weights are stored in.
    """
    if name != "auto":
        return _NAMED[name], "as asked"
    stored = stored_dtype(plan)
    if not on_cpu or stored == mx.float32:
        return stored, "as stored"
    need = weight_bytes(plan, mx.float32)
    if free_bytes is not None and need > FLOAT32_SHARE * free_bytes:
        return stored, f"as stored: float32 would take {need / 1e9:.1f} of {free_bytes / 1e9:.1f} GB free memory"
    return mx.float32, "the fastest on a CPU"


def stored_dtype(plan: Plan) -> mx.Dtype:
    """The float dtype that holds most bytes; bfloat16 if there is none."""
    totals: dict[str, int] = {}
    for step in plan.steps:
        if step.target.kind is Kind.FLOAT and not step.target.path.endswith(_UNLIKE_THE_REST):
            for source in step.sources:
                totals[source.dtype] = totals.get(source.dtype, 0) + source.nbytes
    return _STORED[max(totals, key=lambda dtype: totals[dtype])] if totals else mx.bfloat16


def weight_bytes(plan: Plan, dtype: mx.Dtype) -> int:
    """Bytes of all parameters when the model computes in `dtype`."""
    total = 0
    for step in plan.steps:
        kept = step.dtype(dtype)
        if kept is None:
            total += sum(source.nbytes for source in step.sources)
        else:
            total += math.prod(step.target.shape) * kept.size
    return total


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping, the limit of a container included; None where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    amounts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        amounts.append(max(0, limit - used))
    return min(amounts) if amounts else None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # `max` where there is no limit
        return None
