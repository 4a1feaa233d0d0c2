"""Which safetensors files a checkpoint folder holds, and every tensor in them by name, index and headers compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ling_serve.errors import WeightsError
from ling_serve.model.weights.listing import listing
from ling_serve.model.weights.safetensors_header import StoredTensor, read_header

INDEX = "model.safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True)
class Catalog(Mapping[str, StoredTensor]):
    """Every tensor of a checkpoint, by name. Only headers were read."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def __getitem__(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def read_catalog(folder: Path) -> Catalog:
    """Read the index, if there is one, and all headers. Raises WeightsError where they do not agree."""
    index = folder / INDEX
    if index.exists():
        return _from_index(folder, _read_index(index))
    return _without_index(folder)


def _from_index(folder: Path, weight_map: Mapping[str, str]) -> Catalog:
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            f"{folder}: {INDEX} names files that are not there: {listing(missing)}; download the checkpoint again"
        )
    tensors = _merge(folder, files)
    absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in tensors]
    if absent:
        raise WeightsError(f"{folder}: {INDEX} lists tensors that the files lack: {listing(absent)}")
    moved = [
        f"{name} (listed in {file}, stored in {tensors[name].file.name})"
        for name, file in weight_map.items()
        if tensors[name].file.name != file
    ]
    if moved:
        raise WeightsError(f"{folder}: {INDEX} lists tensors in the wrong file: {listing(moved)}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise WeightsError(
            f"{folder}: the files hold tensors that {INDEX} does not list: {listing(unlisted)}; "
            "index and files are not of the same checkpoint"
        )
    return Catalog(folder, tensors)


def _without_index(folder: Path) -> Catalog:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    names = [name for name in names if name.startswith("model")] or names
    _check_numbering(folder, names)
    return Catalog(folder, _merge(folder, names))


def _check_numbering(folder: Path, names: list[str]) -> None:
    """Shards say how many there are; without an index that is the only way to miss one."""
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        width, count = len(match["number"]), int(match["count"])
        # A count out of a file name is bounded by what can be listed, not trusted.
        if count > 100_000:
            raise WeightsError(f"{folder}: {name} claims to be one of {count} files")
        siblings = [
            f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors" for number in range(1, count + 1)
        ]
        missing = [sibling for sibling in siblings if sibling not in names]
        if missing:
            raise WeightsError(f"{folder}: files are missing: {listing(missing)}; download the checkpoint again")


def _merge(folder: Path, files: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(folder / file).items():
            if name in tensors:
                raise WeightsError(
                    f"{folder}: {name} is stored twice, in {tensors[name].file.name} and {file}; remove one of them"
                )
            tensors[name] = tensor
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{index} cannot be read as JSON: {error}") from error
    weight_map: Any = cast("dict[str, Any]", value).get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(
            f"{index}: weight_map is {_shown(cast('object', weight_map))}; expected tensor name → file name"
        )
    for name, file in cast("dict[str, Any]", weight_map).items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(
                f"{index}: {name} is in {file!r}; expected the name of a .safetensors file in the same folder"
            )
    return cast("dict[str, str]", weight_map)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:100]
