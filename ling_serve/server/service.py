"""What every endpoint works with: the engine, the text side, the names and the limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from ling_serve.engine.events import Event
from ling_serve.engine.request import Request
from ling_serve.errors import EngineDead, LingServeError, ModelNotFound, NotReady, QueueFull, RequestError
from ling_serve.protocol.base import RequestBody, shown
from ling_serve.server.bridge import Bridge
from ling_serve.text.text_side import TextSide

log = logging.getLogger(__name__)
_MOST_WARNED_NAMES = 1000


class EngineInfo(Protocol):
    """What a ready engine says of itself."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows; a tokenizer may know fewer."""
        ...


class EnginePort(Protocol):
    """The engine as seen from here; every method may be called from any thread."""

    @property
    def state(self) -> str:
        """`loading`, `ready`, `dead` or `stopped`."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why it is dead."""
        ...

    @property
    def engine_info(self) -> EngineInfo | None:
        """None until it is ready."""
        ...

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        """Events of the request go to `sink`, called on the engine's thread. Raises `NotReady` or `EngineDead`."""
        ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class Ready:
    """What a request needs once the model is loaded."""

    text: TextSide
    max_model_len: int
    vocab_size: int


class Stoppable(Protocol):
    def fail(self, error: LingServeError) -> None:
        """End with this error, soon."""
        ...


class LiveGenerations:
    """The generations that are under way; used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Most engine requests at a time, running and waiting together."""
        self.choices = 0
        self._generations: dict[Stoppable, int] = {}
        self._closed: LingServeError | None = None

    def admit(self, generation: Stoppable, choices: int) -> None:
        """Raises `RequestError` for more choices than could ever run, `QueueFull`, or the error given to `close`."""
        if self._closed is not None:
            raise self._closed
        if choices > self.limit:
            raise RequestError(f"the request has {choices} prompts; expected at most {self.limit}", param="prompt")
        if self.choices + choices > self.limit:
            raise QueueFull(f"{self.choices} requests are running or waiting, of at most {self.limit}; try again later")
        self._generations[generation] = choices
        self.choices += choices

    def release(self, generation: Stoppable) -> None:
        self.choices -= self._generations.pop(generation, 0)

    def fail_all(self, error: LingServeError) -> None:
        for generation in list(self._generations):
            generation.fail(error)

    def close(self, error: LingServeError) -> None:
        """Every later `admit` raises `error`; what is under way goes on."""
        self._closed = error

    @property
    def closed(self) -> bool:
        return self._closed is not None


@dataclass(frozen=True)
class Service:
    """One served model."""

    engine: EnginePort
    text: Future[TextSide]
    """Set while the engine loads, before the weights."""
    model_names: tuple[str, ...]
    """Names clients may use; the first is reported."""
    checkpoint: str
    live: LiveGenerations
    api_key: str | None = None
    heartbeat_s: float = 10.0
    """Silence after which a stream gets a comment line, so that proxies keep it open."""
    max_body_bytes: int = 32 * 1024 * 1024
    bridge: Bridge = field(default_factory=Bridge)
    created: int = field(default_factory=lambda: int(time.time()))
    warned: set[str] = field(default_factory=set[str])
    """Names of unknown fields that were warned about."""

    def ready(self) -> Ready:
        """Raises `NotReady` while loading and `EngineDead` afterwards."""
        engine = self.engine
        if engine.state == "loading":
            raise NotReady("the model is still loading; GET /health says when it is ready")
        info = engine.engine_info
        if engine.state != "ready" or info is None:
            raise EngineDead(f"the engine is {engine.state} and takes no requests; restart the server")
        return Ready(self.text.result(timeout=0), info.max_model_len, info.vocab_size)

    def check_model(self, name: str | None) -> None:
        """Raises `ModelNotFound` for a name that is not served; no name at all means the served model."""
        if name is not None and name not in self.model_names:
            served = ", ".join(repr(one) for one in self.model_names)
            raise ModelNotFound(f"model is {shown(name)}, which is not served here; expected {served}", param="model")

    def warn_of_unknown_fields(self, body: RequestBody) -> None:
        """One log line per name in the life of the server."""
        for name in body.unknown_fields():
            if name not in self.warned and len(self.warned) < _MOST_WARNED_NAMES:
                self.warned.add(name)
                log.warning("ignored the unknown request field %s (said once)", shown(name))


def model_names(model: str, served: Sequence[str]) -> tuple[str, ...]:
    """The names a model is served under: those given, or else the model as the user wrote it."""
    return tuple(dict.fromkeys(served)) or (model,)
