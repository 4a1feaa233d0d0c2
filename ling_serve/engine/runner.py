"""Runs a batch through the model and samples the rows that need a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ling_serve.cache import Caches, SequenceMemory
from ling_serve.engine.batch import Batch, Piece
from ling_serve.engine.batching import in_forward_order, pack
from ling_serve.engine.sampler import PendingSamples, Sampled, Sampler, SamplingRow, Unsampled
from ling_serve.engine.sequence import Sequence
from ling_serve.model.forward_batch import ForwardBatch


class Model(Protocol):
    """What the engine needs of a model."""

    def __call__(self, batch: ForwardBatch, caches: Caches) -> mx.array:
        """Hidden states [N, hidden] of the batch's tokens; the caches take in those tokens."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[L, hidden] → [L, vocab]"""
        ...


@dataclass(frozen=True)
class Launched:
    """A step whose results are still on the device."""

    sampling: tuple[str, ...]
    """Sequence ids of the sampled rows."""
    pending: PendingSamples | None
    """None when the step only prefilled."""


class Runner:
    """`launch` builds a step's graph and hands it to the device, `collect` waits for it."""

    def __init__(self, model: Model, caches: Caches, memory: SequenceMemory, sampler: Sampler) -> None:
        self._model = model
        self._caches = caches
        self._memory = memory
        self._sampler = sampler

    def launch(self, batch: Batch, sequences: Mapping[str, Sequence]) -> Launched:
        pieces = in_forward_order(batch)
        forward = pack(pieces, sequences, self._memory, self._caches)
        hidden = self._model(forward, self._caches)
        sampling = [piece for piece in pieces if piece.samples]
        pending = self._sample(hidden[forward.logit_rows], sampling, sequences) if sampling else None
        mx.async_eval(self._caches.arrays(), pending.arrays() if pending else [])
        return Launched(tuple(piece.seq_id for piece in sampling), pending)

    def collect(self, launched: Launched) -> dict[str, Sampled | Unsampled]:
        """Samples by sequence id. The caches are evaluated too, so nothing of the step is left behind."""
        mx.eval(self._caches.arrays())
        if launched.pending is None:
            return {}
        return dict(zip(launched.sampling, self._sampler.collect(launched.pending), strict=True))

    def forget(self, seq_id: str) -> None:
        """The sequence has ended."""
        self._sampler.forget(seq_id)

    def _sample(self, hidden: mx.array, pieces: list[Piece], sequences: Mapping[str, Sequence]) -> PendingSamples:
        rows = [_sampling_row(sequences[piece.seq_id]) for piece in pieces]
        return self._sampler.launch(self._model.logits(hidden), rows)


def _sampling_row(sequence: Sequence) -> SamplingRow:
    return SamplingRow(
        key=sequence.id,
        params=sequence.request.sampling,
        seed=sequence.seed,
        prompt=sequence.request.prompt,
        output=sequence.output,
        blocked_ids=sequence.blocked_ids,
    )
