"""The chat template against hand-written goldens of Ling's format."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from ling_serve.demo import CHECKPOINT

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(CHECKPOINT))


@pytest.fixture
def render(tokenizer: Any) -> Any:
    def call(messages: list[dict[str, Any]], generate: bool = True, **kwargs: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **kwargs)

    return call


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("kwargs", "flag", "opening"),
    [
        ({}, "on", "<think>"),
        ({"enable_thinking": True}, "on", "<think>"),
        ({"enable_thinking": False}, "off", "<think></think>"),
        ({"thinking_option": "off"}, "off", "<think></think>"),
        ({"thinking_option": "on"}, "on", "<think>"),
        ({"enable_thinking": False, "thinking_option": "on"}, "off", "<think></think>"),
        ({"thinking": False}, "on", "<think>"),
    ],
)
def test_thinking_switch(render: Any, kwargs: dict[str, Any], flag: str, opening: str) -> None:
    assert render([user("46 * 37")], **kwargs) == (
        f"<role>SYSTEM</role>detailed thinking {flag}<|role_end|><role>HUMAN</role>46 * 37<|role_end|>"
        f"<role>ASSISTANT</role>\n{opening}"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_comes_before_the_flag(render: Any, role: str) -> None:
    assert render([{"role": role, "content": "Be brief."}, user("Hi")], generate=False) == (
        "<role>SYSTEM</role>Be brief.\ndetailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|>"
    )


def test_a_flag_in_the_system_text_is_not_repeated(render: Any) -> None:
    messages = [{"role": "system", "content": "Be brief.\ndetailed thinking off"}, user("Hi")]
    assert render(messages, enable_thinking=True) == (
        "<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )


def test_history_keeps_its_reasoning_and_only_grows(render: Any) -> None:
    messages = [user("3*4")]
    prompt = render(messages)
    messages += [{"role": "assistant", "content": "12", "reasoning_content": "3*4=12"}, user("Thanks")]
    text = render(messages)
    assert text == (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>3*4<|role_end|>"
        "<role>ASSISTANT</role>\n<think>3*4=12</think>12<|role_end|><role>HUMAN</role>Thanks<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )
    assert text.startswith(prompt + "3*4=12</think>12<|role_end|>")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "<think>3*4=12</think>12"}, "<think>3*4=12</think>12"),
        ({"content": "12"}, "<think></think>12"),
        ({"content": None}, "<think></think>"),
        ({"content": ""}, "<think></think>"),
        ({"content": "12", "reasoning_content": None}, "<think></think>12"),
        ({"content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}, "<think></think>12"),
        ({"content": "a</think>b</think>c"}, "<think>a</think>b</think>c"),
    ],
)
def test_assistant_turns_always_carry_a_thinking_block(render: Any, message: dict[str, Any], expected: str) -> None:
    text = render([user("3*4"), {"role": "assistant", **message}], generate=False)
    assert text.split("<role>ASSISTANT</role>\n")[1] == expected + "<|role_end|>"


def test_text_parts_are_joined_and_images_refused(render: Any) -> None:
    assert "<role>HUMAN</role>ab<|role_end|>" in render([user([{"type": "text", "text": "a"}, "b"])])
    with pytest.raises(Exception, match="image_url"):
        render([user([{"type": "image_url", "image_url": {}}])])
    with pytest.raises(Exception, match="narrator"):
        render([{"role": "narrator", "content": "x"}])


def test_tools_block(render: Any) -> None:
    text = render([{"role": "system", "content": "Be brief."}, user("Hi")], tools=[WEATHER, WEATHER])
    head, rest = text.split("<tools>\n")
    assert head.startswith("<role>SYSTEM</role>Be brief.\n# Tools\n")
    listed, rest = rest.split("\n</tools>\n")
    line = (
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}'
    )
    assert listed == line + "\n" + line
    assert rest.endswith(
        "</tool_call>\ndetailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>\n<think>"
    )
    assert render([user("Hi")], tools=[WEATHER]).startswith("<role>SYSTEM</role># Tools\n")


def test_calls_and_responses(render: Any) -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    messages = [
        user("Weather?"),
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Two calls.", "tool_calls": calls},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "Rain at noon."},
    ]
    text = render(messages, generate=False)
    assert text.split("<role>HUMAN</role>")[1] == (
        "Weather?<|role_end|><role>ASSISTANT</role>\n<think>Two calls.</think>Let me look."
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><|role_end|>"
        "<role>OBSERVATION</role>\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        "<|role_end|><role>ASSISTANT</role>\n<think></think>Rain at noon.<|role_end|>"
    )


def test_values_that_are_not_strings_are_json(render: Any) -> None:
    arguments = {"a": True, "b": None, "c": [1, "é"], "d": {"x": 1.5}, "e": "true"}
    call = {"function": {"name": "f", "arguments": arguments}}
    text = render([user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}], generate=False)
    values = [part.split("</arg_value>")[0] for part in text.split("<arg_value>")[1:]]
    assert values == ["true", "null", '[1, "é"]', '{"x": 1.5}', "true"]


def test_special_tokens_and_digits_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("<role>HUMAN</role>1234 <think>5</think><tool_call><|role_end|>", add_special_tokens=False)
    texts = [tokenizer.decode([i]) for i in ids]
    expected = ["<role>", "HUMAN", "</role>", "1", "2", "3", "4", " ", "<think>", "5", "</think>", "<tool_call>"]
    assert texts == [*expected, "<|role_end|>"]
    assert tokenizer.eos_token == "<|role_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("text", ["naïve 🙂👩‍👩‍👧", "東京", "\u00d7", "  two  spaces\n\ttab\r\n", "\x00\x7f", ""])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
