"""The dtype `auto` stands for."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from ling_serve.config import DTypeName
from ling_serve.model.weights.compute_dtype import choose_dtype, free_memory_bytes, weight_bytes
from ling_serve.model.weights.plan import Plan, Step
from ling_serve.model.weights.recipe import Kind, Target
from ling_serve.model.weights.safetensors_header import StoredTensor


def plan(*tensors: tuple[str, str, int]) -> Plan:
    """(path, stored dtype, elements) of each parameter."""
    widths = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "U8": 1}
    kinds = {"U32": Kind.PACKED, "U8": Kind.CODES}
    steps = [
        Step(
            Target(path, (count,), kinds.get(dtype, Kind.FLOAT)),
            (StoredTensor(path, dtype, (count,), Path("x"), 0, count * widths[dtype]),),
            lambda parts: parts[0],
        )
        for path, dtype, count in tensors
    ]
    return Plan(tuple(steps), ())


BF16 = plan(("lm_head.weight", "BF16", 1000), ("model.layers.0.attention.A_log", "F32", 5000))
PACKED = plan(("a.weight", "U32", 1000), ("a.scales", "U8", 500), ("model.norm.weight", "F16", 10))


@pytest.mark.parametrize(
    ("name", "on_cpu", "free_bytes", "expected"),
    [
        ("auto", False, 10**9, mx.bfloat16),
        ("auto", True, 10**9, mx.float32),
        ("auto", True, None, mx.float32),
        ("auto", True, 34_286, mx.float32),  # 70 % of it is 24,000.2: the model's 24,000 bytes in float32 fit
        ("auto", True, 34_285, mx.bfloat16),
        ("float32", False, 1, mx.float32),
        ("float16", True, 10**9, mx.float16),
        ("bfloat16", True, 10**9, mx.bfloat16),
    ],
)
def test_choice(name: DTypeName, on_cpu: bool, free_bytes: int | None, expected: mx.Dtype) -> None:
    dtype, reason = choose_dtype(name, BF16, on_cpu=on_cpu, free_bytes=free_bytes)
    print(reason)
    assert dtype == expected


def test_stored_dtype_of_packed_weights_is_that_of_the_other_parameters() -> None:
    assert choose_dtype("auto", PACKED, on_cpu=False, free_bytes=None)[0] == mx.float16


def test_weight_bytes_count_what_stays_as_stored() -> None:
    assert weight_bytes(BF16, mx.bfloat16) == 2 * 1000 + 4 * 5000
    assert weight_bytes(BF16, mx.float32) == 4 * 6000
    assert weight_bytes(PACKED, mx.float32) == 4 * 1000 + 500 + 4 * 10


def test_free_memory_is_a_plausible_number() -> None:
    free = free_memory_bytes()
    assert free is None or 10**6 < free < 10**14
