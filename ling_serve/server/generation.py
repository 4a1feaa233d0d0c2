"""One HTTP request's life in the engine: submit, read, and give back whatever happens.

Everything that can happen to it arrives in one inbox: the engine's events, the client's hang-up, the heartbeat's ticks,
and an end ordered by the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from ling_serve.choice_text import ChoiceText, Part, merged
from ling_serve.engine.events import AbortedEvent, ErrorEvent, Event, TokenEvent
from ling_serve.engine.request import Request
from ling_serve.errors import LingServeError
from ling_serve.protocol.usage import Usage
from ling_serve.server.service import Service


class ClientDisconnected(Exception):
    """The client hung up; there is nobody left to answer."""


@dataclass(frozen=True)
class HungUp:
    pass


@dataclass(frozen=True)
class Tick:
    """The heartbeat interval is over."""


@dataclass(frozen=True)
class Choice:
    """One engine request and the text that becomes of it."""

    request: Request
    text: ChoiceText


Arrival = Event | HungUp | Tick | LingServeError


@dataclass(frozen=True)
class News:
    """What one look into the inbox brought."""

    parts: list[Part]
    ticked: bool
    failure: Exception | None


class Generation:
    """Several engine requests that answer one HTTP request. Lives on the event loop."""

    def __init__(self, service: Service, choices: Sequence[Choice]) -> None:
        self._engine = service.engine
        self._live = service.live
        self._bridge = service.bridge
        self._choices = {choice.request.id: choice for choice in choices}
        self._open: set[str] = set()
        self._inbox: asyncio.Queue[Arrival] = asyncio.Queue()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(len(choice.request.prompt) for choice in self._choices.values())
        completion = sum(choice.text.completion_tokens for choice in self._choices.values())
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    def start(self) -> None:
        """Hand everything to the engine. Raises `QueueFull`, `NotReady`, `EngineDead` or `ShuttingDown`.

        After it, `parts` has to be read or `close` called.
        """
        self._live.admit(self, len(self._choices))
        deliver = self._bridge.into(self._inbox)
        try:
            for request_id, choice in self._choices.items():
                self._engine.submit(choice.request, deliver)
                self._open.add(request_id)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Tell the engine to drop what has not finished, and give the admission back. May be called again."""
        for request_id in self._open:
            self._engine.abort(request_id)
        self._open.clear()
        self._live.release(self)

    def fail(self, error: LingServeError) -> None:
        """End with `error` as soon as the reader gets to it."""
        self._inbox.put_nowait(error)

    async def parts(self, receive: Receive, heartbeat_s: float | None = None) -> AsyncGenerator[list[Part]]:
        """What the choices gain, until all have finished; an empty list is a tick of the heartbeat.

        Closes the generation however it ends: by itself, by an error, by the reader going away, or by the client
        hanging up, which is seen through `receive`.

        Raises `ClientDisconnected`, or the `LingServeError` that ended a choice.
        """
        watchers = [asyncio.create_task(self._watch(receive))]
        if heartbeat_s is not None:
            watchers.append(asyncio.create_task(self._tick(heartbeat_s)))
        try:
            while self._open:
                news = self._read(await self._arrivals())
                if news.parts or news.ticked:
                    yield merged(news.parts)
                if news.failure is not None:
                    raise news.failure
        finally:
            for watcher in watchers:
                watcher.cancel()
            self.close()

    def _read(self, arrivals: Sequence[Arrival]) -> News:
        parts: list[Part] = []
        ticked = False
        for item in arrivals:
            match item:
                case Tick():
                    ticked = True
                case HungUp():
                    return News([], ticked, ClientDisconnected(self._progress()))
                case LingServeError():
                    return News(parts, ticked, item)
                case _ if item.request_id not in self._open:
                    continue
                case TokenEvent():
                    parts.append(self._push(item))
                case ErrorEvent():
                    self._open.discard(item.request_id)
                    return News(parts, ticked, item.error)
                case AbortedEvent():
                    self._open.discard(item.request_id)
                    return News(parts, ticked, LingServeError("the engine dropped the request"))
        return News(parts, ticked, None)

    def _push(self, event: TokenEvent) -> Part:
        text = self._choices[event.request_id].text
        part = text.push(event)
        if part.finish is not None:
            self._open.discard(event.request_id)
            if event.finish is None:  # a stop string: the engine does not know that the text has ended
                self._engine.abort(event.request_id)
        return part

    def _progress(self) -> str:
        tokens = self.usage.completion_tokens
        return f"after {tokens} tokens" if tokens else "before the first token"

    async def _arrivals(self) -> list[Arrival]:
        """Everything that has arrived, at least one item."""
        arrivals = [await self._inbox.get()]
        while not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
        return arrivals

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.put_nowait(HungUp())

    async def _tick(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._inbox.put_nowait(Tick())
