"""From a configuration to an engine that has run once: load, measure, plan, allocate, warm up."""

from __future__ import annotations

import ling_serve.blas  # isort: skip  (must come before MLX)

from pathlib import Path

import mlx.core as mx
from ling_kernels.device import on_cpu

from ling_serve.cache import Caches
from ling_serve.cache.budget import MemoryPlan, Row, plan_memory, show_bytes
from ling_serve.config import ServeConfig
from ling_serve.engine.device_memory import limit_mlx, memory_limit_bytes
from ling_serve.engine.engine import Engine
from ling_serve.engine.step_cost import measure_step
from ling_serve.model.checkpoint_path import resolve_checkpoint
from ling_serve.model.loading import LoadedModel, load_model
from ling_serve.model.weights.fill import Progress

LEAST_BUFFER_CACHE = 64 << 20
"""Freed buffers that MLX may keep even when steps are small, in bytes."""


def build_engine(config: ServeConfig, progress: Progress | None = None) -> Engine:
    """`build_engine_from` the folder that `config` names."""
    return build_engine_from(resolve_checkpoint(config.model.model), config, progress)


def build_engine_from(path: Path, config: ServeConfig, progress: Progress | None = None) -> Engine:
    """Call this on the thread that will run the engine. `progress` hears of the bytes of weights read.

    Raises CheckpointError for a checkpoint that cannot be served, ConfigError for settings that do not fit it.
    """
    limit = memory_limit_bytes()
    loaded = load_model(path, dtype=config.model.dtype, progress=progress)
    layout = loaded.config.cache_layout(loaded.dtype)
    vocab_size, model_max_len = loaded.config.vocab_size, loaded.config.max_position_embeddings
    cost = measure_step(loaded.model, layout, config.engine, vocab_size=vocab_size, max_model_len=model_max_len)
    plan = plan_memory(
        layout,
        weight_bytes=loaded.weight_bytes,
        step_bytes=cost.bytes,
        step_bytes_per_token=cost.bytes_per_token,
        memory_limit_bytes=limit,
        options=config.engine,
        model_max_len=model_max_len,
    )
    limit_mlx(max(LEAST_BUFFER_CACHE, cost.bytes + cost.bytes_per_token * plan.max_model_len))
    caches = Caches.allocate(
        layout, num_blocks=plan.num_blocks, block_size=config.engine.block_size, num_slots=plan.num_slots
    )
    engine = Engine(
        loaded.model,
        caches,
        config.engine,
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        info=_info(config, loaded, plan),
    )
    engine.warm_up()
    return engine


def _info(config: ServeConfig, loaded: LoadedModel, plan: MemoryPlan) -> tuple[Row, ...]:
    model = loaded.config
    mla, kda = len(model.mla_layers), len(model.kda_layers)
    blas = ling_serve.blas.OPENBLAS
    device = str(mx.device_info().get("device_name", "unknown device"))
    return (
        ("model", config.model.model),
        ("layers", f"{mla} MLA / {kda} KDA"),
        ("device", f"{device}, {'OpenBLAS' if blas else 'the BLAS of MLX'}" if on_cpu() else device),
        ("dtype", f"{str(loaded.dtype).removeprefix('mlx.core.')}, {show_bytes(loaded.weight_bytes)} of weights"),
        *plan.rows,
    )
