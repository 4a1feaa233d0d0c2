"""The engine: one model, its caches, and the sequences that share them."""

from __future__ import annotations

import logging
import random

from ling_serve.cache import Caches, SequenceMemory
from ling_serve.cache.budget import Row
from ling_serve.config import EngineOptions
from ling_serve.engine.admission import check_request
from ling_serve.engine.events import AbortedEvent, ErrorEvent, Event
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.engine.runner import Model, Runner
from ling_serve.engine.sampler import Sampler
from ling_serve.engine.scheduler import Scheduler
from ling_serve.engine.stats import Counters, EngineStats
from ling_serve.errors import CheckpointError, InvariantViolated, RequestError

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64


class Engine:
    """Add requests, call `step` while `has_work`, and hand out the events. Everything happens in the calling thread."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        options: EngineOptions,
        *,
        vocab_size: int,
        max_model_len: int,
        info: tuple[Row, ...] = (),
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.info = info
        """(label, value) lines for the start-up table."""
        self._memory = SequenceMemory(
            caches.latents.num_blocks,
            caches.latents.block_size,
            min(caches.states.num_slots, options.max_num_seqs),
            on_slot_freed=caches.states.reset,
            clear_blocks=caches.latents.clear,
        )
        self._scheduler = Scheduler(options, self._memory, max_model_len)
        self._runner = Runner(model, caches, self._memory, Sampler(vocab_size))
        self._seeds = random.Random(options.seed)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, ContextLengthExceeded or QueueFull, and then nothing has happened."""
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if request.id in self._scheduler.sequences:
            raise RequestError(f"a request with id {request.id!r} is running already", param="id")
        seed = request.sampling.seed
        self._scheduler.add(request, self._seeds.getrandbits(63) if seed is None else seed)

    def abort(self, request_id: str) -> AbortedEvent | None:
        """End a request in whatever state it is; None if there is none of that id (any more)."""
        if not self._scheduler.abort(request_id):
            return None
        self._runner.forget(request_id)
        self._audit_if_idle()
        return AbortedEvent(request_id)

    def step(self) -> list[Event]:
        """Advance every sequence that can be, and report the tokens that came of it."""
        batch = self._scheduler.schedule()
        if batch is None:
            self._require_idle()
            return []
        launched = self._runner.launch(batch, self._scheduler.sequences)
        samples = self._runner.collect(launched)
        events = self._scheduler.commit(batch, samples)
        for event in events:
            if isinstance(event, ErrorEvent):
                log.warning("request %s failed: %s", event.request_id, event.error)
            if isinstance(event, ErrorEvent) or event.finish is not None:
                self._runner.forget(event.request_id)
        self._audit_if_idle()
        return list[Event](events)

    def warm_up(self) -> None:
        """Run a short prompt and a decode step, so that whatever can fail fails before anyone is told to come.

        Raises CheckpointError for a model that computes no finite numbers.
        """
        num_tokens = min(WARM_UP_TOKENS, self.max_model_len - 2)
        prompt = tuple(number % self.vocab_size for number in range(max(1, num_tokens)))
        self.add(Request("warm-up", prompt, SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0)))
        while self.has_work:
            for event in self.step():
                if isinstance(event, ErrorEvent):
                    raise CheckpointError(f"the model fails on its first prompt: {event.error}") from event.error
        self._scheduler.counters = Counters()

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        return EngineStats(
            steps=counters.steps,
            mixed_steps=counters.mixed_steps,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            resumes=counters.resumes,
            finished=dict(counters.finished),
            failed=counters.failed,
            aborts=dict(counters.aborts),
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            free_blocks=self._memory.num_free_blocks,
            num_blocks=self._memory.num_blocks,
        )

    def _require_idle(self) -> None:
        """Steps wait for no other, so whatever is live can advance: otherwise its blocks or its slot have leaked."""
        if self.has_work:
            memory = self._memory
            raise InvariantViolated(
                f"{self._scheduler.num_waiting} requests wait and none can start with {memory.num_free_blocks} of "
                f"{memory.num_blocks} blocks and {memory.num_free_slots} slots free"
            )

    def _audit_if_idle(self) -> None:
        if not self.has_work:
            self._scheduler.audit()
