"""Every kind of broken request gets a clear OpenAI error, and the server goes on serving."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ling_serve.text.text_side import TextSide
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import Answer, Server, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
LIMIT = 8192


@pytest.fixture(scope="module")
def server(text: TextSide) -> Iterator[Server]:
    engine = FakeEngine()
    with serving(engine, text, max_body_bytes=LIMIT, limit=16) as server:
        yield server
    engine.stop()


def check(server: Server, answer: Answer, status: int, param: str | None, said: str) -> None:
    error = answer.error
    assert (answer.status, error["param"]) == (status, param), error
    assert said in error["message"], error
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    good = server.post(CHAT, HELLO)
    assert good.json["choices"][0]["message"]["content"] == "Hello, world"
    assert server.service.live.choices == 0


CHAT_FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": None}, "messages", "missing"),
    "empty messages": ({"messages": []}, "messages", "at least one message"),
    "messages as text": ({"messages": "hi"}, "messages", "expected a list"),
    "message as text": ({"messages": ["hi"]}, "messages[0]", "'hi'"),
    "no role": ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
    "unknown role": ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "expected one of"),
    "no content": ({"messages": [{"role": "user"}]}, "messages", "no content"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "messages", "no content"),
    "content as number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "is 1"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "'image_url'",
    ),
    "a part whose type is no text": (
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}]},
        "messages[0].content",
        "parts",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content",
        "parts",
    ),
    "a nameless call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
        "missing",
    ),
    "temperature too high": ({"temperature": 2.5}, "temperature", "2.5; expected a number from 0 to 2"),
    "temperature as text": ({"temperature": "hot"}, "temperature", "'hot'"),
    "temperature beyond a float": ({"temperature": 10**400}, "temperature", "expected a number from 0 to 2"),
    "repetition_penalty beyond a float": ({"repetition_penalty": 10**400}, "repetition_penalty", "above 0"),
    "penalty below a float": ({"presence_penalty": -(10**400)}, "presence_penalty", "from -2 to 2"),
    "top_p zero": ({"top_p": 0}, "top_p", "above 0"),
    "top_k below -1": ({"top_k": -2}, "top_k", "at least -1"),
    "min_p above 1": ({"min_p": 1.5}, "min_p", "from 0 to 1"),
    "presence_penalty": ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    "frequency_penalty": ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "at least 1"),
    "max_tokens fraction": ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    "max_tokens twice": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "send one"),
    "max_tokens too large": ({"max_tokens": 100_000}, "messages", "the context holds 512"),
    "max_tokens huge": ({"max_tokens": 10**30}, "messages", "the context holds 512"),
    "min_tokens over max_tokens": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens, 8"),
    "prompt too long": ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context holds 512"),
    "seed as text": ({"seed": "x"}, "seed", "'x'"),
    "seed too large": ({"seed": 2**70}, "seed", "expected a whole number"),
    "stop as number": ({"stop": 5}, "stop", "expected a string or a list"),
    "stop empty": ({"stop": ""}, "stop", "none of them empty"),
    "stop too many": ({"stop": ["a"] * 17}, "stop", "up to 16"),
    "stop too long": ({"stop": ["a" * 2048, "b" * 2049]}, "stop", "at most 4096 characters in all, and there are 4097"),
    "stop ids as text": ({"stop_token_ids": "1"}, "stop_token_ids", "list of token ids"),
    "stop id beyond the vocabulary": ({"stop_token_ids": [99_999]}, "stop_token_ids", "vocabulary"),
    "logit_bias key": ({"logit_bias": {"cat": 1}}, "logit_bias", "'cat' is not a token id"),
    "logit_bias id": ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    "logit_bias value": ({"logit_bias": {"1": 1000}}, "logit_bias", "from -100 to 100"),
    "logit_bias list": ({"logit_bias": [1]}, "logit_bias", "object"),
    "top_logprobs alone": ({"top_logprobs": 1}, "top_logprobs", "set logprobs"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    "logprobs as number": ({"logprobs": 3}, "logprobs", "true or false"),
    "stream as text": ({"stream": "true"}, "stream", "true or false"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    "template kwargs": ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "dictionary"),
    "reserved template kwarg": (
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs.tools",
        "not a variable",
    ),
    "continue twice": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "one of them",
    ),
    "n": ({"n": 2}, "n", "only 1"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "not supported"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    "unknown model": ({"model": "gpt-4"}, "model", "expected 'tiny', 'alias'"),
    "model as number": ({"model": 4}, "model", "is 4"),
}


@pytest.mark.parametrize("fields", CHAT_FIELDS.values(), ids=CHAT_FIELDS)
def test_a_broken_chat_field(server: Server, fields: tuple[dict[str, Any], str, str]) -> None:
    change, param, said = fields
    answer = server.post(CHAT, HELLO | change)
    check(server, answer, 404 if param == "model" and "not served" in answer.error["message"] else 400, param, said)


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_first_byte_is_no_stream(server: Server, stream: bool) -> None:
    answer = server.post(CHAT, HELLO | {"stream": stream, "temperature": 9})
    check(server, answer, 400, "temperature", "9")


COMPLETION_FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": None}, "prompt", "missing"),
    "empty prompt": ({"prompt": ""}, "prompt", "at least one"),
    "empty list": ({"prompt": []}, "prompt", "none of them empty"),
    "empty ids": ({"prompt": [[]]}, "prompt", "none of them empty"),
    "one empty prompt": ({"prompt": ["a", ""]}, "prompt", "at least one"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt", "list of strings"),
    "prompt object": ({"prompt": {"a": 1}}, "prompt", "list of strings"),
    "negative id": ({"prompt": [-1]}, "prompt", "token ids"),
    "id beyond the vocabulary": ({"prompt": [5, 99_999]}, "prompt", "99999"),
    "fractional id": ({"prompt": [1.5]}, "prompt", "token ids"),
    "too many prompts": ({"prompt": ["a"] * 17}, "prompt", "at most 16"),
    "prompt too long": ({"prompt": [1] * 512}, "prompt", "context holds 512"),
    "logprobs true": ({"logprobs": True}, "logprobs", "whole number from 0 to 20"),
    "echo": ({"echo": True}, "echo", "not supported"),
    "suffix": ({"suffix": "end"}, "suffix", "middle"),
    "best_of": ({"best_of": 3}, "best_of", "only 1"),
}


@pytest.mark.parametrize("fields", COMPLETION_FIELDS.values(), ids=COMPLETION_FIELDS)
def test_a_broken_completion_field(server: Server, fields: tuple[dict[str, Any], str, str]) -> None:
    change, param, said = fields
    check(server, server.post(TEXT, {"prompt": "hi"} | change), 400, param, said)


BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "empty"),
    "blanks": (b"  \n", "empty"),
    "no JSON": (b"hello", "not valid JSON"),
    "cut JSON": (json.dumps(HELLO).encode()[:-3], "not valid JSON"),
    "a list": (b"[]", "expected a JSON object"),
    "a string": (b'"hi"', "expected a JSON object"),
    "null": (b"null", "expected a JSON object"),
    "NaN": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', "not valid JSON"),
    "no UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not valid JSON"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
    "deep nesting": (b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_broken_body(server: Server, body: tuple[bytes, str]) -> None:
    raw, said = body
    check(server, server.request("POST", CHAT, raw=raw), 400, None, said)


def test_the_wrong_content_type(server: Server) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    check(server, server.request("POST", CHAT, HELLO, headers=headers), 415, None, "expected application/json")


def test_a_body_that_is_too_large(server: Server) -> None:
    raw = json.dumps({"prompt": "x" * 2 * LIMIT}).encode()
    answer = server.request("POST", TEXT, raw=raw)
    check(server, answer, 413, None, f"more than {LIMIT} bytes")
    assert answer.error["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/", "/v1/chat/completions/", "/v1/models2"])
def test_an_unknown_path(server: Server, path: str) -> None:
    check(server, server.post(path, HELLO), 404, None, f"no POST {path}")


def test_the_wrong_method(server: Server) -> None:
    answer = server.request("GET", CHAT)
    check(server, answer, 405, None, "expected POST")
    assert answer.headers["allow"] == "POST"


def test_an_unknown_model_card(server: Server) -> None:
    answer = server.request("GET", "/v1/models/org/gpt-4")
    check(server, answer, 404, "model", "expected 'tiny', 'alias'")
    assert answer.error["code"] == "model_not_found"


def test_bytes_that_are_no_http(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 what?\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert server.post(CHAT, HELLO).status == 200


def test_an_error_in_here_is_a_500_without_details(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr("ling_serve.server.chat.sampling_params", broken)
        answer = server.post(CHAT, HELLO)
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert "secret" not in answer.body.decode()
    assert "secret detail" in caplog.text
    assert server.post(CHAT, HELLO).status == 200
