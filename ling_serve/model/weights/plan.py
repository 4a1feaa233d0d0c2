"""Compares what the model expects with what the headers say, before a byte of weights is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]

from ling_serve.errors import WeightsError
from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.catalog import Catalog
from ling_serve.model.weights.listing import listing
from ling_serve.model.weights.recipe import Build, Kind, Recipe, Shape, Source, Target
from ling_serve.model.weights.registry import FORMATS
from ling_serve.model.weights.safetensors_header import StoredTensor

_ALWAYS_FLOAT32 = ("A_log", "dt_bias", "expert_bias")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.inv_freq")
"""Buffers that some exporters write; the model computes them."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Step:
    """Read `sources`, build, put the result at `target`."""

    target: Target
    sources: tuple[StoredTensor, ...]
    build: Build

    @property
    def stored_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def dtype(self, compute: mx.Dtype) -> mx.Dtype | None:
        """What the parameter is kept in; None = as stored.

        The decay gate and the router's bias are always float32. The router computes in float32, so its weights stay
        as stored unless everything is float32. Scales and biases follow the compute dtype: otherwise MLX would convert
        them, or promote the result, in every product.
        """
        if self.target.kind is not Kind.FLOAT:
            return None
        if self.target.leaf in _ALWAYS_FLOAT32:
            return mx.float32
        if self.target.path.endswith(".mlp.gate.weight") and compute != mx.float32:
            return None
        return compute


@dataclass(frozen=True)
class Plan:
    """How to fill a model from a checkpoint, in the model's order."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    """What was recognised and what was skipped."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that will be read; a tensor that two parameters come from counts twice."""
        return sum(step.stored_bytes for step in self.steps)


def plan_weights(model: nn.Module, catalog: Catalog, config: ModelConfig) -> Plan:
    """Find the tensors of every parameter of `model`, whose quantised modules are already in place.

    Raises WeightsError with all missing, left-over, misshapen and mistyped tensors at once.
    """
    faults = _Faults()
    steps: list[Step] = []
    layouts: Counter[str] = Counter()
    used: set[str] = set()
    for target in _targets(model):
        recipes = [recipe for recipes_of in FORMATS for recipe in recipes_of(target, config)]
        recipe = _choose(recipes, catalog)
        used.update(source.name for source in recipe.sources)
        stored = [faults.check(source, target.kind, recipes, catalog) for source in recipe.sources]
        layouts[recipe.layout] += 1
        steps.append(Step(target, tuple(tensor for tensor in stored if tensor is not None), recipe.build))
    skipped = _skip(catalog, config, used)
    faults.left_over = [name for name in catalog if name not in used and name not in skipped]
    faults.report(catalog, config)
    notes = [f"{layout}: {count} parameters" for layout, count in layouts.items() if layout]
    return Plan(tuple(steps), (*notes, *_skip_notes(skipped, catalog, config)))


def check_counts(catalog: Catalog, config: ModelConfig) -> None:
    """Compare the numbers of layers and experts, before a model of that many parts is made. Raises WeightsError."""
    layers = {int(match[1]) for match in map(_LAYER.fullmatch, catalog) if match is not None}
    if config.num_hidden_layers - 1 not in layers:
        raise WeightsError(
            f"config.json: num_hidden_layers is {config.num_hidden_layers}, but {catalog.folder} has tensors of "
            f"{len(layers)} layers and none of layer {config.num_hidden_layers - 1}"
        )
    routers = (tensor for name, tensor in catalog.items() if name.endswith(".mlp.gate.weight") and tensor.shape)
    for router in routers:
        if router.shape[0] != config.num_experts:
            raise WeightsError(
                f"config.json: num_experts is {config.num_experts}, but {router.name} is {list(router.shape)}, "
                f"the router of {router.shape[0]}"
            )


def is_mtp(name: str, catalog: Catalog, config: ModelConfig) -> bool:
    """Whether the tensor belongs to a multi-token-prediction layer, stored after the main layers.

    Such a layer is announced by num_nextn_predict_layers or shows itself by its eh_proj. Any other layer past the end
    means that config.json and the weights are not of the same model.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return False
    index, first = int(match[1]), config.num_hidden_layers
    announced = first <= index < first + config.num_nextn_predict_layers
    return announced or (index >= first and f"model.layers.{index}.eh_proj.weight" in catalog)


def _targets(model: nn.Module) -> list[Target]:
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore[reportAssignmentType]
    return [Target(path, tuple(array.shape), _kind(array.dtype)) for path, array in parameters]


def _kind(dtype: mx.Dtype) -> Kind:
    return {mx.uint32: Kind.PACKED, mx.uint8: Kind.CODES}.get(dtype, Kind.FLOAT)


def _choose(recipes: Sequence[Recipe], catalog: Catalog) -> Recipe:
    """The first that fits; else the first of which some tensor is there, so that errors name its other tensors."""

    def fits(source: Source) -> bool:
        return source.name in catalog and catalog[source.name].shape in source.shapes

    for recipe in recipes:
        if all(fits(source) for source in recipe.sources):
            return recipe
    for recipe in recipes:
        if any(source.name in catalog for source in recipe.sources):
            return recipe
    return recipes[0]


class _Faults:
    """Everything that does not fit, collected for one error."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.mistyped: list[str] = []
        self.left_over: list[str] = []

    def check(self, source: Source, kind: Kind, recipes: Sequence[Recipe], catalog: Catalog) -> StoredTensor | None:
        """The stored tensor, or None with a fault noted. All shapes that some recipe accepts are named as expected."""
        tensor = catalog.get(source.name)
        shapes = [shape for recipe in recipes for s in recipe.sources if s.name == source.name for shape in s.shapes]
        if tensor is None:
            self.missing.append(f"{source.name} {_any_of(shapes)}")
            return None
        if tensor.dtype not in kind.stored_dtypes:
            self.mistyped.append(f"{source.name} is {tensor.dtype}, expected {' or '.join(kind.stored_dtypes)}")
            return None
        if tensor.shape not in shapes:
            self.misshapen.append(f"{source.name} is {list(tensor.shape)}, expected {_any_of(shapes)}")
            return None
        return tensor

    def report(self, catalog: Catalog, config: ModelConfig) -> None:
        groups = {
            "missing": _once(self.missing),
            "misshapen": _once(self.misshapen),
            "of the wrong dtype": _once(self.mistyped),
            "left over": [_describe(catalog[name], config) for name in self.left_over],
        }
        separator = "\n    "
        lines = [f"{len(items)} {what}:\n    {listing(items, separator)}" for what, items in groups.items() if items]
        if lines:
            raise WeightsError(f"the tensors in {catalog.folder} do not fit its config.json\n  " + "\n  ".join(lines))


def _once(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _describe(tensor: StoredTensor, config: ModelConfig) -> str:
    match = _LAYER.fullmatch(tensor.name)
    text = f"{tensor.name} {tensor.dtype} {list(tensor.shape)}"
    if match is not None and int(match[1]) >= config.num_hidden_layers:
        text += f" (num_hidden_layers is {config.num_hidden_layers})"
    return text


def _any_of(shapes: Sequence[Shape]) -> str:
    return " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))


def _skip(catalog: Catalog, config: ModelConfig, used: set[str]) -> set[str]:
    skipped = {name for name in catalog if name not in used and is_mtp(name, catalog, config)}
    skipped.update(name for name in catalog if name.endswith(_IGNORED_SUFFIXES))
    if config.tie_word_embeddings:
        skipped.update(name for name in catalog if name.startswith("lm_head."))
    return skipped


def _skip_notes(skipped: set[str], catalog: Catalog, config: ModelConfig) -> list[str]:
    notes: list[str] = []
    mtp = [name for name in skipped if is_mtp(name, catalog, config)]
    if mtp:
        layers = sorted({name.split(".")[2] for name in mtp}, key=int)
        size = sum(catalog[name].nbytes for name in mtp)
        notes.append(
            f"multi-token prediction is not used: skipped {len(mtp)} tensors ({size / 1e6:.1f} MB) of layer "
            + ", ".join(layers)
        )
    others = sorted(name for name in skipped if not is_mtp(name, catalog, config))
    if others:
        notes.append(f"skipped what the model computes or shares: {listing(others)}")
    return notes
