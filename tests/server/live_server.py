"""A real uvicorn on a free port, in a thread: in-process transports buffer streams and hide hang-ups."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import uvicorn

from ling_serve.server.app import create_app
from ling_serve.server.service import EnginePort, LiveGenerations, Service
from ling_serve.text.text_side import TextSide


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after checking that the body is OpenAI's shape and nothing else."""
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "param", "code"}, self.body
        return self.json["error"]


@dataclass
class Server:
    service: Service
    port: int
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answer:
        with self.open(method, path, body, headers=headers, raw=raw) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def post(self, path: str, body: object) -> Answer:
        return self.request("POST", path, body)

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Generator[HTTPResponse]:
        """The response as soon as its headers are there; leaving the block hangs up."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end with [DONE]."""
        with self.open("POST", path, body | {"stream": True}) as response:
            assert response.status == 200, response.read()
            lines = list(data_lines(response))
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def data_lines(response: HTTPResponse) -> Iterator[str]:
    """The `data:` fields of a stream as they come."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")


@contextmanager
def serving(engine: EnginePort, text: TextSide, **options: Any) -> Generator[Server]:
    """Serve `engine`; `options` are fields of `Service`, and `limit` that of its generations."""
    done: Future[TextSide] = Future()
    done.set_result(text)
    service = Service(
        engine=engine,
        text=done,
        model_names=options.pop("model_names", ("tiny", "alias")),
        checkpoint="/checkpoints/tiny",
        live=LiveGenerations(options.pop("limit", 64)),
        **options,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(service), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server starts")
    try:
        yield Server(service, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_until(holds: Any, what: str, timeout_s: float = 10.0) -> float:
    """Seconds until `holds()`; fails after `timeout_s`."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.005)
    return time.monotonic() - started
