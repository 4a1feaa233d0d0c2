"""Loading, dying and stopping: `/health` tells, and nobody waits for an answer that will not come."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from ling_serve.errors import InvariantViolated, RequestError, ShuttingDown
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import Answer, Server, data_lines, wait_until

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_loading(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(state="loading", engine_info=None)
    server = serve(engine)
    health = server.request("GET", "/health")
    assert (health.status, health.json["status"]) == (503, "loading")
    answer = server.post(CHAT, HELLO)
    assert (answer.status, answer.error["code"]) == (503, "not_ready")
    assert server.request("GET", "/v1/models").json["data"][0]["max_model_len"] is None
    engine.engine_info = FakeEngine().engine_info
    engine.state = "ready"
    assert server.request("GET", "/health").json == {"status": "ok", "detail": None}
    assert server.request("HEAD", "/health").status == 200
    assert server.post(CHAT, HELLO).status == 200


def test_a_dying_engine_ends_every_open_answer(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(pace_s=0.01, eos_after_script=False)
    server = serve(engine)
    whole: list[Answer] = []
    waiting = threading.Thread(target=lambda: whole.append(server.post(CHAT, HELLO)))
    waiting.start()
    with server.open("POST", CHAT, HELLO | {"stream": True}) as response:
        lines = data_lines(response)
        for _ in range(4):
            next(lines)
        wait_until(lambda: len(engine.live) == 2, "both are under way")
        engine.die(InvariantViolated("blocks leaked"))
        *_, last = lines
    assert json.loads(last)["error"]["code"] == "engine_dead"
    waiting.join(5)
    assert (whole[0].status, whole[0].error["code"]) == (503, "engine_dead")
    health = server.request("GET", "/health")
    assert (health.status, health.json["status"]) == (503, "dead")
    assert "InvariantViolated" in health.json["detail"]
    for stream in (True, False):
        answer = server.post(CHAT, HELLO | {"stream": stream})
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert server.service.live.choices == 0


def test_one_refusal_by_the_engine_is_its_own(serve: Callable[..., Server]) -> None:
    class Picky(FakeEngine):
        def _advance(self, running: Any) -> None:
            if running.request.sampling.seed == 13:
                from ling_serve.engine.events import ErrorEvent

                with self._lock:  # an abort may have been first
                    is_live = self._live.pop(running.request.id, None) is not None
                if is_live:
                    running.sink(ErrorEvent(running.request.id, RequestError("seed is 13", param="seed")))
            else:
                super()._advance(running)

    server = serve(Picky())
    answer = server.post(CHAT, HELLO | {"seed": 13})
    assert (answer.status, answer.error["param"]) == (400, "seed")
    with server.open("POST", CHAT, HELLO | {"seed": 13, "stream": True}) as response:
        assert response.status == 200
        *_, last = data_lines(response)
    assert json.loads(last)["error"]["message"] == "seed is 13"
    prompts = {"prompt": ["a", "b"], "seed": 13}
    assert server.post("/v1/completions", prompts).status == 400
    assert server.post(CHAT, HELLO).status == 200
    assert server.service.live.choices == 0


def test_shutting_down(serve: Callable[..., Server]) -> None:
    engine = FakeEngine(pace_s=0.01, eos_after_script=False)
    server = serve(engine)
    live = server.service.live
    with server.open("POST", CHAT, HELLO | {"stream": True}) as response:
        lines = data_lines(response)
        next(lines)
        live.close(ShuttingDown("the server is shutting down"))
        refused = server.post(CHAT, HELLO)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert server.request("GET", "/health").json["status"] == "stopping"
        next(lines)
        live.fail_all(ShuttingDown("the server is shutting down"))
        *_, last = lines
    assert json.loads(last)["error"]["code"] == "shutting_down"
    wait_until(lambda: not engine.live, "the engine is told")
