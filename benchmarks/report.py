"""Tables and JSON of what was measured, with the machine and the versions it was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.load import Summary
from benchmarks.scenarios import Scenario

Rounds = Mapping[str, Sequence[Summary]]
"""Server name → one summary per round."""


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    packages = ("ling-serve", "mlx", "mlx-lm", "cmeel-openblas", "transformers")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def median(summaries: Sequence[Summary]) -> Summary:
    """The median of each number by itself; errors are added up."""
    merged = {
        f.name: statistics.median(getattr(s, f.name) for s in summaries)
        for f in fields(Summary)
        if f.name not in ("errors", "first_error")
    }
    first_error = next((s.first_error for s in summaries if s.first_error), None)
    return Summary(errors=sum(s.errors for s in summaries), first_error=first_error, **merged)


def comparison(scenario: Scenario, rounds: Rounds, ours: str) -> str:
    """A Markdown table of one scenario: a line for each server, and how many times more ours does in a second."""
    lines = [
        f"### {scenario.name}",
        "",
        f"| server | {scenario.figure} | each round | TTFT p50 / p99, ms | inter-token p50 / p95 / p99, ms "
        f"| server CPU, s | errors | {ours} by rate | by CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reference = median(rounds[ours]) if ours in rounds else None
    for name, summaries in rounds.items():
        middle = median(summaries)
        rate = scenario.rate(middle)
        spread = " ".join(f"{scenario.rate(summary):.1f}" for summary in summaries)
        by_rate = by_cpu = "-"
        if reference is not None and name != ours:
            by_rate = _times(scenario.rate(reference), rate)
            by_cpu = _times(middle.server_cpu_s, reference.server_cpu_s)
        lines.append(
            f"| {name} | {rate:.1f} | {spread} | {middle.ttft_p50_ms:.0f} / {middle.ttft_p99_ms:.0f} "
            f"| {middle.itl_p50_ms:.1f} / {middle.itl_p95_ms:.1f} / {middle.itl_p99_ms:.1f} "
            f"| {middle.server_cpu_s:.1f} | {middle.errors} | {by_rate} | {by_cpu} |"
        )
    return "\n".join(lines)


def _times(more: float, less: float) -> str:
    return f"{more / less:.2f} x" if less else "-"


def single(summary: Summary) -> str:
    """A Markdown table of one run."""
    lines = ["| measure | value |", "|---|---|"]
    for name, value in asdict(summary).items():
        lines.append(f"| {name} | {value:.2f} |" if isinstance(value, float) else f"| {name} | {value} |")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
