"""Reads and slices of stored tensors against MLX's own reader."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ling_serve.errors import WeightsError
from ling_serve.model.weights.safetensors_header import read_header
from ling_serve.model.weights.tensor_source import TensorSource

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16, "u32": mx.uint32, "u8": mx.uint8}
SHAPES = [(), (1,), (7,), (5, 3), (4, 1, 6), (3, 2, 2, 2)]
LARGEST_BF16, LARGEST_F32 = 0x7F7F, 0x7F7FFFFF


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Every dtype and shape, at odd offsets: one byte comes first."""
    random = np.random.default_rng(0)
    arrays = {"a": mx.array([7], mx.uint8)}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            value = mx.array(random.uniform(-100, 100, shape) if "f" in name else random.integers(0, 200, shape))
            arrays[f"{name} {len(shape)} {shape}"] = value.astype(dtype)
    path = tmp_path / "all.safetensors"
    mx.save_safetensors(str(path), arrays)
    return path


def test_whole_tensors_equal_mlx(file: Path) -> None:
    expected = mx.load(str(file))
    tensors = read_header(file)
    assert sorted(tensors) == sorted(expected)
    with TensorSource() as source:
        for name, tensor in tensors.items():
            array = source.read(tensor)
            assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), name
            assert mx.array_equal(array, expected[name]), name


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(2, None), slice(-2, None), slice(1, 1), slice(0, 99)])
def test_row_slices_equal_slices_of_the_whole(file: Path, rows: slice) -> None:
    expected = mx.load(str(file))
    with TensorSource() as source:
        for name, tensor in read_header(file).items():
            if tensor.shape:
                part = source.read(tensor, rows)
                assert mx.array_equal(part, expected[name][rows]), name


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_conversion_is_that_of_astype(file: Path, dtype: mx.Dtype) -> None:
    expected = mx.load(str(file))
    with TensorSource() as source:
        for name, tensor in read_header(file).items():
            if "f" in name:
                array = source.read(tensor, dtype=dtype)
                assert array.dtype == dtype
                assert mx.array_equal(array, expected[name].astype(dtype)), name


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -float("nan")])
def test_one_number_that_is_not_finite_is_found(tmp_path: Path, dtype: mx.Dtype, value: float) -> None:
    row = [-3.0, 0.0, 60000.0, -60000.0]
    mx.save_safetensors(
        str(tmp_path / "x.safetensors"),
        {"bad": mx.array([*row, value, *row]).astype(dtype), "good": mx.array(row).astype(dtype)},
    )
    tensors = read_header(tmp_path / "x.safetensors")
    with TensorSource() as source:
        assert mx.array_equal(source.read(tensors["good"]), mx.array(row).astype(dtype))
        with pytest.raises(WeightsError, match="bad holds NaN or infinite"):
            source.read(tensors["bad"])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_float16_cannot_hold_is_refused_and_the_rest_is_not(tmp_path: Path, dtype: mx.Dtype, sign: int) -> None:
    """Compared with what conversion does, for every number near the limit."""
    if dtype == mx.float32:
        bits = np.arange(0x477FE000 - 4, 0x47801000 + 4, 4095, dtype=np.uint32)
        bits = np.concatenate([bits, [0x477FEFFF, 0x477FF000]]).astype(np.uint32)
    else:
        bits = np.arange(0x4770, 0x4790, dtype=np.uint16)
    numbers = sign * mx.array(bits).view(dtype)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {str(i): numbers[i : i + 1] for i in range(numbers.size)})
    tensors = read_header(tmp_path / "x.safetensors")
    overflows = mx.isinf(numbers.astype(mx.float16)).tolist()
    assert any(overflows)
    assert not all(overflows)
    with TensorSource() as source:
        for i, overflow in enumerate(overflows):
            if overflow:
                with pytest.raises(WeightsError, match="float16"):
                    source.read(tensors[str(i)], dtype=mx.float16)
            else:
                source.read(tensors[str(i)], dtype=mx.float16)


def test_largest_finite_numbers_pass(tmp_path: Path) -> None:
    arrays = {
        "bf16": mx.array([LARGEST_BF16, LARGEST_BF16 | 0x8000], mx.uint16).view(mx.bfloat16),
        "f32": mx.array([LARGEST_F32, LARGEST_F32 | 0x80000000], mx.uint32).view(mx.float32),
    }
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays)
    with TensorSource() as source:
        for name, tensor in read_header(tmp_path / "x.safetensors").items():
            assert mx.array_equal(source.read(tensor), arrays[name])


def test_a_file_cut_after_the_check_is_an_error(file: Path) -> None:
    tensors = read_header(file)
    last = max(tensors.values(), key=lambda tensor: tensor.end)
    file.write_bytes(file.read_bytes()[:-1])
    with TensorSource() as source, pytest.raises(WeightsError, match="ended early"):
        source.read(last)


def test_files_are_closed(file: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    before = open_files()
    with TensorSource() as source:
        source.read(read_header(file)["a"])
        assert open_files() == before + 1
    assert open_files() == before
