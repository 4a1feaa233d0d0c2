"""How a parameter of the model comes out of stored tensors: the words in which a checkpoint format is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import mlx.core as mx

from ling_serve.model.config import ModelConfig

Shape = tuple[int, ...]


class Kind(Enum):
    """What the numbers of a parameter are, and so which stored dtypes may hold them."""

    FLOAT = ("F32", "F16", "BF16")
    PACKED = ("U32",)
    """Quantised weights, several in each word."""
    CODES = ("U8",)
    """Scales of the microscaling modes, one byte each."""

    @property
    def stored_dtypes(self) -> tuple[str, ...]:
        return self.value


@dataclass(frozen=True)
class Target:
    """One parameter of the model: where it goes and what it must be."""

    path: str
    """As in the module tree: `model.layers.0.attention.q_proj.weight`."""
    shape: Shape
    kind: Kind

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Source:
    """A stored tensor that a recipe reads, and the shapes it may have."""

    name: str
    shapes: tuple[Shape, ...]


Build = Callable[[Sequence[mx.array]], mx.array]
"""From the sources, in order, to the parameter in its shape."""


@dataclass(frozen=True)
class Recipe:
    """One way to store a target."""

    layout: str
    """Said in the log when it was used; empty for a tensor stored under the parameter's own name and shape."""
    sources: tuple[Source, ...]
    build: Build


class CheckpointFormat(Protocol):
    """The recipes a format knows for a target, the usual one first; none where it says nothing about the target."""

    def __call__(self, target: Target, config: ModelConfig) -> Iterator[Recipe]: ...
