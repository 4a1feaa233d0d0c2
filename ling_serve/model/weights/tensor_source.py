"""Reads stored tensors, or leading slices of them, into MLX arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ling_serve.errors import WeightsError
from ling_serve.model.weights.safetensors_header import StoredTensor

MAX_READ_BYTES = 1 << 30
"""One read call takes less than 2 GiB on every system."""


@dataclass(frozen=True)
class _Encoding:
    """How one stored dtype looks to numpy and to MLX."""

    raw: str
    """The numpy type of the same width that every bit pattern passes through unchanged."""
    array: mx.Dtype
    infinity: int | None = None
    """Bit pattern; NaN lies above it."""
    half_overflow: int = 0
    """The least bit pattern that float16 rounds to infinity."""


_ENCODINGS: Mapping[str, _Encoding] = {
    "F32": _Encoding("<u4", mx.float32, infinity=0x7F800000, half_overflow=0x477FF000),
    "BF16": _Encoding("<u2", mx.bfloat16, infinity=0x7F80, half_overflow=0x4780),
    "F16": _Encoding("<u2", mx.float16, infinity=0x7C00, half_overflow=0x7C00),
    "U32": _Encoding("<u4", mx.uint32),
    "U8": _Encoding("|u1", mx.uint8),
}

READABLE_DTYPES = frozenset(_ENCODINGS)


class TensorSource:
    """Open files of a checkpoint. Use it as a context manager; memory holds nothing but what `read` returned."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, tensor: StoredTensor, rows: slice | None = None, *, dtype: mx.Dtype | None = None) -> mx.array:
        """The tensor, or its `rows` along the first axis (step 1): only those bytes are read.

        Returns an array of `dtype`, by default the stored one. Raises WeightsError if the file ends early, a number is
        NaN or infinite, or float16 cannot hold it.
        """
        encoding = _ENCODINGS[tensor.dtype]
        start, stop = (0, 1) if not tensor.shape else (rows or slice(None)).indices(tensor.shape[0])[:2]
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        row_bytes = tensor.nbytes // max(1, tensor.shape[0] if tensor.shape else 1)
        raw = np.empty(shape, encoding.raw)
        self._fill(raw, tensor, tensor.begin + start * row_bytes)
        if encoding.infinity is not None:
            _check_finite(raw, encoding, tensor, to_half=dtype is not None and dtype == mx.float16)
        array = mx.array(cast(Any, raw))
        if array.dtype != encoding.array:
            array = array.view(encoding.array)
        return array if dtype is None else array.astype(dtype)

    def _fill(self, raw: np.ndarray[Any, Any], tensor: StoredTensor, offset: int) -> None:
        descriptor = self._open(tensor.file)
        buffer = raw.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done : done + MAX_READ_BYTES]], offset + done)
            if count == 0:
                raise WeightsError(f"{tensor.file} ended early while {tensor.name} was read; was it changed meanwhile?")
            done += count

    def _open(self, file: Path) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise WeightsError(f"{file} cannot be read: {error}") from error
        return self._descriptors[file]


def _check_finite(raw: np.ndarray[Any, Any], encoding: _Encoding, tensor: StoredTensor, *, to_half: bool) -> None:
    if encoding.infinity is not None and _reaches(raw, encoding.infinity):
        raise WeightsError(f"{tensor.file}: {tensor.name} holds NaN or infinite numbers; the file is damaged")
    if to_half and _reaches(raw, encoding.half_overflow):
        raise WeightsError(
            f"{tensor.name} holds numbers that float16 cannot represent (above 65504); use --dtype bfloat16 or float32"
        )


def _reaches(raw: np.ndarray[Any, Any], bits: int) -> bool:
    """Whether the magnitude of any number is at least that of the bit pattern `bits`.

    With the sign bit as the top one, positive numbers order as signed integers and negative ones as unsigned.
    """
    if raw.size == 0:
        return False
    sign = 1 << (8 * raw.itemsize - 1)
    return bool(raw.max() >= sign | bits) or bool(raw.view(np.dtype(f"<i{raw.itemsize}")).max() >= bits)
