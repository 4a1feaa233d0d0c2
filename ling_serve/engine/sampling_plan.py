"""The parameters of one step's rows as device arrays, grouped so that a row pays only for what it asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ling_serve.engine.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this choose the likeliest token: dividing by them would leave float32's range."""
TOP_WINDOW = 128
"""Largest top_k that is cut from the row's largest logits alone; beyond it the whole row is sorted."""
_KEEPS_ALL = math.inf
_SMALLEST_TOP_P = 1e-30


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits: whose it is, and all that its token depends on."""

    key: str
    """The sequence; unique within a step."""
    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    """Tokens generated so far. Its length is the position in the row's random stream."""
    blocked_ids: frozenset[int] = frozenset()
    """Ids that cannot be drawn now: end-of-sequence and stop ids before `min_tokens`."""


@dataclass(frozen=True)
class RowGroup:
    """Some rows of a batch, ascending. The whole batch costs no gather and no scatter."""

    rows: tuple[int, ...]
    index: mx.array | None
    """[len(rows)] int32; None = every row."""

    @classmethod
    def of(cls, rows: Sequence[int], batch_size: int) -> RowGroup:
        return cls(tuple(rows), None if len(rows) == batch_size else mx.array(list(rows), dtype=mx.int32))

    def take(self, batch: mx.array) -> mx.array:
        """[R, ...] → [len(rows), ...]"""
        return batch if self.index is None else batch[self.index]

    def put(self, batch: mx.array, part: mx.array) -> mx.array:
        """`batch` [R, ...] with this group's rows replaced by `part` [len(rows), ...], as a new array."""
        if self.index is None:
            return part
        merged = batch[:]
        merged[self.index] = part
        return merged


@dataclass(frozen=True)
class BiasEntries:
    """What is added to single logits: `logit_bias`, and -inf for blocked ids. All [E]."""

    rows: mx.array
    tokens: mx.array
    values: mx.array


@dataclass(frozen=True)
class PenaltyRows:
    """Rows with penalties. Parameters are [r, 1] float32."""

    group: RowGroup
    presence: mx.array
    frequency: mx.array
    repetition: mx.array | None
    """None when no row uses it."""


@dataclass(frozen=True)
class Cut:
    """Where top_k and top_p end a row. Parameters are [r, 1]."""

    top_k: mx.array
    """int32, at most the vocabulary."""
    top_p: mx.array
    """float32, inf when off."""
    candidates: int
    """How many of the largest logits hold every top_k; the vocabulary when the rows must be sorted whole."""


@dataclass(frozen=True)
class DrawRows:
    """Rows that are drawn at random in the same way. Parameters are [r, 1] float32."""

    group: RowGroup
    seeds: tuple[int, ...]
    temperature: mx.array
    log_min_p: mx.array | None
    """-inf for a row without; None when no row uses it."""
    cut: Cut | None


@dataclass(frozen=True)
class LogprobRows:
    group: RowGroup
    counts: tuple[int, ...]
    """Likeliest tokens each row wants besides the chosen one."""


@dataclass(frozen=True)
class SamplingPlan:
    """Everything of a step that depends on who is in it and not on what they have written so far."""

    bias: BiasEntries | None
    penalties: PenaltyRows | None
    draws: tuple[DrawRows, ...]
    """Disjoint; rows in none of them are greedy."""
    logprobs: LogprobRows | None
    rows: tuple[SamplingRow, ...] = field(repr=False)

    def fits(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether the same sequences stand in the same places under the same rules as when this was built."""
        return len(rows) == len(self.rows) and all(
            row.key == ours.key
            and row.params is ours.params
            and row.seed == ours.seed
            and row.blocked_ids == ours.blocked_ids
            for row, ours in zip(rows, self.rows, strict=True)
        )


def plan_sampling(rows: Sequence[SamplingRow], vocab_size: int) -> SamplingPlan:
    """Build the arrays of `rows`; ids outside the vocabulary can't be drawn, so biasing or blocking them is no work."""
    return SamplingPlan(
        bias=_bias_entries(rows, vocab_size),
        penalties=_penalty_rows(rows),
        draws=_draws(rows, vocab_size),
        logprobs=_logprob_rows(rows),
        rows=tuple(rows),
    )


def _bias_entries(rows: Sequence[SamplingRow], vocab_size: int) -> BiasEntries | None:
    entries = [
        (number, token, value)
        for number, row in enumerate(rows)
        for token, value in _biases(row).items()
        if 0 <= token < vocab_size
    ]
    if not entries:
        return None
    numbers, tokens, values = zip(*entries, strict=True)
    return BiasEntries(
        mx.array(numbers, dtype=mx.int32), mx.array(tokens, dtype=mx.int32), mx.array(values, dtype=mx.float32)
    )


def _biases(row: SamplingRow) -> Mapping[int, float]:
    if not row.blocked_ids:
        return row.params.logit_bias
    return {**row.params.logit_bias, **dict.fromkeys(sorted(row.blocked_ids), -math.inf)}


def _penalty_rows(rows: Sequence[SamplingRow]) -> PenaltyRows | None:
    numbers = [number for number, row in enumerate(rows) if _is_penalised(row.params)]
    if not numbers:
        return None
    params = [rows[number].params for number in numbers]
    repeats = any(p.repetition_penalty != 1.0 for p in params)
    return PenaltyRows(
        group=RowGroup.of(numbers, len(rows)),
        presence=_column([p.presence_penalty for p in params]),
        frequency=_column([p.frequency_penalty for p in params]),
        repetition=_column([p.repetition_penalty for p in params]) if repeats else None,
    )


def _is_penalised(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def _draws(rows: Sequence[SamplingRow], vocab_size: int) -> tuple[DrawRows, ...]:
    """At most three groups: rows without a cut, rows cut within the largest logits, rows that must be sorted whole."""
    members: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.params.temperature >= GREEDY_BELOW:
            members.setdefault(_candidates(row.params, vocab_size), []).append(number)
    return tuple(_draw_rows(rows, members[candidates], candidates, vocab_size) for candidates in sorted(members))


def _candidates(params: SamplingParams, vocab_size: int) -> int:
    """How many of the largest logits decide where a row is cut; 0 when it is not."""
    if 0 < params.top_k < vocab_size:
        return min(TOP_WINDOW, vocab_size) if params.top_k <= TOP_WINDOW else vocab_size
    return vocab_size if params.top_p < 1.0 else 0


def _draw_rows(rows: Sequence[SamplingRow], numbers: list[int], candidates: int, vocab_size: int) -> DrawRows:
    params = [rows[number].params for number in numbers]
    cut = Cut(
        top_k=mx.array([[p.top_k if 0 < p.top_k < vocab_size else vocab_size] for p in params], dtype=mx.int32),
        top_p=_column([max(p.top_p, _SMALLEST_TOP_P) if p.top_p < 1.0 else _KEEPS_ALL for p in params]),
        candidates=candidates,
    )
    return DrawRows(
        group=RowGroup.of(numbers, len(rows)),
        seeds=tuple(rows[number].seed for number in numbers),
        temperature=_column([p.temperature for p in params]),
        log_min_p=_column([_log(p.min_p) for p in params]) if any(p.min_p > 0.0 for p in params) else None,
        cut=cut if candidates else None,
    )


def _logprob_rows(rows: Sequence[SamplingRow]) -> LogprobRows | None:
    wanted = {number: row.params.logprobs for number, row in enumerate(rows) if row.params.logprobs is not None}
    return LogprobRows(RowGroup.of(list(wanted), len(rows)), tuple(wanted.values())) if wanted else None


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32).reshape(-1, 1)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0.0 else -math.inf
