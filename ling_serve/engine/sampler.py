"""Chooses the next token of every row of a step, on the device, by each row's own rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from ling_serve.engine.events import TokenLogprobs
from ling_serve.engine.request import MAX_LOGPROBS
from ling_serve.engine.sampling_arrays import add_bias, draw, penalise, token_logprobs
from ling_serve.engine.sampling_plan import PenaltyRows, SamplingPlan, SamplingRow, plan_sampling
from ling_serve.engine.token_counts import TokenCounts
from ling_serve.errors import InvariantViolated

__all__ = ["PendingSamples", "Sampled", "Sampler", "SamplingRow", "Unsampled"]


@dataclass(frozen=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Unsampled:
    """A row whose logits are not finite: any token of it would be garbage."""

    peak: float
    """Its largest logit: infinite, or not a number if any of the row is."""


@dataclass(frozen=True)
class PendingLogprobs:
    """Of the rows that want them. `chosen` [r]; `top_ids` and `top` [r, k], unordered."""

    chosen: mx.array
    top_ids: mx.array
    top: mx.array


@dataclass(frozen=True)
class PendingSamples:
    """A launched step's tokens, still on the device."""

    plan: SamplingPlan
    tokens: mx.array
    """[L] int32"""
    peaks: mx.array
    """[L] largest raw logit of each row; not a number if any of the row is."""
    logprobs: PendingLogprobs | None
    counts: mx.array | None

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        arrays = [self.tokens, self.peaks]
        if self.logprobs is not None:
            arrays += [self.logprobs.chosen, self.logprobs.top_ids, self.logprobs.top]
        if self.counts is not None:
            arrays.append(self.counts)
        return arrays


class Sampler:
    """A row's token depends on its logits, its parameters, its tokens so far and its seed; never on other rows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts = TokenCounts(vocab_size)
        self._plan = plan_sampling((), vocab_size)

    def launch(self, logits: mx.array, rows: Sequence[SamplingRow]) -> PendingSamples:
        """Choose a token for each of the rows of logits [L, V]. Nothing is evaluated here.

        A row's `output` must be as long as if every token launched before had been collected.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise InvariantViolated(
                f"logits of shape {logits.shape} for {len(rows)} rows of a vocabulary of {self._vocab_size}"
            )
        if not self._plan.fits(rows):
            self._plan = plan_sampling(rows, self._vocab_size)
        plan = self._plan
        if not rows:
            return PendingSamples(plan, mx.zeros((0,), dtype=mx.int32), mx.zeros((0,)), None, None)
        scores = logits.astype(mx.float32)
        if plan.bias is not None:
            scores = add_bias(scores, plan.bias)
        if plan.penalties is not None:
            scores = self._penalise(scores, plan.penalties, rows)
        tokens = _choose(scores, plan, rows)
        return PendingSamples(
            plan=plan,
            tokens=tokens,
            peaks=mx.max(logits, axis=-1),
            logprobs=self._logprobs(logits, tokens, plan),
            counts=self._counts.add(plan.penalties.group.take(tokens)) if plan.penalties is not None else None,
        )

    def collect(self, pending: PendingSamples) -> list[Sampled | Unsampled]:
        """Wait for a launched step and bring its tokens to the host, in the order of its rows."""
        mx.eval(*pending.arrays())
        logprobs = _collect_logprobs(pending)
        tokens, peaks = cast(list[int], pending.tokens.tolist()), cast(list[float], pending.peaks.tolist())
        return [
            Sampled(token, logprobs.get(number)) if math.isfinite(peak) else Unsampled(peak)
            for number, (token, peak) in enumerate(zip(tokens, peaks, strict=True))
        ]

    def forget(self, key: str) -> None:
        """Drop what is kept about a sequence; one that is unknown is fine."""
        self._counts.forget(key)

    def _penalise(self, scores: mx.array, penalties: PenaltyRows, rows: Sequence[SamplingRow]) -> mx.array:
        group = penalties.group
        counted = self._counts.of([rows[number] for number in group.rows])
        return group.put(scores, penalise(group.take(scores), penalties, counted.counts, counted.in_prompt))

    def _logprobs(self, logits: mx.array, tokens: mx.array, plan: SamplingPlan) -> PendingLogprobs | None:
        if plan.logprobs is None:
            return None
        group = plan.logprobs.group
        # Always the same number of candidates: who else is in the batch must not decide between ties.
        top = min(MAX_LOGPROBS, self._vocab_size)
        return PendingLogprobs(*token_logprobs(group.take(logits), group.take(tokens), top))


def _choose(scores: mx.array, plan: SamplingPlan, rows: Sequence[SamplingRow]) -> mx.array:
    """[L] int32: the likeliest token of greedy rows (of equals the lowest id), a drawn one of the others."""
    one_way = len(plan.draws) == 1 and plan.draws[0].group.index is None
    tokens = mx.zeros((len(rows),), dtype=mx.uint32) if one_way else mx.argmax(scores, axis=-1)
    for draws in plan.draws:
        group = draws.group
        positions = [len(rows[number].output) for number in group.rows]
        tokens = group.put(tokens, draw(group.take(scores), draws, positions))
    return tokens.astype(mx.int32)


def _collect_logprobs(pending: PendingSamples) -> dict[int, TokenLogprobs]:
    """Row number → log-probabilities, the likeliest first and of equals the lowest id."""
    wanted, values = pending.plan.logprobs, pending.logprobs
    if wanted is None or values is None:
        return {}
    chosen = cast(list[float], values.chosen.tolist())
    top_ids = cast(list[list[int]], values.top_ids.tolist())
    top = cast(list[list[float]], values.top.tolist())
    found: dict[int, TokenLogprobs] = {}
    for place, (number, count) in enumerate(zip(wanted.group.rows, wanted.counts, strict=True)):
        ranked = sorted(zip(top_ids[place], top[place], strict=True), key=lambda pair: (-pair[1], pair[0]))
        found[number] = TokenLogprobs(chosen[place], tuple(ranked[:count]))
    return found
