"""A client that hangs up leaves nothing behind, and says so in one line; silence is filled with comments."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import Server, data_lines, wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody waits for."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_hanging_up(serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, phase: str, stream: bool) -> None:
    caplog.set_level("INFO", "ling_serve")
    engine = FakeEngine(
        slots=0 if phase == "queue" else 10,
        prefill_s=30.0 if phase == "prefill" else 0.0,
        pace_s=0.01,
        eos_after_script=False,
    )
    engine_is_at_it = {
        "queue": lambda: engine.live,
        "prefill": lambda: engine.live,
        "decode": lambda: any(running.produced > 3 for running in engine._live.values()),
    }[phase]
    server = serve(engine)
    connection = send(server, CHAT, HELLO | {"stream": stream})
    wait_until(engine_is_at_it, "the request is under way")
    connection.close()
    took = wait_until(lambda: not engine.live, "the engine is told", timeout_s=2)
    print(f"freed {took * 1000:.0f} ms after the hang-up")
    wait_until(lambda: server.service.live.choices == 0, "the admission is given back", timeout_s=2)
    assert len(engine.aborted) == 1
    wait_until(lambda: "client disconnected" in caplog.text, "the log says so", timeout_s=2)
    lines = [record for record in caplog.records if record.name.startswith("ling_serve")]
    assert len(lines) == 1, caplog.text
    assert ("after" if phase == "decode" else "before the first token") in lines[0].getMessage()
    assert "Traceback" not in caplog.text
    engine.prefill_s, engine.slots, engine.eos_after_script = 0.0, 10, True
    if phase != "prefill":
        assert server.post(CHAT, HELLO).status == 200


def test_hanging_up_drops_every_prompt_of_a_request(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(slots=1, pace_s=0.01, eos_after_script=False)
    server = serve(engine)
    connection = send(server, TEXT, {"prompt": ["a", "b", "c"], "stream": True})
    wait_until(lambda: len(engine.live) == 3, "all are under way")
    connection.close()
    wait_until(lambda: not engine.live, "all are dropped", timeout_s=2)
    assert len(engine.aborted) == 3
    assert server.service.live.choices == 0


def test_hanging_up_while_sending(serve: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ling_serve")
    engine = FakeEngine()
    server = serve(engine)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        time.sleep(0.2)
    wait_until(lambda: "while sending the request" in caplog.text, "the log says so", timeout_s=2)
    assert "Traceback" not in caplog.text
    assert not engine.submitted
    assert server.post(CHAT, HELLO).status == 200


def test_many_hang_ups_leave_nothing(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(slots=4, pace_s=0.005, eos_after_script=False)
    server = serve(engine)
    connections = [send(server, CHAT, HELLO | {"stream": bool(i % 2)}) for i in range(40)]
    wait_until(lambda: len(engine.submitted) == 40, "all are under way")
    for connection in connections:
        connection.close()
    wait_until(lambda: not engine.live and server.service.live.choices == 0, "all are dropped", timeout_s=5)
    assert len(engine.aborted) == 40


def test_headers_and_role_go_out_at_once_and_silence_is_filled(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(prefill_s=0.6), heartbeat_s=0.1)
    started = time.monotonic()
    with server.open("POST", CHAT, HELLO | {"stream": True}) as response:
        assert response.status == 200
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert json.loads(next(data_lines(response)))["choices"][0]["delta"]["role"] == "assistant"
        assert time.monotonic() - started < 0.5
        rest = response.read()
    beats = rest.count(b": ping\n")
    assert 3 <= beats <= 8, rest
    assert b": ping\n\n" not in rest
    assert b"id:" not in rest.replace(b'"id":', b"")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_full_house_is_a_429(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(slots=0)
    server = serve(engine, limit=2)
    connections = [send(server, CHAT, HELLO) for _ in range(2)]
    wait_until(lambda: len(engine.live) == 2, "the house is full")
    for stream in (True, False):
        answer = server.post(CHAT, HELLO | {"stream": stream})
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.error["type"] == "rate_limit_error"
    assert len(engine.submitted) == 2
    for connection in connections:
        connection.close()
    wait_until(lambda: server.service.live.choices == 0, "the house is empty")
    engine.slots = 10
    assert server.post(CHAT, HELLO).status == 200
