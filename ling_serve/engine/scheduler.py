"""Which tokens of which sequences the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from ling_serve.cache import SequenceMemory
from ling_serve.config import EngineOptions
from ling_serve.engine.batch import Batch, Piece
from ling_serve.engine.events import ErrorEvent, TokenEvent
from ling_serve.engine.request import FinishReason, Request
from ling_serve.engine.sampler import Sampled, Unsampled
from ling_serve.engine.sequence import Sequence, Status
from ling_serve.engine.stats import Counters
from ling_serve.errors import InvariantViolated, NotFinite, QueueFull

AGEING = 0.25
"""Each step a prompt waits counts like this fraction of a step's tokens less to compute, so that every prompt's turn
comes: a long one is at most passed for about four times the steps it needs itself."""


@dataclass(frozen=True)
class _Launched:
    batch: Batch
    sequences: tuple[Sequence, ...]


class Scheduler:
    """Continuous batching: each step decodes every running sequence and spends the rest of its tokens on prompts.

    A sequence is admitted when a slot is free and all of its tokens have blocks, so prefill never runs out of them.
    Decoding may: then the newest sequence gives everything back, and later computes its tokens again. The oldest is
    never the newest, so something always advances. `schedule` launches a batch, `commit` collects it.
    """

    def __init__(self, options: EngineOptions, memory: SequenceMemory, max_model_len: int) -> None:
        if memory.num_blocks * memory.block_size < max_model_len:
            raise InvariantViolated(
                f"{memory.num_blocks} blocks of {memory.block_size} tokens cannot hold max_model_len {max_model_len}"
            )
        self.max_model_len = max_model_len
        self.counters = Counters()
        self._options = options
        self._memory = memory
        self._live: dict[str, Sequence] = {}
        self._queue: list[Sequence] = []
        self._running: list[Sequence] = []
        self._launched: deque[_Launched] = deque()
        self._arrivals = count()

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Every live sequence."""
        return self._live

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._launched)

    def add(self, request: Request, seed: int) -> None:
        """Queue a request that fits. Raises QueueFull."""
        if sum(queued.status is Status.QUEUED for queued in self._queue) >= self._options.max_queue_len:
            raise QueueFull(f"{self._options.max_queue_len} requests are waiting already; try again later")
        sequence = Sequence(request, seed=seed, arrival=next(self._arrivals), queued_at_step=self.counters.steps)
        self._live[sequence.id] = sequence
        self._queue.append(sequence)

    def abort(self, seq_id: str) -> bool:
        """End a sequence in whatever state it is. False if there is none of that id."""
        sequence = self._live.get(seq_id)
        if sequence is None:
            return False
        self.counters.aborts[sequence.status] += 1
        self._end(sequence)
        return True

    def schedule(self) -> Batch | None:
        """The next step's batch, launched as far as the caches are concerned; None when nothing is to be done."""
        pieces = [self._piece(sequence, 1) for sequence in self._decoding()]
        num_decoding = len(pieces)
        budget = self._options.max_num_batched_tokens - num_decoding
        prefilling = self._prefilling()
        while budget > 0 and (sequence := next(prefilling, None)) is not None:
            pieces.append(self._piece(sequence, min(budget, sequence.remaining)))
            budget -= pieces[-1].length
        if not pieces:
            return None
        self.counters.steps += 1
        self.counters.mixed_steps += 0 < num_decoding < len(pieces)
        batch = Batch(tuple(pieces))
        self._memory.ledger.launch(piece.seq_id for piece in pieces)
        self._launched.append(_Launched(batch, tuple(self._live[piece.seq_id] for piece in pieces)))
        return batch

    def commit(self, batch: Batch, samples: Mapping[str, Sampled | Unsampled]) -> list[TokenEvent | ErrorEvent]:
        """Take in the results of the oldest launched batch: one sample for each piece with `samples` set.

        A sequence without a token to take ends there, alone.
        """
        launched = self._launched.popleft()
        if {piece.seq_id for piece in batch.pieces} != {piece.seq_id for piece in launched.batch.pieces}:
            raise InvariantViolated("batches must be committed in the order in which they were scheduled")
        owners = {sequence.id: sequence for sequence in launched.sequences}
        events = list[TokenEvent | ErrorEvent]()
        for piece in batch.pieces:
            sequence = owners[piece.seq_id]
            if sequence.status is Status.ENDED:  # aborted since the launch
                continue
            if sequence.computed != piece.start:
                raise InvariantViolated(
                    f"a piece of {piece.seq_id!r} starts at {piece.start}, but {sequence.computed} tokens are computed"
                )
            sequence.advance(piece.length)
            self.counters.computed_tokens += piece.length
            if piece.samples:
                sample = samples[piece.seq_id]
                events.append(
                    self._take(sequence, sample) if isinstance(sample, Sampled) else self._fail(sequence, sample)
                )
        self._memory.ledger.collect()
        return events

    def audit(self) -> None:
        """With nothing live, everything must be free again. Raises InvariantViolated."""
        self._memory.audit()
        if self._queue or self._running or self._memory.num_free_blocks != self._memory.num_blocks:
            raise InvariantViolated(
                f"idle with {len(self._queue)} queued, {len(self._running)} running and "
                f"{self._memory.num_blocks - self._memory.num_free_blocks} blocks in use"
            )

    def _piece(self, sequence: Sequence, length: int) -> Piece:
        return Piece(sequence.id, sequence.computed, length, samples=length == sequence.remaining)

    def _decoding(self) -> list[Sequence]:
        """The decoding sequences, oldest first, each with room for its newest token; may preempt the newest."""
        ready = list[Sequence]()
        for sequence in sorted(self._running, key=_arrival):
            if sequence.status is not Status.DECODE:
                continue
            while not self._memory.fits(sequence.id, len(sequence.tokens)):
                newest = max(self._running, key=_arrival)
                self._preempt(newest)
                if newest is sequence:
                    break
            if sequence.status is Status.DECODE:
                self._memory.hold(sequence.id, len(sequence.tokens))
                ready.append(sequence)
        return ready

    def _prefilling(self) -> Iterator[Sequence]:
        """Those with a prompt to compute, the most urgent first; waiting ones are admitted as they are asked for.

        Once one finds no room, no other waiting one overtakes it: what is given back next is its.
        """
        candidates = [sequence for sequence in self._running if sequence.status is Status.PREFILL]
        admitting = self._memory.num_free_slots > 0
        if admitting:
            candidates += self._queue
        for sequence in sorted(candidates, key=self._urgency):
            if sequence.status is Status.PREFILL:
                yield sequence
            elif admitting:
                admitting = self._admit(sequence)
                if admitting:
                    yield sequence

    def _urgency(self, sequence: Sequence) -> tuple[bool, float, int]:
        """Sorts preempted ones first, by age; then by what is left to compute, less what waiting has earned."""
        preempted = sequence.status is Status.PREEMPTED
        ageing = AGEING * self._options.max_num_batched_tokens * sequence.queued_at_step
        return (not preempted, 0.0 if preempted else sequence.remaining + ageing, sequence.arrival)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and its blocks, or return False."""
        num_tokens = len(sequence.tokens)
        # A block to spare for each running sequence: who is admitted into the last ones is preempted at once.
        spare = len(self._running) * self._memory.block_size
        if not self._memory.fits(sequence.id, num_tokens + spare):
            return False
        self._memory.hold(sequence.id, num_tokens)
        if sequence.status is Status.PREEMPTED:
            self.counters.resumes += 1
        else:
            self.counters.prompt_tokens += num_tokens
        sequence.status = Status.PREFILL
        self._queue.remove(sequence)
        self._running.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._release(sequence)
        sequence.preempt()
        self._queue.append(sequence)

    def _take(self, sequence: Sequence, sample: Sampled) -> TokenEvent:
        """Append a sampled token; the sequence may end with it."""
        self.counters.generated_tokens += 1
        finish = sequence.append(sample.token, self.max_model_len)
        if finish is not None:
            self.counters.finished[finish] += 1
            self._end(sequence)
        return TokenEvent(sequence.id, sample.token, sample.logprobs, finish, finish is FinishReason.STOP)

    def _fail(self, sequence: Sequence, row: Unsampled) -> ErrorEvent:
        self.counters.failed += 1
        self._end(sequence)
        return ErrorEvent(
            sequence.id,
            NotFinite(
                f"the model's output is not finite (largest logit {row.peak}) after {len(sequence.tokens)} tokens; "
                "expected finite numbers: if this happens often, restart the server with another --dtype"
            ),
        )

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        in_flight = any(sequence in launched.sequences for launched in self._launched)
        self._memory.release(sequence.id, clear=sequence.is_unproven or in_flight)

    def _end(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._release(sequence)
        else:
            self._queue.remove(sequence)
        del self._live[sequence.id]
        sequence.status = Status.ENDED


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
