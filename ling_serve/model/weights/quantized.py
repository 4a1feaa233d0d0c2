"""Which modules a checkpoint stores quantised, in what mode: read off the tensors, then compared with config.json.

A quantised X has X.weight (uint32, packed), X.scales and, in the affine mode only, X.biases. With the module's input
width `in`: group = in / scales.shape[-1], bits = 32 * weight.shape[-1] / in; uint8 scales mean a microscaling mode, and
bits and group say which (mlx-lm 0.32.2, `infer_quant_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ling_serve.errors import ConfigFieldError, UnsupportedCheckpoint, WeightsError
from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.catalog import Catalog
from ling_serve.model.weights.listing import listing
from ling_serve.model.weights.plan import is_mtp
from ling_serve.model.weights.recipe import Kind

_MICROSCALING = {(8, 32): "mxfp8", (4, 32): "mxfp4", (4, 16): "nvfp4"}
_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    mode: str
    """affine, mxfp4, mxfp8 or nvfp4."""
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit group {self.group_size}"


def detect_quantization(model: nn.Module, catalog: Catalog, config: ModelConfig) -> dict[str, Quantization]:
    """Module path → mode, for each module of the unquantised `model` that the checkpoint stores quantised.

    Raises WeightsError (shapes no mode has, or a contradiction to config.json) and UnsupportedCheckpoint.
    """
    modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
    found: dict[str, Quantization] = {}
    for name in catalog:
        path = name.removesuffix(".scales")
        if path == name or is_mtp(name, catalog, config):
            continue
        if path.endswith(".attention.kv_b_proj"):
            raise UnsupportedCheckpoint(
                f"{name}: kv_b_proj was quantised before it was split; use a checkpoint written by mlx_lm.convert"
            )
        if path not in modules or f"{path}.weight" not in catalog:
            continue  # left over, or missing: the plan says so
        if not hasattr(modules[path], "to_quantized"):
            raise UnsupportedCheckpoint(f"{name}: {path} is quantised; it is only read unquantised")
        found[path] = _infer(path, cast("mx.array", modules[path]["weight"]).shape[-1], catalog)
    _compare(found, modules, config)
    return found


def quantize_modules(model: nn.Module, quantizations: Mapping[str, Quantization]) -> None:
    """Swap each named module for its quantised twin. Nothing is computed: all parameters are replaced."""

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        del module
        chosen = quantizations.get(path)
        return False if chosen is None else {"group_size": chosen.group_size, "bits": chosen.bits, "mode": chosen.mode}

    nn.quantize(model, class_predicate=settings)


def check_codes(name: str, scales: mx.array, group_size: int) -> None:
    """Raise WeightsError if one-byte scales hold a NaN: 0xFF in E8M0, the largest magnitude in nvfp4's E4M3."""
    broken = scales == 0xFF if group_size == 32 else (scales & 0x7F) == 0x7F
    if bool(broken.any().item()):
        raise WeightsError(f"{name} holds NaN; the file is damaged")


def quantization_notes(found: Mapping[str, Quantization], config: ModelConfig) -> tuple[str, ...]:
    by_mode: dict[Quantization, list[str]] = {}
    for path, quantization in found.items():
        by_mode.setdefault(quantization, []).append(path)
    notes = [f"{quantization}: {len(paths)} modules" for quantization, paths in by_mode.items()]
    default, entries = _configured(config)
    other = sorted(path for path, each in found.items() if default not in (None, each) and path not in entries)
    if other:
        notes.append(f"not in the mode that config.json gives for all ({default}), read as stored: {listing(other)}")
    return tuple(notes)


def _infer(path: str, width: int, catalog: Catalog) -> Quantization:
    weight, scales = catalog[f"{path}.weight"], catalog[f"{path}.scales"]
    shapes = f"{path}: weight {weight.dtype} {list(weight.shape)} and scales {scales.dtype} {list(scales.shape)}"
    if weight.dtype not in Kind.PACKED.stored_dtypes or not weight.shape or not scales.shape:
        raise WeightsError(f"{shapes}; expected packed U32 weights beside scales")
    packed, groups = weight.shape[-1], scales.shape[-1]
    if groups == 0 or width % groups or 32 * packed % width:
        raise WeightsError(f"{shapes} do not divide the input width {width} into groups and bits")
    bits, group = 32 * packed // width, width // groups
    if scales.dtype in Kind.CODES.stored_dtypes:
        mode = _MICROSCALING.get((bits, group))
    else:
        mode = "affine" if bits in _AFFINE_BITS and group in _AFFINE_GROUPS else None
    if mode is None:
        raise WeightsError(f"{shapes} mean {bits} bits in groups of {group} (input width {width}), which no mode has")
    return Quantization(mode, bits, group)


def _compare(found: Mapping[str, Quantization], modules: Mapping[str, nn.Module], config: ModelConfig) -> None:
    """An entry for a path must hold; the setting for all must hold for some module, or it describes other weights.

    In mixed checkpoints unlisted modules may differ from the setting for all; mlx-lm reads them by their tensors too.
    """
    default, entries = _configured(config)
    for path, entry in entries.items():
        if path in modules and found.get(path) != entry:
            raise WeightsError(
                f"config.json says that {path} is {entry or 'not quantised'}; "
                f"its tensors are {found.get(path) or 'not quantised'}"
            )
    if default is not None and default not in found.values():
        stored = f"{next(iter(found))} is {next(iter(found.values()))}" if found else "no tensor is quantised"
        raise WeightsError(f"config.json says that the weights are {default}, but {stored}")


def _configured(config: ModelConfig) -> tuple[Quantization | None, dict[str, Quantization | None]]:
    """The setting for all modules, and the entries for single paths (None = not quantised)."""
    field, values = "quantization", config.quantization
    if values is None:
        field, values = "quantization_config", config.quantization_config
    if values is None:
        return None, {}
    entries: dict[str, Quantization | None] = {}
    for path, entry in values.items():
        if entry is False:
            entries[path] = None
        elif isinstance(entry, Mapping):
            inner = cast("Mapping[str, Any]", entry)
            entries[path] = _setting(f"{field}.{path}", dict(values) | dict(inner))
    # With entries for single paths the setting for all may be absent.
    default = _setting(field, values) if "bits" in values or not entries else None
    return default, entries


def _setting(field: str, values: Mapping[str, Any]) -> Quantization:
    mode = values.get("mode", "affine")
    if mode not in ("affine", *_MICROSCALING.values()):
        raise ConfigFieldError(f"{field}.mode", mode, "affine, mxfp4, mxfp8 or nvfp4")
    bits, group = values.get("bits"), values.get("group_size")
    for name, value in (("bits", bits), ("group_size", group)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigFieldError(f"{field}.{name}", value, "an integer")
    return Quantization(mode, cast("int", bits), cast("int", group))
