"""The real engine on a small random checkpoint, behind a real uvicorn, with OpenAI's own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ling_serve.config import EngineOptions, ModelOptions, ServeConfig
from ling_serve.engine.build import build_engine
from ling_serve.engine.engine import Engine
from ling_serve.engine.stats import EngineStats
from ling_serve.engine.thread import EngineThread
from ling_serve.text.text_side import TextSide
from tests.checkpoints import cached_checkpoint
from tests.server.live_server import Server, data_lines, serving, wait_until
from tests.server.test_hang_up import send

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_LEN = 4096


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    checkpoint = str(cached_checkpoint({"max_position_embeddings": MAX_LEN}))
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64, block_size=16)

    def build() -> Engine:
        return build_engine(ServeConfig(ModelOptions(checkpoint), options))

    thread = EngineThread(build)
    thread.start()
    wait_until(lambda: thread.state != "loading", "the model is loaded", timeout_s=60)
    assert thread.state == "ready", thread.error
    yield thread
    assert thread.stop(10)


@pytest.fixture(scope="module")
def server(thread: EngineThread) -> Iterator[Server]:
    checkpoint = cached_checkpoint({"max_position_embeddings": MAX_LEN})
    text = TextSide.from_checkpoint(checkpoint, ModelOptions(str(checkpoint)))
    with serving(thread, text, model_names=("tiny",)) as server:
        yield server


def stats(thread: EngineThread) -> EngineStats:
    assert thread.stats is not None
    return thread.stats


def is_empty(thread: EngineThread) -> bool:
    now = stats(thread)
    return (now.running, now.waiting, now.free_blocks) == (0, 0, now.num_blocks)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]} | fields


def test_streamed_deltas_make_the_whole_answer(server: Server) -> None:
    for seed in range(4):
        body = chat("Tell me.", seed=seed, temperature=1.5, max_tokens=60, logprobs=True, top_logprobs=2)
        whole = server.post(CHAT, body).json
        *events, usage = server.events(CHAT, body | {"stream_options": {"include_usage": True}})
        choices = [event["choices"][0] for event in events]
        assert "".join(c["delta"].get("content", "") for c in choices) == whole["choices"][0]["message"]["content"]
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert usage["usage"] == whole["usage"]
        tokens = [entry["token"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert tokens == [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]


def test_log_probabilities_are_probabilities(server: Server) -> None:
    body = chat("x", temperature=0, max_tokens=4, logprobs=True, top_logprobs=20)
    for entry in server.post(CHAT, body).json["choices"][0]["logprobs"]["content"]:
        top = [other["logprob"] for other in entry["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert entry["logprob"] == pytest.approx(top[0])
        assert len(top) == 20


def test_one_client_in_two_threads(server: Server) -> None:
    """Concurrent requests over the official client, streaming and not: each answer belongs to its asker."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

    def ask(content: str, stream: bool) -> str:
        messages: Any = [{"role": "user", "content": content}]
        settings: Any = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24}
        if not stream:
            return client.chat.completions.create(**settings).choices[0].message.content or ""
        chunks = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
        seen = list(chunks)
        assert seen[-1].usage is not None
        assert seen[-1].usage.completion_tokens >= 1
        return "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices)

    contents = [f"question {i} " * (i + 1) for i in range(4)]
    alone = [ask(content, False) for content in contents]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(2) as pool:
        for stream in (False, True):
            assert list(pool.map(lambda content: ask(content, stream), contents)) == alone  # noqa: B023
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.completions.create(model="tiny", prompt=[1, 2], max_tokens=3).usage.total_tokens == 5  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], n=2)
    assert (refused.value.param, refused.value.code) == ("n", "unsupported_parameter")
    assert refused.value.request_id
    client.close()


def test_everything_at_once(server: Server, thread: EngineThread) -> None:
    """Streams and whole answers, chats and completions, long and short, with and without penalties and seeds."""
    bodies: list[tuple[str, dict[str, Any]]] = []
    for i in range(12):
        fields: dict[str, Any] = {"max_tokens": 5 + 3 * i, "seed": i, "temperature": i % 3 / 2}
        fields |= {"presence_penalty": 1.0, "repetition_penalty": 1.2} if i % 4 == 1 else {}
        fields |= {"stop": ["a", "e"]} if i % 5 == 2 else {}
        text = f"number {i} " * (1 + 7 * (i % 4))
        bodies.append((CHAT, chat(text, **fields)) if i % 2 else (TEXT, {"prompt": [text, text[:9]]} | fields))

    def answer(job: tuple[str, dict[str, Any]], stream: bool) -> list[str]:
        path, body = job
        if not stream:
            choices = server.post(path, body).json["choices"]
            return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        texts: dict[int, str] = {}
        for event in server.events(path, body):
            for choice in event["choices"]:
                piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return [texts[index] for index in sorted(texts)]

    alone = [answer(body, False) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(answer, body, bool(i % 3)) for i, body in enumerate(bodies)]
        together = [job.result() for job in jobs]
    assert together == alone
    wait_until(lambda: is_empty(thread), "nothing is left")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_hanging_up_frees_everything(server: Server, thread: EngineThread, phase: str, stream: bool) -> None:
    endless = chat("hi", ignore_eos=True, stream=True)
    busy = [send(server, CHAT, endless) for _ in range(4)] if phase == "queue" else []
    if busy:
        wait_until(lambda: stats(thread).running == 4, "the house is full")
    before = dict(stats(thread).aborts)
    content = "x" * 3500 if phase == "prefill" else "hi"
    connection = send(server, CHAT, chat(content, ignore_eos=True, stream=stream))
    generated = stats(thread).generated_tokens
    if phase == "queue":
        wait_until(lambda: stats(thread).waiting == 1, "it waits")
    elif phase == "prefill":
        wait_until(lambda: stats(thread).running == 1, "it is in prefill")
    else:
        wait_until(lambda: stats(thread).generated_tokens > generated + 5, "it decodes")
    connection.close()
    for other in busy:
        other.close()
    took = wait_until(lambda: is_empty(thread), "everything is free", timeout_s=5)
    print(f"free after {took * 1000:.0f} ms")
    aborted = {status.value: count - before.get(status, 0) for status, count in stats(thread).aborts.items()}
    print(aborted)
    assert sum(aborted.values()) == 1 + len(busy)
    assert server.service.live.choices == 0


def test_a_stop_string_frees_the_sequence(server: Server, thread: EngineThread) -> None:
    whole = server.post(CHAT, chat("hi", temperature=0, max_tokens=40)).json["choices"][0]["message"]["content"]
    stop = whole[10:12]
    aborts = sum(stats(thread).aborts.values())
    body = chat("hi", temperature=0, ignore_eos=True, stop=stop)
    choice = server.post(CHAT, body).json["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    wait_until(lambda: is_empty(thread), "the sequence is gone", timeout_s=2)
    assert sum(stats(thread).aborts.values()) == aborts + 1


def test_a_long_prompt_does_not_stop_the_others(server: Server) -> None:
    """A prompt of many steps (64 tokens each) is prefilled while another request streams on."""
    long_answer = threading.Event()
    body = chat("hi", ignore_eos=True, stream=True, stream_options={"continuous_usage_stats": True})
    with server.open("POST", CHAT, body) as response:
        lines = data_lines(response)
        next(lines)

        def ask() -> None:
            assert server.post(CHAT, chat("y" * 1900, max_tokens=1)).status == 200
            long_answer.set()

        asking = threading.Thread(target=ask)
        asking.start()
        started = json.loads(next(lines))["usage"]["completion_tokens"]
        while not long_answer.is_set():
            tokens = json.loads(next(lines))["usage"]["completion_tokens"]
        asking.join(10)
    print(f"{tokens - started} tokens streamed during the prefill of 1,900")
    assert tokens - started >= 1900 // 64 - 2


def test_requests_that_can_never_fit(server: Server) -> None:
    for body, said in (
        (chat("x" * MAX_LEN), f"the context holds {MAX_LEN}"),
        (chat("hi", max_tokens=MAX_LEN), f"the context holds {MAX_LEN}"),
    ):
        answer = server.post(CHAT, body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert said in answer.error["message"]
    assert json.loads(server.request("GET", "/v1/models").body)["data"][0]["max_model_len"] == MAX_LEN
