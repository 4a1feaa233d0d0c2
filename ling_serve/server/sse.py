"""Server-sent events: the answer to a request with `stream: true`."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ling_serve.errors import LingServeError
from ling_serve.server.generation import ClientDisconnected, Generation

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
HEARTBEAT = ": ping\n"
"""A comment with a single line break: a blank line would make some clients dispatch an empty event."""

_MARK = "\0"


def event(payload: str) -> str:
    """One event that carries a line of JSON."""
    return f"data: {payload}\n\n"


def templated(make: Callable[[str], str]) -> Callable[[str], str]:
    """`make` turns a text into an event; the result does the same, but calls it only once.

    Most events of a stream differ in nothing but their text, and building and writing a model for each token is most of
    what a token costs here.
    """
    head, _, tail = make(_MARK).partition(json.dumps(_MARK))

    def made(text: str) -> str:
        return f"{head}{json.dumps(text, ensure_ascii=False)}{tail}"

    return made


class EventStream(Response):
    """Sends the headers at once and the events as they come; an error after that is one last event.

    Raises `ClientDisconnected` when the client hangs up. The generation is closed in every case.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: Callable[[Receive], AsyncGenerator[str]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._events(receive)) as events:
                async for text in events:
                    await write(text)
            await write("", more=False)
        except ClientDisconnected:
            raise
        except LingServeError as error:
            await write(event(json.dumps(error.body())), more=False)
        except Exception:
            log.exception("a stream failed")
            await write(event(json.dumps(LingServeError("internal error; the server's log has it").body())), more=False)
        finally:
            self._generation.close()
