"""`ling-serve` as a process: what it says, what it answers meanwhile, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import cached_checkpoint

LONG = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}
DIES_LATER = """\
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from ling_serve.cli import main
import ling_serve.commands.serve
from ling_serve.engine.engine import Engine
step = Engine.step
def dying(self, steps=[0]):
    steps[0] += 1
    if steps[0] > 20:
        raise RuntimeError("planted")
    return step(self)
Engine.step = dying
sys.exit(main())
"""


@dataclass
class Process:
    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def get(self, path: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Generator[HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """The first line of output that holds `text`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if text in line:
                    return line
            assert self.popen.poll() is None, self.said
            time.sleep(0.02)
        raise AssertionError(f"{text!r} was never said:\n{self.said}")


@contextmanager
def running(
    arguments: Sequence[str], *, code: str | None = None, env: dict[str, str] | None = None
) -> Generator[Process]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "ling_serve.cli"]
    popen = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (env or {}),
    )
    process = Process(popen)
    assert popen.stdout is not None
    reader = threading.Thread(target=lambda: process.lines.extend(line.rstrip() for line in popen.stdout or ()))
    reader.start()
    try:
        yield process
    finally:
        popen.kill()
        popen.wait(10)
        reader.join(10)
        popen.stdout.close()


@contextmanager
def serving(checkpoint: Path, *flags: str, code: str | None = None) -> Generator[Process]:
    with running([str(checkpoint), "--port", "0", "--max-num-seqs", "2", *flags], code=code) as process:
        line = process.wait_for("listening at http://127.0.0.1:")
        process.port = int(line.partition("127.0.0.1:")[2].partition(",")[0])
        yield process


def until_ready(process: Process) -> None:
    """`/health` says 503 until the model is ready, then 200."""
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while 200 not in seen:
        assert time.monotonic() < deadline, process.said
        seen.add(process.get("/health")[0])
        time.sleep(0.02)
    assert seen <= {200, 503}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return cached_checkpoint({"max_position_embeddings": 100_000})


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_it_serves_until_a_signal_ends_it_with_streams_open(checkpoint: Path, name: str) -> None:
    flags = ["--served-model-name", "ling", "small", "--trust-remote-code", "--max-model-len", "90000"]
    kwargs = ["--default-chat-template-kwargs", '{"enable_thinking": false}', "--host", "0.0.0.0"]
    with serving(checkpoint, *flags, *kwargs) as process:
        until_ready(process)
        assert [card["id"] for card in process.get("/v1/models")[1]["data"]] == ["ling", "small"]
        assert process.get("/v1/models/small")[1]["max_model_len"] == 90_000
        with process.stream(LONG | {"stream": False, "max_tokens": 3}) as response:
            assert json.loads(response.read())["usage"]["completion_tokens"] == 3
        with process.stream(LONG) as response:
            for _ in range(20):
                response.readline()
            started = time.monotonic()
            process.popen.send_signal(getattr(signal, name))
            *_, last = [line for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
            code = process.popen.wait(10)
        took = time.monotonic() - started
    print(f"{name}: ended after {took:.1f} s")
    assert json.loads(last[6:])["error"]["code"] == "shutting_down"
    assert code == 0
    assert took < 6
    for expected in (
        "ANYONE WHO CAN REACH 0.0.0.0",
        "code from a checkpoint is never run",
        "loading weights: 100 %",
        "ling, small",
        "1 MLA / 3 KDA",
        "90,000",
        "2 + 2 slots",
        "ready: http://127.0.0.1:",
        "POST '/v1/chat/completions' 200",
        f"{name}: shutting down",
        "ended",
    ):
        assert expected in process.said, expected
    assert "Traceback" not in process.said
    assert "hi" not in process.said.split(), "bodies are never logged"


def test_a_dying_engine_ends_the_process(checkpoint: Path) -> None:
    with serving(checkpoint, code=DIES_LATER) as process:
        until_ready(process)
        process.popen.send_signal(signal.SIGHUP)  # ignored, as under nohup
        with process.stream(LONG) as response:
            *_, last = [line for line in response.read().split(b"\n\n") if line.startswith(b"data: ")]
        assert json.loads(last[6:])["error"]["code"] == "engine_dead"
        status, health = process.get("/health")
        assert (status, health["status"]) == (503, "dead")
        assert process.popen.wait(8) == 1
    assert "planted" in process.said
