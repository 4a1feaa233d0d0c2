"""What is measured of each server, and the one number of it that the ratio is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load import Load, Summary
from benchmarks.random_checkpoint import prompts


@dataclass(frozen=True)
class Scenario:
    name: str
    load: Callable[[int], Load]
    """From a seed: each round sends other prompts."""
    figure: str
    """What `rate` is, with its unit."""
    rate: Callable[[Summary], float]
    """Higher is better."""
    expected_output_tokens: int


SCENARIOS = (
    Scenario(
        name="prefill of 2,000 tokens",
        load=lambda seed: Load(prompts(2, 2000, seed), max_tokens=1, concurrency=1),
        figure="prompt tokens/s",
        rate=lambda summary: summary.prompt_tokens_per_s,
        expected_output_tokens=2,
    ),
    Scenario(
        name="1 stream",
        load=lambda seed: Load(prompts(1, 32, seed), max_tokens=160, concurrency=1),
        figure="output tokens/s after the first",
        rate=lambda summary: summary.decode_tokens_per_s,
        expected_output_tokens=160,
    ),
    Scenario(
        name="16 streams",
        load=lambda seed: Load(prompts(16, 32, seed), max_tokens=128, concurrency=16),
        figure="output tokens/s",
        rate=lambda summary: summary.output_tokens_per_s,
        expected_output_tokens=16 * 128,
    ),
)
WARM_UP = Load(prompts(2, 200, seed=999), max_tokens=8, concurrency=2)
