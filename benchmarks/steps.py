"""Times the engine's steps in one process, without HTTP, and says which modules they spend their time in.

    python benchmarks/steps.py
    python benchmarks/steps.py --modules

`--modules` evaluates every module's inputs and outputs apart, which makes a step slower but shows where its time goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this file's own folder would be there

import ling_serve.blas  # noqa: E402, F401  (must come before MLX)

import mlx.core as mx  # noqa: E402  # isort: skip
import mlx.nn as nn  # noqa: E402  # isort: skip

from benchmarks.random_checkpoint import prompt_ids, write_random_checkpoint  # noqa: E402
from ling_serve.config import EngineOptions, ModelOptions, ServeConfig  # noqa: E402
from ling_serve.engine.build import build_engine  # noqa: E402
from ling_serve.engine.engine import Engine  # noqa: E402
from ling_serve.engine.request import Request, SamplingParams  # noqa: E402


@dataclass
class Timings:
    """Of the measured steps, in milliseconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        wall, cpu = self.wall, self.cpu
        return (
            f"{len(wall)} steps, wall median {statistics.median(wall):.2f} ms, least {min(wall):.2f} ms, "
            f"CPU median {statistics.median(cpu):.2f} ms"
        )


@dataclass
class ModuleClock:
    """Time inside modules, less that of the modules they call."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inner: list[float] = field(default_factory=list)

    def watch(self, kind: type[nn.Module] = nn.Module) -> None:
        """Time every kind of module there is."""
        for narrower in kind.__subclasses__():
            if "__call__" in vars(narrower):
                narrower.__call__ = self._timed(narrower.__name__, narrower.__call__)
            self.watch(narrower)

    def report(self, steps: int) -> str:
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        return "\n".join(
            f"    {name:24} {1e3 * seconds / steps:9.3f} ms/step, {self.calls[name] / steps:5.1f} calls"
            for name, seconds in ranked
        )

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            mx.eval(_arrays(arguments))
            started = time.perf_counter()
            self._inner.append(0.0)
            result = call(module, *arguments, **options)
            mx.eval(_arrays(result))
            spent = time.perf_counter() - started
            self.seconds[name] += spent - self._inner.pop()
            self.calls[name] += 1
            if self._inner:
                self._inner[-1] += spent
            return result

        return timed


def _arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    return [array for item in value for array in _arrays(item)] if isinstance(value, (list, tuple)) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a small random one")
    parser.add_argument("--modules", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint or write_random_checkpoint(Path(scratch))
        engine = build_engine(ServeConfig(ModelOptions(str(checkpoint)), EngineOptions()))
    clock = ModuleClock() if arguments.modules else None
    if clock is not None:
        clock.watch()
    for name, count, tokens, output in (("prefill", 1, 2000, 1), ("1 stream", 1, 32, 100), ("16 streams", 16, 32, 100)):
        _measure(engine, count, tokens, output)
        if clock is not None:
            clock.clear()
        timings = _measure(engine, count, tokens, output)
        print(f"{name}: {timings}")
        if clock is not None:
            print(clock.report(len(timings.wall)))


def _measure(engine: Engine, count: int, tokens: int, output: int) -> Timings:
    """The steps of `count` sequences together, all of them if they write one token, else those that only decode."""
    for number, prompt in enumerate(prompt_ids(count, tokens, seed=count)):
        engine.add(Request(str(number), tuple(prompt), SamplingParams(max_tokens=output, temperature=0.0)))
    timings = Timings()
    while engine.has_work:
        before = engine.stats().computed_tokens
        wall, cpu = time.perf_counter(), time.process_time()
        engine.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if output == 1 or engine.stats().computed_tokens - before <= count:
            timings.wall.append(1e3 * wall)
            timings.cpu.append(1e3 * cpu)
    return timings


if __name__ == "__main__":
    main()
