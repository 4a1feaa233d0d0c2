"""What is answered, streamed or whole: text, usage, log-probabilities, stops, ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ling_serve.text.text_side import TextSide
from tests.byte_tokenizer import ROLE_END
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import Server, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
MIXED = "Grüße 🎉👩🏽‍🚀 日本語 e\u0301 — end".encode()


@pytest.fixture(scope="module")
def server(text: TextSide) -> Iterator[Server]:
    engine = FakeEngine()
    with serving(engine, text) as server:
        yield server
    engine.stop()


def streamed_chat(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


def test_the_whole_answer_of_a_chat(server: Server) -> None:
    answer = server.post(CHAT, HELLO | {"model": "alias"}).json
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert prompt_tokens > 20
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 13, "total_tokens": prompt_tokens + 13},
        "system_fingerprint": None,
    }


def test_the_chunks_of_a_chat(server: Server) -> None:
    events = server.events(CHAT, HELLO)
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    first, last = events[0]["choices"][0], events[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert streamed_chat(events) == "Hello, world"


def test_usage_is_streamed_only_where_it_was_asked_for(server: Server) -> None:
    whole = server.post(CHAT, HELLO).json["usage"]
    *chunks, last = server.events(CHAT, HELLO | {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], whole)
    assert all(chunk["usage"] is None for chunk in chunks)
    continuous = server.events(CHAT, HELLO | {"stream_options": {"continuous_usage_stats": True}})
    assert continuous[-1]["choices"]
    assert continuous[-1]["usage"] == whole
    for options in ({}, {"include_usage": False}, None):
        assert all("usage" not in chunk for chunk in server.events(CHAT, HELLO | {"stream_options": options}))


def test_the_length_ends_an_answer(server: Server) -> None:
    choice = server.post(CHAT, HELLO | {"max_tokens": 5}).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")
    answer = server.post(CHAT, HELLO | {"ignore_eos": True}).json
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_keep_the_order_of_their_prompts(server: Server) -> None:
    answer = server.post(TEXT, {"prompt": ["a", "bb", "ccc"], "max_tokens": 5}).json
    assert answer["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(i, "Hello") for i in range(3)]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 15, "total_tokens": 21}
    texts = {0: "", 1: "", 2: ""}
    finished: list[int] = []
    for event in server.events(TEXT, {"prompt": [[1], [2, 3], [4]], "max_tokens": 5}):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            finished += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize(
    ("stop", "included", "expected"),
    [
        ("lo, w", False, "Hel"),
        ("lo, w", True, "Hello, w"),
        (["zzz", "o"], False, "Hell"),
        ("world!", False, "Hello, worldH"),
        ("H", False, ""),
        (["rld", "ld"], False, "Hello, wo"),
    ],
)
def test_a_stop_string_ends_the_text_and_the_work(serve: Any, stop: Any, included: bool, expected: str) -> None:
    engine = FakeEngine(pace_s=0.002, eos_after_script=False)
    server: Server = serve(engine)
    body = HELLO | {"stop": stop, "include_stop_str_in_output": included, "max_tokens": 13}
    choice = server.post(CHAT, body).json["choices"][0]
    assert choice["message"]["content"] == expected
    assert choice["finish_reason"] == ("length" if stop == "world!" else "stop")
    assert streamed_chat(server.events(CHAT, body)) == expected
    assert not engine.live
    assert len(engine.aborted) == (0 if stop == "world!" else 2)


def test_stop_strings_wait_for_min_tokens(serve: Any) -> None:
    server: Server = serve(FakeEngine())
    answer = server.post(CHAT, HELLO | {"stop": "o", "min_tokens": 6}).json["choices"][0]
    assert answer["message"]["content"] == "Hello, w"


def test_a_stop_token_carries_no_text_unless_asked(server: Server) -> None:
    body = HELLO | {"stop_token_ids": [ord(",")]}
    assert server.post(CHAT, body).json["choices"][0]["message"]["content"] == "Hello"
    body |= {"include_stop_str_in_output": True}
    assert server.post(CHAT, body).json["choices"][0]["message"]["content"] == "Hello,"


def test_an_end_mark_spelled_as_text_ends_the_answer(serve: Any) -> None:
    server: Server = serve(FakeEngine(script=tuple(b"Hi<|role_end|> and more")))
    choice = server.post(CHAT, HELLO).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi", "stop")
    going_on = server.post(CHAT, HELLO | {"ignore_eos": True, "max_tokens": 18}).json["choices"][0]
    assert going_on["message"]["content"] == "Hi<|role_end|> and"


def test_special_tokens_are_skipped_unless_asked(serve: Any) -> None:
    server: Server = serve(FakeEngine(script=(*b"a", 258, *b"b")))
    assert server.post(CHAT, HELLO).json["choices"][0]["message"]["content"] == "ab"
    shown = server.post(CHAT, HELLO | {"skip_special_tokens": False})
    assert shown.json["choices"][0]["message"]["content"] == "a<role>b"


def test_a_stream_never_breaks_a_character(serve: Any) -> None:
    engine = FakeEngine(script=tuple(MIXED), pace_s=0.001)
    server: Server = serve(engine)
    events = server.events(CHAT, HELLO)
    assert all("\ufffd" not in event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed_chat(events) == MIXED.decode()
    assert server.post(CHAT, HELLO).json["choices"][0]["message"]["content"] == MIXED.decode()


def test_bytes_that_are_no_character_are_replaced(serve: Any) -> None:
    server: Server = serve(FakeEngine(script=(*b"a", 0xFF, *b"b", 0xF0, 0x9F)))
    assert server.post(CHAT, HELLO).json["choices"][0]["message"]["content"] == "a\ufffdb\ufffd"
    assert streamed_chat(server.events(CHAT, HELLO)) == "a\ufffdb\ufffd"


def test_log_probabilities_of_a_chat(server: Server) -> None:
    body = HELLO | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    content = server.post(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e", "l"]
    assert content[1]["logprob"] == -1.25
    assert content[1]["bytes"] == [ord("e")]
    assert content[0]["top_logprobs"] == [
        {"token": "\x00", "bytes": [0], "logprob": -0.5},
        {"token": "\x01", "bytes": [1], "logprob": -0.51},
    ]
    streamed = [event["choices"][0]["logprobs"] for event in server.events(CHAT, body)]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content


def test_log_probabilities_of_a_completion(serve: Any) -> None:
    server: Server = serve(FakeEngine(script=tuple("aé".encode())))
    body = {"prompt": "x", "logprobs": 1}
    logprobs = server.post(TEXT, body).json["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.25, -1.25, -2.25],
        "top_logprobs": [
            {"\x00": -0.5, "a": -0.25},
            {"\x00": -0.5, "bytes:\\xc3": -1.25},
            {"\x00": -0.5, "bytes:\\xa9": -2.25},
        ],
        "text_offset": [0, 1, 1],
    }
    parts = [event["choices"][0]["logprobs"] for event in server.events(TEXT, body)]
    for key, value in logprobs.items():
        assert [entry for part in parts if part for entry in part[key]] == value
    assert server.post(TEXT, {"prompt": "x"}).json["choices"][0]["logprobs"] is None


def test_log_probabilities_end_where_the_text_is_cut(server: Server) -> None:
    body = HELLO | {"logprobs": True, "stop": "lo, w"}
    content = server.post(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hel"
    streamed = [event["choices"][0]["logprobs"] for event in server.events(CHAT, body)]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content


def test_sampling_fields_reach_the_engine(serve: Any) -> None:
    engine = FakeEngine()
    server: Server = serve(engine)
    server.post(CHAT, HELLO)
    defaults = engine.submitted[-1].sampling
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed) == (1.0, 0.95, 20, None)
    assert defaults.max_tokens == 512 - len(engine.submitted[-1].prompt)
    assert engine.submitted[-1].eos_token_ids == {ROLE_END}
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "seed": 7,
        "ignore_eos": True,
        "stop_token_ids": [5],
    }
    server.post(CHAT, HELLO | fields | {"logit_bias": {"5": -1}, "max_completion_tokens": 9, "logprobs": True})
    sampling = engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields | {"top_k": 0, "stop_token_ids": {5}}
    assert (dict(sampling.logit_bias), sampling.max_tokens, sampling.logprobs) == ({5: -1.0}, 9, 0)


def test_the_template_sees_what_the_request_says(serve: Any, text: TextSide) -> None:
    engine = FakeEngine()
    server: Server = serve(engine)

    def prompt(**fields: Any) -> str:
        assert server.post(CHAT, HELLO | fields).status == 200
        return text.tokenizer.decode(engine.submitted[-1].prompt)

    assert prompt().endswith("<role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>\n<think>")
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("<think></think>")
    assert prompt(add_generation_prompt=False).endswith("hi<|role_end|>")
    history = [*HELLO["messages"], {"role": "assistant", "content": "I was"}]
    assert prompt(messages=history, continue_final_message=True).endswith("</think>I was")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}]
    told = prompt(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            *HELLO["messages"],
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
    )
    assert "be brief" in told
    assert "<think>hm</think><tool_call>f" in told
    assert "<tool_response>\n42" in told


def test_harmless_fields_are_ignored_and_unknown_ones_named_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = HELLO | {"user": "me", "metadata": {"a": 1}, "tools": [], "tool_choice": "auto", "frobnicate": "secret"}
    for _ in range(3):
        assert server.post(CHAT, body | {"n": 1, "response_format": {"type": "text"}}).status == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["ignored the unknown request field 'frobnicate' (said once)"]
    assert "secret" not in caplog.text


def test_models(server: Server) -> None:
    cards = server.request("GET", "/v1/models").json
    assert cards["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in cards["data"]] == [
        ("tiny", "model", 512),
        ("alias", "model", 512),
    ]
    assert server.request("GET", "/v1/models/alias").json["id"] == "alias"


def test_the_description_of_the_api(server: Server) -> None:
    described = server.request("GET", "/openapi.json").json
    assert set(described["paths"]) == {
        "/health",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/chat/completions",
        "/v1/completions",
    }


def test_names_with_slashes_are_found(serve: Any) -> None:
    server: Server = serve(FakeEngine(), model_names=("org/model",))
    assert server.request("GET", "/v1/models/org/model").json["id"] == "org/model"
    assert server.post(CHAT, HELLO | {"model": "org/model"}).status == 200


def test_request_ids(server: Server) -> None:
    def request_id(**headers: str) -> str:
        return server.request("POST", CHAT, HELLO, headers=headers).headers["x-request-id"]

    assert request_id(**{"x-request-id": "my-id.7"}) == "my-id.7"
    for strange in ("", "a" * 200, "a b", "semi;colon"):
        made = request_id(**{"x-request-id": strange})
        assert made.startswith("req-")
        assert len(made) == 36
    with server.open("POST", CHAT, HELLO | {"stream": True}, headers={"x-request-id": "streamed"}) as response:
        assert response.getheader("x-request-id") == "streamed"


def test_the_api_key(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(), api_key="s3cret-ü")

    def status(path: str = "/v1/models", **headers: str) -> int:
        answer = server.request("GET", path, headers=headers)
        if answer.status == 401:
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
            assert "s3cret" not in answer.body.decode()
        return answer.status

    key = "s3cret-ü".encode().decode("latin-1")
    assert status(authorization=f"Bearer {key}") == 200
    assert status(authorization=f"bearer {key}") == 200
    for wrong in ("Bearer wrong", "Bearer", "Bearer ", key, f"Basic {key}", f"Bearer {key}x", ""):
        assert status(authorization=wrong) == 401, wrong
    assert status() == 401
    assert status("/nowhere") == 401
    assert status("/openapi.json") == 401
    assert status("/health") == 200
    assert server.post(CHAT, HELLO).status == 401
