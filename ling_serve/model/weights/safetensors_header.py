"""The header of one safetensors file, checked against the file itself before any tensor is read.

Layout: 8 bytes little-endian header length, the header (JSON: name → dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from ling_serve.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element. A dtype that is not here is kept by name and refused where a tensor of it is needed."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: bytes `begin` to `end` of `file`."""

    name: str
    dtype: str
    """As the format spells it: F32, BF16, U8, ..."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of `file` by name. Raises WeightsError if the file is damaged, cut short or no safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{file}: the header should be {length} bytes long, the whole file is {size}: "
                    "it is cut short or no safetensors file; download it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: the header is damaged ({error}); download it again") from error
    if not isinstance(entries, dict):
        raise WeightsError(f"{file}: the header is a JSON {type(entries).__name__}; expected an object")
    tensors = {
        name: _stored_tensor(file, name, entry, data_start=8 + length, file_size=size)
        for name, entry in cast("dict[str, Any]", entries).items()
        if name != "__metadata__"
    }
    _check_coverage(file, tensors, data_start=8 + length, file_size=size)
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice} stands in it twice")
    return entries


def _stored_tensor(file: Path, name: str, entry: Any, *, data_start: int, file_size: int) -> StoredTensor:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise WeightsError(f"{file}: the header entry of {name} is {entry!r}; expected dtype, shape and data_offsets")
    begin, end = offsets
    if begin > end:
        raise WeightsError(f"{file}: {name} has data_offsets {list(offsets)}; expected the first not above the second")
    if data_start + end > file_size:
        raise WeightsError(
            f"{file} is cut short: {name} ends at byte {data_start + end}, the file has {file_size}; download it again"
        )
    expected = math.prod(shape) * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else end - begin
    if end - begin != expected:
        raise WeightsError(
            f"{file}: {name} takes {end - begin} bytes; {dtype} {list(shape)} takes {expected}: the header is damaged"
        )
    return StoredTensor(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in cast("Sequence[Any]", value)
    )


def _check_coverage(file: Path, tensors: Mapping[str, StoredTensor], *, data_start: int, file_size: int) -> None:
    """Tensors lie end to end, so that no two share bytes and none is hidden."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise WeightsError(
                f"{file}: {tensor.name} begins at byte {tensor.begin}, expected {position}: the header is damaged"
            )
        position = tensor.end
    if position != file_size:
        raise WeightsError(f"{file}: the tensors end at byte {position}, the file at {file_size}: it is damaged")
