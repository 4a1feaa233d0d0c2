"""Chats rendered by the bundled template, in Ling's format, and by templates that misbehave."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ling_serve.demo import CHECKPOINT
from ling_serve.errors import CheckpointError, ConfigError, RequestError
from ling_serve.text.template import ChatTemplate
from ling_serve.text.tokenizer import Tokenizer

MakeCheckpoint = Callable[..., Path]
Message = dict[str, Any]

HI: list[Message] = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def ling() -> ChatTemplate:
    return ChatTemplate(Tokenizer.from_checkpoint(CHECKPOINT))


def call(name: str, arguments: object) -> Message:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_thinking_on_by_default_and_off_by_kwarg(ling: ChatTemplate) -> None:
    assert ling.render(HI) == (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )
    assert ling.render(HI, {"enable_thinking": False}) == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>"
    )
    assert ling.render(HI, {"thinking_option": "off"}) == ling.render(HI, {"enable_thinking": False})


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_and_its_own_thinking_flag(ling: ChatTemplate, role: str) -> None:
    system = [{"role": role, "content": "Be brief."}, *HI]
    assert ling.render(system).startswith("<role>SYSTEM</role>Be brief.\ndetailed thinking on<|role_end|><role>HUMAN")
    flagged = [{"role": role, "content": "detailed thinking on"}, *HI]
    text = ling.render(flagged, {"enable_thinking": False})
    assert text.count("detailed thinking") == 1
    assert text.endswith("<role>ASSISTANT</role>\n<think></think>")


def test_history_keeps_reasoning_calls_and_observations(ling: ChatTemplate) -> None:
    calls = [call("weather", '{"city": "Oslo", "days": 2}'), call("now", "{}")]
    history: list[Message] = [
        *HI,
        {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "<think>So.</think>It rains."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye."},
    ]
    assert ling.render(history, add_generation_prompt=False).partition("<|role_end|>")[2] == (
        "<role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think>Look it up.</think>"
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call><|role_end|>"
        "<role>OBSERVATION</role>\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|role_end|>"
        "<role>ASSISTANT</role>\n<think>So.</think>It rains.<|role_end|>"
        "<role>HUMAN</role>Thanks<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>Bye.<|role_end|>"
    )


def test_history_only_grows(ling: ChatTemplate) -> None:
    """The next turn's prompt starts with this turn's prompt and answer: its cache can be used again."""
    answer = {"role": "assistant", "reasoning_content": "Greet.", "content": "Hello"}
    so_far = ling.render(HI) + "Greet.</think>Hello<|role_end|>"
    assert ling.render([*HI, answer, {"role": "user", "content": "?"}]).startswith(so_far)


def test_tools_block(ling: ChatTemplate) -> None:
    text = ling.render([{"role": "system", "content": "S"}, *HI], tools=[WEATHER, WEATHER])
    one = json.dumps(WEATHER)
    assert text.startswith("<role>SYSTEM</role>S\n# Tools")
    assert f"<tools>\n{one}\n{one}\n</tools>" in text
    assert text.partition("<|role_end|>")[0].endswith("detailed thinking on")
    assert ling.render(HI, tools=[]) == ling.render(HI)


def test_an_open_last_message_is_continued(ling: ChatTemplate) -> None:
    text = ling.render([*HI, {"role": "assistant", "content": "Once upon"}], continue_final_message=True)
    assert text.endswith("<role>ASSISTANT</role>\n<think></think>Once upon")


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ("", "<tool_call>f\n</tool_call>"),
        (None, "<tool_call>f\n</tool_call>"),
        ("null", "<tool_call>f\n</tool_call>"),
        ({"a": "001"}, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>001</arg_value>\n</tool_call>"),
        ('"{\\"a\\": 1}"', "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ('{"a": ', '<tool_call>f\n<arg_key>arguments</arg_key>\n<arg_value>{"a": </arg_value>\n</tool_call>'),
        ("[1]", "<tool_call>f\n<arg_key>arguments</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>"),
        ("[" * 100_000, "<arg_key>arguments</arg_key>"),
        ("9" * 5000, "<arg_key>arguments</arg_key>"),
    ],
)
def test_broken_arguments_in_history_are_kept(ling: ChatTemplate, arguments: object, rendered: str) -> None:
    assert rendered in ling.render([*HI, {"role": "assistant", "tool_calls": [call("f", arguments)]}])


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [call("", "")], "reasoning": 1}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "wizard", "content": "hi"}], "messages"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_by_place(
    ling: ChatTemplate, messages: list[Message], place: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ling.render(messages)
    assert (caught.value.status, caught.value.param) == (400, place)


@pytest.mark.parametrize("tool_calls", [None, []])
def test_nulls_and_part_lists_render_like_strings(ling: ChatTemplate, tool_calls: object) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ling.render([{"role": "user", "content": parts, "name": None}]) == ling.render(
        [{"role": "user", "content": "a\nb"}]
    )
    nulls = {"role": "assistant", "content": None, "tool_calls": tool_calls, "reasoning_content": None}
    assert ling.render([*HI, nulls, *HI]) == ling.render([*HI, {"role": "assistant", "content": ""}, *HI])
    by_newer_name = ling.render([*HI, {"role": "assistant", "content": "c", "reasoning": "r"}, *HI])
    assert "<think>r</think>c" in by_newer_name


def test_developer_is_system(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "roles.jinja"
    path.write_text("{{ messages | map(attribute='role') | join(' ') }}", encoding="utf-8")
    assert ChatTemplate(byte_tokenizer, path).render([{"role": "developer", "content": "S"}, *HI]) == "system user"


def test_a_request_overrides_the_default_kwargs() -> None:
    off = ChatTemplate(Tokenizer.from_checkpoint(CHECKPOINT), default_kwargs={"enable_thinking": False})
    assert off.render(HI).endswith("</think>")
    assert off.render(HI, {"enable_thinking": None}).endswith("</think>")
    assert off.render(HI, {"enable_thinking": True}).endswith("<think>")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
def test_kwargs_cannot_take_over_the_rendering(ling: ChatTemplate, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        ling.render(HI, {name: "{{ 1 }}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(ConfigError, match=name):
        ChatTemplate(Tokenizer.from_checkpoint(CHECKPOINT), default_kwargs={name: 1})


def test_template_override(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ eos_token }}{{ messages[0].content }}{{ mood }}", encoding="utf-8")
    template = ChatTemplate(byte_tokenizer, path)
    assert template.render(HI, {"mood": "!"}) == "<|role_end|>Hi!"
    path.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.jinja is not a Jinja template: line 1"):
        ChatTemplate(byte_tokenizer, path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"own\.jinja cannot be read"):
        ChatTemplate(byte_tokenizer, path)
    path.write_text(" ")
    with pytest.raises(ConfigError, match="empty"):
        ChatTemplate(byte_tokenizer, path)
    with pytest.raises(ConfigError, match=r"absent\.jinja cannot be read"):
        ChatTemplate(byte_tokenizer, tmp_path / "absent.jinja")


def test_templates_of_the_tokenizer_config(checkpoint_with: MakeCheckpoint) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    for config, expected in ((named, ("D", "T")), ("S", ("S", "S"))):
        path = checkpoint_with(chat_template__jinja=None, tokenizer_config__json={"chat_template": config})
        template = ChatTemplate(Tokenizer.from_checkpoint(path))
        assert (template.render(HI), template.render(HI, tools=[WEATHER])) == expected


def test_without_a_template_the_remedy_is_named(checkpoint_with: MakeCheckpoint) -> None:
    template = ChatTemplate(Tokenizer.from_checkpoint(checkpoint_with(chat_template__jinja=None)))
    assert not template.available
    with pytest.raises(RequestError, match="--chat-template PATH"):
        template.render(HI)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('only odd turns') }}", "refused the messages: only odd turns"),
        ("{{ messages[0].absent.more }}", "refused the messages: "),
        ("{{ messages.append(1) }}", "refused the messages: "),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: "),
        ("{{ 1 / 0 }}", "cannot render the messages: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "cannot render the messages: TypeError"),
    ],
)
def test_a_template_that_fails_is_a_400(checkpoint_with: MakeCheckpoint, source: str, said: str) -> None:
    template = ChatTemplate(Tokenizer.from_checkpoint(checkpoint_with(chat_template__jinja=source)))
    with pytest.raises(RequestError) as caught:
        template.render(HI)
    assert said in caught.value.message


def test_a_broken_template_in_the_checkpoint_is_found_at_start(checkpoint_with: MakeCheckpoint) -> None:
    path = checkpoint_with(chat_template__jinja="\n{% for %}")
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate(Tokenizer.from_checkpoint(path))


def test_messages_are_not_changed_and_threads_do_not_mix(ling: ChatTemplate) -> None:
    chats = [[{"role": "developer", "content": f"S{n}"}, {"role": "user", "content": f"{n}"}] for n in range(32)]
    before = json.dumps(chats)
    expected = [ling.render(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ling.render, chats)) == expected
    assert json.dumps(chats) == before
