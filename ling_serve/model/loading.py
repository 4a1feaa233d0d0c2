"""From a checkpoint folder to a model that is ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx
from ling_kernels.device import on_cpu
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]

from ling_serve.config import DTypeName
from ling_serve.errors import CheckpointError
from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.catalog import read_catalog
from ling_serve.model.weights.compute_dtype import choose_dtype, free_memory_bytes
from ling_serve.model.weights.fill import Progress, fill_model
from ling_serve.model.weights.plan import check_counts, plan_weights
from ling_serve.model.weights.quantized import detect_quantization, quantization_notes, quantize_modules
from ling_serve.model.weights.refused import refuse_folder, refuse_quantization_method, refuse_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    model: BailingV3
    config: ModelConfig
    dtype: mx.Dtype
    """What hidden states, latents and convolution inputs are computed and kept in."""
    weight_bytes: int
    """Bytes of all parameters in memory."""
    notes: tuple[str, ...]
    """What was recognised, what was skipped and why this dtype: for the start-up report."""


def load_model(path: Path, *, dtype: DTypeName = "auto", progress: Progress | None = None) -> LoadedModel:
    """Load the checkpoint in the folder `path`, on the thread that will run the model.

    Config, index and headers are compared before anything is allocated; then one parameter after another is read, so
    memory never holds two copies of the model. `progress` hears of the bytes read so far and in all.

    Raises CheckpointError, or one of its subclasses, naming what does not fit.
    """
    loaded = read_weights(path, dtype=dtype, progress=progress)
    loaded.model.fuse()
    log.info("%s: %s", path, "; ".join(loaded.notes))
    return replace(loaded, weight_bytes=_nbytes(loaded.model))


def read_weights(path: Path, *, dtype: DTypeName = "auto", progress: Progress | None = None) -> LoadedModel:
    """Like `load_model`, with every parameter as stored: none are rearranged for speed yet."""
    refuse_folder(path)
    config = ModelConfig.from_file(path)
    refuse_quantization_method(config)
    catalog = read_catalog(path)
    refuse_tensors(catalog)
    check_counts(catalog, config)

    model = _build(config)
    quantizations = detect_quantization(model, catalog, config)
    quantize_modules(model, quantizations)
    plan = plan_weights(model, catalog, config)
    chosen, reason = choose_dtype(dtype, plan, on_cpu=on_cpu(), free_bytes=free_memory_bytes())

    fill_model(model, plan, chosen, progress)
    notes = (
        f"computes in {str(chosen).removeprefix('mlx.core.')} ({reason})",
        *quantization_notes(quantizations, config),
        *plan.notes,
    )
    return LoadedModel(model, config, chosen, _nbytes(model), notes)


def _build(config: ModelConfig) -> BailingV3:
    """The model with random parameters that are never evaluated."""
    try:
        return BailingV3(config)
    except (OverflowError, TypeError, ValueError) as error:  # MLX's, for sizes beyond what an array can have
        raise CheckpointError(f"config.json describes a model that cannot be built: {error}") from error


def _nbytes(model: BailingV3) -> int:
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return sum(array.nbytes for _, array in parameters)
