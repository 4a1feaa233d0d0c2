"""What the engine has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ling_serve.engine.request import FinishReason
from ling_serve.engine.sequence import Status


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counters only grow; gauges say how things stand."""

    steps: int
    mixed_steps: int
    """Steps that decoded some sequences and prefilled others."""
    computed_tokens: int
    """Tokens that went through the model, recomputed ones included."""
    prompt_tokens: int
    """Prompt tokens of requests that were admitted, each counted once."""
    generated_tokens: int
    preemptions: int
    resumes: int
    finished: Mapping[FinishReason, int]
    failed: int
    """Sequences that ended because their logits were not finite."""
    aborts: Mapping[Status, int]
    """By the state the sequence was in."""
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int


@dataclass
class Counters:
    """The counters behind `EngineStats`, counted by the scheduler."""

    steps: int = 0
    mixed_steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    resumes: int = 0
    failed: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    aborts: Counter[Status] = field(default_factory=Counter[Status])
