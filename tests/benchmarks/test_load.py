"""The load generator against a scripted server: what it counts, and that it sees every way a stream can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import pytest

from benchmarks.load import Exchange, Load, Summary, percentile, run_load, summarise

Script = Callable[[int, dict], list[bytes]]


def event(**payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
CLOSE_DELIMITED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve_while(handler: Callable, load: Load) -> Summary:
    """Run the load against `handler(reader, writer)`, and wait for every handler to end."""
    handlers: list[asyncio.Task] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with suppress(OSError):
            await handler(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        summary = await run_load(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", load)
        await asyncio.gather(*handlers)
        return summary


def drive(script: Script, load: Load) -> tuple[Summary, list[dict]]:
    """Run the load against a server that answers request number n with the writes of script(n, body)."""
    bodies: list[dict] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)) | {"path": head.split()[1].decode()})
        for data in script(len(bodies) - 1, bodies[-1]):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.005)

    return asyncio.run(serve_while(answer, load)), bodies


@pytest.mark.parametrize("framing", ["close", "chunked", "split"])
def test_tokens_and_times_are_counted_however_the_body_is_framed(framing: str):
    writes = [b": ping\n\n", piece("a"), piece(""), piece("b"), piece("c"), USAGE, DONE]
    if framing == "chunked":
        writes = [CHUNKED, *map(chunk, writes), b"0\r\n\r\n"]
    elif framing == "split":  # an event cut in two by the framing
        whole = b"".join(writes)
        writes = [CHUNKED, chunk(whole[:25]), chunk(whole[25:90]), chunk(whole[90:]), b"0\r\n\r\n"]
    else:
        writes = [CLOSE_DELIMITED, *writes]
    summary, bodies = drive(lambda n, body: writes, Load(["x", "y"], max_tokens=3, concurrency=1, extra={"seed": 4}))
    assert (summary.requests, summary.errors) == (2, 0)
    assert (summary.prompt_tokens, summary.output_tokens) == (14, 6)
    assert [body["prompt"] for body in bodies] == ["x", "y"]
    assert bodies[0]["path"] == "/v1/completions"
    assert bodies[0]["seed"] == 4
    assert summary.ttft_p50_ms > 0
    if framing != "split":
        assert summary.itl_p50_ms >= 4


def test_chat_counts_content_and_reasoning_but_not_the_role():
    deltas = [{"role": "assistant"}, {"reasoning": "r"}, {"content": "c"}]
    writes = [CLOSE_DELIMITED, *(event(choices=[{"delta": delta}]) for delta in deltas), USAGE, DONE]
    summary, bodies = drive(lambda n, body: writes, Load(["hi"], max_tokens=3, concurrency=1, chat=True))
    assert bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert bodies[0]["path"] == "/v1/chat/completions"
    assert summary.errors == 0
    assert summary.itl_p50_ms < 20


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\nqueue full"], "HTTP 429: queue full"),
        ([CLOSE_DELIMITED, piece("a"), event(error={"message": "engine died"})], "engine died"),
        ([CLOSE_DELIMITED, piece("a")], "without [DONE]"),
        ([CHUNKED, b"ff\r\ndata"], "IncompleteReadError"),
        ([CLOSE_DELIMITED, USAGE, DONE], "no text came"),
        ([b"garbage\r\n\r\n"], "not HTTP"),
    ],
)
def test_every_way_to_go_wrong_is_an_error_and_the_others_go_on(writes: list[bytes], message: str):
    good = [CLOSE_DELIMITED, piece("a"), USAGE, DONE]
    summary, _ = drive(lambda n, body: good if n else writes, Load(["x", "y", "z"], max_tokens=3, concurrency=1))
    assert (summary.requests, summary.errors, summary.output_tokens) == (3, 1, 6)
    assert summary.first_error is not None
    assert message in summary.first_error


def test_closed_loop_keeps_its_concurrency_and_open_loop_does_not_wait():
    def most_at_once(load: Load) -> int:
        running, most = 0, 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal running, most
            await reader.readuntil(b"\r\n\r\n")
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.05)
            running -= 1
            writer.write(CLOSE_DELIMITED + piece("a") + USAGE + DONE)

        assert asyncio.run(serve_while(answer, load)).errors == 0
        return most

    assert most_at_once(Load(["x"] * 9, max_tokens=1, concurrency=3)) == 3
    assert most_at_once(Load(["x"] * 9, max_tokens=1, rate=1000.0)) > 3


def test_a_summary_is_about_the_requests_that_went_well():
    good = Exchange(sent=0.0, arrivals=[1.0, 1.5, 2.5], done=2.5, prompt_tokens=10, output_tokens=3)
    bad = Exchange(sent=0.0, arrivals=[0.1], done=9.0, error="boom")
    summary = summarise([good, bad], wall_s=5.0)
    assert (summary.errors, summary.first_error) == (1, "boom")
    assert summary.ttft_p50_ms == 1000
    assert (summary.itl_p50_ms, summary.itl_p99_ms) == (500, 1000)
    assert summary.decode_tokens_per_s == pytest.approx(2 / 1.5)
    assert summary.output_tokens_per_s == pytest.approx(3 / 5)
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
