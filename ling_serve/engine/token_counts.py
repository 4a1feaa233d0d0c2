"""What each penalised sequence has said, counted on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ling_serve.engine.sampling_plan import SamplingRow


@dataclass(frozen=True)
class CountedRows:
    """The sequences of the last step that counted, in its order."""

    keys: tuple[str, ...]
    counts: mx.array
    """[r, V] float32 occurrences in the output."""
    in_prompt: mx.array
    """[r, V] bool"""


class TokenCounts:
    """Occurrences per sequence, kept in the arrays of the last step: the same rows again cost nothing.

    A sequence that sits out a step, or whose output length is not the one counted (it was preempted, or a step of it
    was dropped), is counted again from its tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lengths: dict[str, int] = {}
        self._last: CountedRows | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Sequences whose counts are held."""
        return frozenset(self._lengths)

    def of(self, rows: Sequence[SamplingRow]) -> CountedRows:
        """Counts of `rows` before they get their next token."""
        keys = tuple(row.key for row in rows)
        last = self._last
        known = [self._lengths.get(row.key) == len(row.output) for row in rows]
        if last is None or last.keys != keys or not all(known):
            places = {key: place for place, key in enumerate(last.keys)} if last else {}
            pairs = [
                (last.counts[places[row.key]], last.in_prompt[places[row.key]])
                if last and is_known
                else self._count(row)
                for row, is_known in zip(rows, known, strict=True)
            ]
            last = CountedRows(keys, mx.stack([c for c, _ in pairs]), mx.stack([p for _, p in pairs]))
        self._last = last
        self._lengths = {row.key: len(row.output) for row in rows}
        return last

    def add(self, tokens: mx.array) -> mx.array:
        """Count the next tokens [r] of the rows last asked for. Returns the new counts [r, V], to be evaluated."""
        if self._last is None:
            return tokens
        counts = self._last.counts.at[mx.arange(len(self._last.keys)), tokens].add(1.0)
        self._last = CountedRows(self._last.keys, counts, self._last.in_prompt)
        self._lengths = {key: length + 1 for key, length in self._lengths.items()}
        return counts

    def forget(self, key: str) -> None:
        """Drop a sequence; unknown ones are fine."""
        if self._lengths.pop(key, None) is not None and not self._lengths:
            self._last = None

    def _count(self, row: SamplingRow) -> tuple[mx.array, mx.array]:
        counts = mx.zeros((self._vocab_size,), dtype=mx.float32)
        in_prompt = mx.zeros((self._vocab_size,), dtype=mx.bool_)
        if row.output:
            counts = counts.at[mx.array(list(row.output), dtype=mx.int32)].add(1.0)
        if row.prompt:
            in_prompt[mx.array(list(row.prompt), dtype=mx.int32)] = True
        return counts, in_prompt
