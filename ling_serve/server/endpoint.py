"""What every generating endpoint does: body in, generation started, one answer or a stream of events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Receive

from ling_serve.choice_text import Part
from ling_serve.protocol.base import WireModel
from ling_serve.protocol.sampling import SamplingBody
from ling_serve.server.bodies import read_body
from ling_serve.server.generation import Choice, Generation
from ling_serve.server.responses import json_response
from ling_serve.server.service import Ready, Service
from ling_serve.server.sse import DONE, HEARTBEAT, EventStream


class Job(Protocol):
    """One request, ready for the engine."""

    @property
    def body(self) -> SamplingBody: ...
    @property
    def choices(self) -> list[Choice]: ...


J = TypeVar("J", bound=Job)


async def answer(
    service: Service,
    request: Request,
    *,
    prepare: Callable[[Service, Ready, bytes], J],
    complete: Callable[[J, Generation, Receive], Awaitable[WireModel]],
    stream: Callable[[J, Generation, Receive, float], AsyncGenerator[str]],
) -> Response:
    """Read and prepare the body (in a thread: long prompts are slow), start its choices, and answer with `complete` or,
    if the body asks for it, with the events of `stream`."""
    ready = service.ready()
    body_bytes = await read_body(request, service.max_body_bytes)
    job = await asyncio.to_thread(prepare, service, ready, body_bytes)
    service.warn_of_unknown_fields(job.body)
    generation = Generation(service, job.choices)
    generation.start()
    if job.body.stream:
        return EventStream(generation, lambda receive: stream(job, generation, receive, service.heartbeat_s))
    return json_response(await complete(job, generation, request.receive))


async def stream_events(
    batches: AsyncGenerator[list[Part]],
    events_of: Callable[[Part], str],
    *,
    first: str = "",
    last: Callable[[], str] | None = None,
) -> AsyncGenerator[str]:
    """The events of a stream: `first` at once, those of each part as it comes, `last` (the usage), and the end mark."""
    if first:
        yield first
    async with aclosing(batches):
        async for parts in batches:
            # Text held back as the possible start of a stop string leaves nothing to send.
            if text := "".join(map(events_of, parts)) if parts else HEARTBEAT:
                yield text
    if last is not None:
        yield last()
    yield DONE
