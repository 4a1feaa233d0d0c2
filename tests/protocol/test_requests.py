"""Requests are read leniently where the meaning is certain, and refused by name where it is not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ling_serve.errors import RequestError, UnsupportedParameter
from ling_serve.protocol import ChatCompletionRequest, CompletionRequest, parse_body
from ling_serve.protocol.chat import ChatChunkChoice, ChatCompletionChunk, Delta
from ling_serve.protocol.fields import IGNORED, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, {"messages": HELLO} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, {"prompt": "hi"} | fields)


def test_null_equals_absent_for_every_optional_field() -> None:
    for body_type, required in ((ChatCompletionRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "hi"})):
        names = set(body_type.model_fields) | set(body_type.refused) | IGNORED
        nulls = dict.fromkeys(names - set(required))
        assert parse_body(body_type, required | nulls) == parse_body(body_type, required)


def test_integers_are_fine_where_floats_are_expected_and_whole_floats_where_integers_are() -> None:
    body = chat(temperature=1, top_p=1, min_p=0, presence_penalty=-2, repetition_penalty=1, max_tokens=16.0, top_k=5.0)
    assert (body.temperature, body.max_tokens, body.top_k) == (1.0, 16, 5)
    assert isinstance(body.temperature, float)
    assert isinstance(body.max_tokens, int)


def test_messages_become_plain_text() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "hi", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, "never"]},
            {"role": "tool", "content": [], "tool_call_id": "1"},
        ]
    )
    assert [(m.role, m.content) for m in body.messages] == [
        ("system", "be\nbrief"),
        ("user", "hi"),
        ("assistant", None),
        ("assistant", "no\nnever"),
        ("tool", ""),
    ]
    assert body.messages[2].tool_calls[0].function.name == "f"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_come_in_four_shapes(value: object, expected: object) -> None:
    assert completion(prompt=value).prompt == expected


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=7, max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=7).token_limit == 7
    assert chat().token_limit is None
    with pytest.raises(RequestError, match="max_tokens is 7 and max_completion_tokens 8"):
        chat(max_tokens=7, max_completion_tokens=8)


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=["a", "b"]).stop == ("a", "b")
    assert chat(stop=[]).stop == ()


def test_logprobs_wanted() -> None:
    assert chat().wanted_logprobs is None
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).wanted_logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).wanted_logprobs is None
    assert completion().wanted_logprobs is None
    assert completion(logprobs=0).wanted_logprobs == 0


def test_logit_bias_keys_are_token_ids() -> None:
    assert chat(logit_bias={"5": 100, "6": -0.5}).logit_bias == {5: 100.0, 6: -0.5}


@pytest.mark.parametrize("name", sorted(REFUSED_IN_CHAT))
def test_refused_chat_fields_are_named(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as refused:
        chat(**{name: [{"type": "x"}]})
    assert refused.value.param == name
    for neutral in REFUSED_IN_CHAT[name].neutral:
        assert chat(**{name: neutral}).unknown_fields() == ()


@pytest.mark.parametrize("name", sorted(REFUSED_IN_COMPLETIONS))
def test_refused_completion_fields_are_named(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as refused:
        completion(**{name: [{"type": "x"}]})
    assert refused.value.param == name
    for neutral in REFUSED_IN_COMPLETIONS[name].neutral:
        assert completion(**{name: neutral}).unknown_fields() == ()


def test_only_meaningless_fields_are_unknown() -> None:
    assert chat(**dict.fromkeys(IGNORED, "x")).unknown_fields() == ()
    assert chat(frobnicate=1, zap=2, user="me").unknown_fields() == ("frobnicate", "zap")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 3}, "temperature", "temperature is 3; expected a number from 0 to 2"),
        ({"temperature": True}, "temperature", "temperature is True; expected a number"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan; expected a number"),
        ({"top_p": 0}, "top_p", "top_p is 0; expected a number above 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "expected a number above 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; expected a whole number of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; expected a whole number"),
        ({"stream": "yes"}, "stream", "stream is 'yes'; expected true or false"),
        ({"messages": []}, "messages", "messages is []; expected a list of at least one message"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'; expected one of system"),
        ({"messages": [{"role": "user"}]}, "messages", "role user has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content is 5; expected a string"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "the one for 1 is 101"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected a whole number from 0 to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "it should be a valid dictionary"),
    ],
)
def test_errors_name_field_value_and_expectation(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert said in error.value.message
    assert error.value.param == param


def test_an_error_shows_only_the_start_of_a_long_value() -> None:
    with pytest.raises(RequestError) as error:
        completion(prompt=[None] * 100_000)
    assert len(error.value.message) < 400


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="expected a JSON object"):
        parse_body(ChatCompletionRequest, [1])


def test_a_delta_leaves_out_what_it_lacks_and_keeps_the_nulls_openai_sends() -> None:
    choice = ChatChunkChoice(index=0, delta=Delta(content="a"))
    chunk = ChatCompletionChunk(id="x", created=1, model="m", choices=[choice])
    assert '"delta":{"content":"a"},"logprobs":null,"finish_reason":null' in chunk.model_dump_json()


def test_the_wire_format_loads_neither_mlx_nor_a_web_framework() -> None:
    code = "import ling_serve.protocol, sys; print([m for m in ('mlx', 'fastapi', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
