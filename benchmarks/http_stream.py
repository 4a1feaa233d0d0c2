"""A minimal HTTP/1.1 client for server-sent events: it shares the machine with what it measures, so it does little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class HttpError(Exception):
    """The server answered with an error, or broke the connection."""


@dataclass(frozen=True)
class Answer:
    """Status and headers of a response; the body is read from `reader`."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces of the body as they arrive, chunked or until the connection closes."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            return
        while piece := await self.reader.read(65536):
            yield piece


async def events(url: str, body: Mapping[str, Any]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """POST `body` and yield (time of arrival in seconds of `time.perf_counter`, JSON payload) of each `data:` event.

    Raises HttpError for a status other than 200, an error event, or a stream that ends without `[DONE]`.
    """
    async with asyncio.timeout(600), _answer(url, "POST", json.dumps(body).encode()) as answer:
        try:
            if answer.status != 200:
                text = b"".join([piece async for piece in answer.body()]).decode(errors="replace")
                raise HttpError(f"HTTP {answer.status}: {text[:300]}")
            async with aclosing(_payloads(answer)) as payloads:
                async for arrived, payload in payloads:
                    if payload == "[DONE]":
                        return
                    event = json.loads(payload)
                    if "error" in event:
                        raise HttpError(f"error event: {event['error']}")
                    yield arrived, event
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            raise HttpError(f"{type(error).__name__}: {error}") from error
        raise HttpError("the stream ended without [DONE]")


async def get_status(url: str) -> int:
    """The status of a GET, or 0 if nothing listens."""
    try:
        async with asyncio.timeout(5), _answer(url, "GET", b"") as answer:
            return answer.status
    except (OSError, TimeoutError, HttpError):
        return 0


async def _payloads(answer: Answer) -> AsyncIterator[tuple[float, str]]:
    unread = b""
    async with aclosing(answer.body()) as pieces:
        async for piece in pieces:
            arrived = time.perf_counter()
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield arrived, line[5:].decode().strip()


@asynccontextmanager
async def _answer(url: str, method: str, body: bytes) -> AsyncIterator[Answer]:
    """Send one request on a connection of its own and read the head of the response."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        head = (
            f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        yield await _read_head(reader)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    try:
        status = int((await reader.readline()).split()[1])
    except (IndexError, ValueError) as error:
        raise HttpError("the answer is not HTTP") from error
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return Answer(status, headers, reader)
