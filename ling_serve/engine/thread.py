"""One thread that builds the engine, runs it, and makes every MLX call of the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from ling_serve.cache.budget import Row
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import ErrorEvent, Event, TokenEvent
from ling_serve.engine.request import Request
from ling_serve.engine.stats import EngineStats
from ling_serve.errors import CheckpointError, ConfigError, EngineDead, LingServeError, NotReady, ShuttingDown

log = logging.getLogger(__name__)

EngineState = Literal["loading", "ready", "dead", "stopped"]
Sink = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread: it must be quick and not wait."""


@dataclass(frozen=True)
class EngineInfo:
    """What a ready engine says of itself."""

    max_model_len: int
    vocab_size: int
    rows: tuple[Row, ...]
    """(label, value) lines of the start-up table."""


@dataclass(frozen=True)
class _Submit:
    request: Request
    sink: Sink


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Stop:
    pass


_Command = _Submit | _Abort | _Stop


class EngineThread:
    """MLX arrays belong to the thread whose stream made them, so `build` runs on this thread too.

    `submit`, `abort` and `stop` may be called from any thread. Each accepted request gets exactly one terminal event.
    """

    def __init__(
        self, build: Callable[[], Engine], on_state_change: Callable[[EngineState], None] = lambda state: None
    ) -> None:
        self._build = build
        self.on_state_change = on_state_change
        """Called on the engine's thread with each new state."""
        self.error: BaseException | None = None
        """Why the engine is dead."""
        self.engine_info: EngineInfo | None = None
        """None until the engine is ready."""
        self.stats: EngineStats | None = None
        """As of the last step."""
        self._state: EngineState = "loading"
        self._gate = threading.Lock()  # a request is either in the inbox before the end, or refused
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._sinks: dict[str, Sink] = {}  # of the engine's thread alone
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. A refusal by the engine arrives at the sink. Raises NotReady, EngineDead or ShuttingDown."""
        with self._gate:
            match self._state:
                case "ready":
                    self._inbox.put(_Submit(request, sink))
                case "loading":
                    raise NotReady("the model is still loading; try again later")
                case "dead":
                    raise self._dead()
                case "stopped":
                    raise ShuttingDown("the server is shutting down")

    def abort(self, request_id: str) -> None:
        """End a request at the next step border; an id that is unknown or has ended is fine."""
        with self._gate:
            if self._state == "ready":
                self._inbox.put(_Abort(request_id))

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the step it is in; open requests get ShuttingDown. True if it has ended in time."""
        self._inbox.put(_Stop())
        if self._thread.ident is None:
            self._enter("stopped")
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._build()
            self.engine_info = EngineInfo(engine.max_model_len, engine.vocab_size, engine.info)
            self.stats = engine.stats()
            self._enter("ready")
            while self._obey(engine):
                for event in engine.step():
                    self._deliver(event, engine)
                self.stats = engine.stats()
        except BaseException as error:
            if not isinstance(error, ConfigError | CheckpointError):  # those explain themselves
                log.exception("the engine stopped")
            self.error = error
            self._enter("dead")
            self._fail_all(self._dead())
        else:
            self._enter("stopped")
            self._fail_all(ShuttingDown("the server is shutting down"))

    def _obey(self, engine: Engine) -> bool:
        """Carry out what the inbox holds, waiting for it while there is no other work. False at a stop."""
        while True:
            if not engine.has_work:
                self.stats = engine.stats()
            try:
                command = self._inbox.get(block=not engine.has_work)
            except Empty:
                return True
            match command:
                case _Submit(request, sink):
                    self._submit(request, sink, engine)
                case _Abort(request_id):
                    event = engine.abort(request_id)
                    if event is not None:
                        self._deliver(event, engine)
                case _Stop():
                    return False

    def _submit(self, request: Request, sink: Sink, engine: Engine) -> None:
        try:
            engine.add(request)
        except LingServeError as error:
            _call(sink, ErrorEvent(request.id, error))
        else:
            self._sinks[request.id] = sink

    def _deliver(self, event: Event, engine: Engine) -> None:
        """Hand an event over. A request whose sink fails is aborted: nobody reads it."""
        is_last = not isinstance(event, TokenEvent) or event.finish is not None
        sink = self._sinks.pop(event.request_id, None) if is_last else self._sinks.get(event.request_id)
        if sink is not None and not _call(sink, event) and not is_last:
            del self._sinks[event.request_id]
            engine.abort(event.request_id)

    def _fail_all(self, error: LingServeError) -> None:
        """No request comes in any more: end those that are open and those that wait in the inbox."""
        for request_id, sink in self._sinks.items():
            _call(sink, ErrorEvent(request_id, error))
        self._sinks.clear()
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Submit):
                _call(command.sink, ErrorEvent(command.request.id, error))

    def _enter(self, state: EngineState) -> None:
        with self._gate:
            self._state = state
        try:
            self.on_state_change(state)
        except Exception:
            log.exception("the callback for engine state %r failed", state)

    def _dead(self) -> EngineDead:
        cause = type(self.error).__name__
        return EngineDead(f"the engine stopped after an internal error ({cause}); restart the server")


def _call(sink: Sink, event: Event) -> bool:
    """Whether the sink took the event. One that cannot (its event loop is closed, say) must not stop the others."""
    try:
        sink(event)
    except Exception as error:
        log.warning("request %s: its reader is gone (%s: %s)", event.request_id, type(error).__name__, error)
        return False
    return True
