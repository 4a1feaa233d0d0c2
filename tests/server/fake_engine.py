"""An engine without a model: scripted tokens at a set pace, and a record of what it was told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ling_serve.engine.events import AbortedEvent, ErrorEvent, Event, TokenEvent, TokenLogprobs
from ling_serve.engine.request import FinishReason, Request
from ling_serve.errors import EngineDead, LingServeError, NotReady


@dataclass(frozen=True)
class Info:
    max_model_len: int = 512
    vocab_size: int = 320


@dataclass
class Running:
    request: Request
    sink: Callable[[Event], None]
    produced: int = 0


@dataclass
class FakeEngine:
    """Answers every request with `script` (repeated), one token each `pace_s`, after `prefill_s`.

    It has `EngineThread`'s surface. Requests beyond `slots` wait.
    """

    script: Sequence[int] = tuple(b"Hello, world")
    pace_s: float = 0.0
    prefill_s: float = 0.0
    slots: int = 100
    state: str = "ready"
    error: BaseException | None = None
    engine_info: Info | None = field(default_factory=Info)
    eos_after_script: bool = True
    submitted: list[Request] = field(default_factory=list[Request])
    aborted: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Running] = {}
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        if self.state == "loading":
            raise NotReady("loading")
        if self.state != "ready":
            raise EngineDead("dead")
        with self._lock:
            self.submitted.append(request)
            self._live[request.id] = Running(request, sink)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            running = self._live.pop(request_id, None)
        if running is not None:
            running.sink(AbortedEvent(request_id))

    def die(self, error: LingServeError | None = None) -> None:
        """What a step that raises does to everybody."""
        self.state, self.error = "dead", error or EngineDead("the engine died: boom")
        with self._lock:
            live, self._live = list(self._live.values()), {}
        for running in live:
            running.sink(ErrorEvent(running.request.id, EngineDead("the engine died: boom")))

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(5)

    @property
    def live(self) -> list[str]:
        """Ids of the requests that it still works for."""
        with self._lock:
            return list(self._live)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                turn = list(self._live.values())[: self.slots]
            if not turn:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            if self.prefill_s and any(running.produced == 0 for running in turn):
                self._stopping.wait(self.prefill_s)
            for running in turn:
                self._advance(running)
            time.sleep(self.pace_s)

    def _advance(self, running: Running) -> None:
        request, at = running.request, running.produced
        sampling = request.sampling
        eos = min(request.eos_token_ids, default=None)
        ends = self.eos_after_script and at == len(self.script) and eos is not None and not sampling.ignore_eos
        token = eos if ends and eos is not None else self.script[at % len(self.script)]
        ends = ends or token in sampling.stop_token_ids
        running.produced += 1
        finish = FinishReason.STOP if ends else FinishReason.LENGTH if running.produced == sampling.max_tokens else None
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple((other, -0.5 - other / 100) for other in range(sampling.logprobs))
            logprobs = TokenLogprobs(-0.25 - at, top)
        with self._lock:
            if request.id not in self._live:
                return
            if finish is not None:
                del self._live[request.id]
        running.sink(TokenEvent(request.id, token, logprobs, finish, is_stop_token=ends))
