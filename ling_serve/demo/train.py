"""Trains the demo model: `python -m ling_serve.demo.train --out FOLDER [--seconds 500] [--backend torch]`.

Writes `parameters-*.safetensors` (float32; `--resume FOLDER` starts from them, `ling_serve.demo.export` makes the
checkpoint of them) and `log.jsonl`. Data, initial values and the order of the rows come from `--seed`; with `--steps`
the learning rate follows the steps, otherwise the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from ling_serve.demo import CHECKPOINT, evaluate
from ling_serve.demo.parameters import Arrays, initial_parameters
from ling_serve.demo.pool import Rows, make_pool
from ling_serve.model.config import ModelConfig

_PARAMETER_FILES = 2


@dataclass(frozen=True)
class TrainOptions:
    out: Path
    resume: Path | None = None
    backend: str = "mlx"
    """`mlx`, or `torch` for CUDA, where MLX spends minutes compiling the kernels of the step."""
    seconds: float = 500.0
    """How long to train when `steps` is 0."""
    steps: int = 0
    """How many steps to train; the clock then has no say, and the same seed gives the same run on the same machine."""
    rate: float = 2e-3
    warm_up: int = 200
    rows: int = 512
    """Rows of one step, 128 tokens each."""
    conversations: int = 1_000_000
    short_share: float = 0.72
    """Conversations that are one question without thinking."""
    pool: Path | None = None
    """Keep the rows in this .npz file, or take them from it if it exists."""
    bias_rate: float = 2e-3
    eval_seconds: float = 60.0
    eval_samples: int = 512
    dtype: str = "bfloat16"
    compiled: bool = True
    seed: int = 0
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)


@dataclass(frozen=True)
class StepMetrics:
    loss: float
    gradient_norm: float
    most_load: float
    """Of the busiest expert of any layer, relative to uniform."""
    least_load: float


class Trainer(Protocol):
    """What the loop needs of a backend."""

    def step(self, picked: npt.NDArray[np.int32], rate: float, bias_rate: float, number: int) -> None: ...
    def metrics(self) -> StepMetrics: ...
    def predict(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]: ...
    def parameters(self) -> Arrays: ...
    def remember(self) -> None: ...
    def restore(self) -> None: ...


def make_trainer(options: TrainOptions, config: ModelConfig, pool: Rows) -> Trainer:
    parameters = load_parameters(options.resume) if options.resume else initial_parameters(config, options.seed)
    if options.backend == "torch":
        from ling_serve.demo.trainer_torch import TorchTrainer

        return TorchTrainer(config, parameters, pool, options.dtype, compiled=options.compiled)
    import ling_serve.blas  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from ling_serve.demo.trainer_mlx import MlxTrainer

    return MlxTrainer(config, parameters, pool, options.dtype, compiled=options.compiled)


def load_pool(options: TrainOptions) -> Rows:
    if options.pool is not None and options.pool.exists():
        return np.load(options.pool)["rows"]
    rows = make_pool(options.conversations, options.short_share, options.seed, options.workers)
    if options.pool is not None:
        np.savez_compressed(options.pool, rows=rows)
    return rows


def train(options: TrainOptions) -> None:
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "log.jsonl", started)
    pool = load_pool(options)
    trainer = make_trainer(options, ModelConfig.from_file(CHECKPOINT), pool)
    tests = evaluate.tasks(options.eval_samples)
    log.write(options={name: str(value) for name, value in vars(options).items()}, rows=len(pool))
    rng = np.random.default_rng(options.seed)
    number, counted, next_eval, since = 0, 0, options.eval_seconds, time.monotonic()
    best, slower = math.inf, 1.0
    while True:
        elapsed = time.monotonic() - started
        progress = number / options.steps if options.steps else elapsed / options.seconds
        if progress >= 1.0:
            break
        number += 1
        factor = slower * min(1.0, number / options.warm_up) * (0.5 + 0.5 * math.cos(math.pi * progress))
        picked = rng.integers(0, len(pool), options.rows, dtype=np.int32)
        trainer.step(picked, options.rate * factor, options.bias_rate * factor, number)
        if number % 100 == 0 or number in (1, 2, 5, 10, 20, 50):
            metrics = trainer.metrics()
            pace = (time.monotonic() - since) / (number - counted)
            log.write(step=number, ms=round(1000 * pace, 1), **{k: round(v, 4) for k, v in vars(metrics).items()})
            if metrics.loss < 1.5 * best + 0.01:
                best = min(best, metrics.loss)
                trainer.remember()
            elif not metrics.loss < 4.0 * best + 0.1:
                trainer.restore()
                slower *= 0.6
                log.write(step=number, went_back_to=round(best, 4), rate_factor=round(slower, 3))
            counted, since = number, time.monotonic()
        if elapsed > next_eval:
            next_eval = elapsed + options.eval_seconds
            log.write(step=number, exact=scores(trainer, tests))
            save_parameters(trainer.parameters(), options.out)
            counted, since = number, time.monotonic()
    save_parameters(trainer.parameters(), options.out)
    log.write(step=number, exact=scores(trainer, tests))
    log.write(step=number, exact=scores(trainer, [evaluate.all_products()]))


def scores(trainer: Trainer, tests: list[evaluate.Task]) -> dict[str, float]:
    """Percent of rows right, by task."""
    return {task.name: round(100 * float(evaluate.right_rows(trainer.predict, task.rows).mean()), 2) for task in tests}


def save_parameters(parameters: Mapping[str, npt.NDArray[np.float32]], folder: Path) -> None:
    names = sorted(parameters)
    for index in range(_PARAMETER_FILES):
        part = {name: np.ascontiguousarray(parameters[name]) for name in names[index::_PARAMETER_FILES]}
        safetensors.numpy.save_file(part, folder / f"parameters-{index}.safetensors")


def load_parameters(folder: Path) -> Arrays:
    parameters: Arrays = {}
    for index in range(_PARAMETER_FILES):
        parameters |= safetensors.numpy.load_file(folder / f"parameters-{index}.safetensors")
    return parameters


class Log:
    """Prints events with the seconds since the start, and keeps them as JSON lines."""

    def __init__(self, file: Path, started: float) -> None:
        self._file = file
        self._started = started

    def write(self, **event: Any) -> None:
        line = json.dumps({"s": round(time.monotonic() - self._started, 1), **event})
        print(line, flush=True)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--pool", type=Path)
    defaults = TrainOptions(Path())
    for option in fields(TrainOptions):
        if option.name in ("out", "resume", "pool"):
            continue
        value: float | str = getattr(defaults, option.name)
        flag = f"--{option.name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    train(TrainOptions(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
