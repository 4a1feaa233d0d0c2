"""Chat messages in the one shape that chat templates can rely on.

A history is written by many hands: models leave broken tool arguments behind, SDKs send nulls and lists of parts. All
of it is either understood or refused with the place named; nothing of it makes a template crash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ling_serve.errors import RequestError

_ROLE_ALIASES = {"developer": "system"}
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's shape → messages for a template.

    Absent and null are the same; `content` is always a string (text parts are joined by newlines); `developer` is
    `system`; reasoning is under `reasoning_content`; the arguments of a tool call are a mapping.

    Raises `RequestError` naming the message for an empty list, a part that is not text, or a malformed field.
    """
    if not messages:
        raise RequestError("messages is empty; expected at least one message", param="messages")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refused(place, message, "an object with `role` and `content`")
    known = {key: value for key, value in message.items() if value is not None}
    role = known.get("role")
    if not isinstance(role, str):
        raise _refused(f"{place}.role", role, "a string such as 'user'")
    known["role"] = _ROLE_ALIASES.get(role, role)
    known["content"] = _text(known.get("content"), f"{place}.content")
    reasoning = next((known[field] for field in _REASONING_FIELDS if field in known), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise _refused(f"{place}.reasoning_content", reasoning, "a string")
        known["reasoning_content"] = reasoning
    calls = known.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _refused(f"{place}.tool_calls", calls, "a list of tool calls")
        known["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(cast("Sequence[Any]", calls))
        ]
    return known


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refused(place, content, "a string or a list of text parts")
    return "\n".join(
        _part_text(part, f"{place}[{index}]") for index, part in enumerate(cast("Sequence[object]", content))
    )


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(place, part, "a text part")
    fields = cast("Mapping[str, object]", part)
    kind = fields.get("type")
    field = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(
            f"{place}.type is {kind!r}; this model reads text only, so expected 'text'", param=f"{place}.type"
        )
    text = fields.get(field)
    if not isinstance(text, str):
        raise _refused(f"{place}.{field}", text, "a string")
    return text


def _tool_call(call: object, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _refused(place, call, "an object with `function`")
    fields = {key: value for key, value in cast("Mapping[str, Any]", call).items() if value is not None}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise _refused(f"{place}.function", function, "an object with `name` and `arguments`")
    function = cast("Mapping[str, Any]", function)
    if not isinstance(function.get("name"), str):
        raise _refused(f"{place}.function.name", function.get("name"), "a string")
    arguments = _arguments(function.get("arguments"))
    return {"type": "function", **fields, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object) -> dict[str, Any]:
    """OpenAI sends a JSON string, templates walk a mapping. What a model got wrong is kept, under `arguments`."""
    value = arguments
    for _ in range(2):  # some clients encode twice
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    return {"arguments": arguments}


def _refused(place: str, value: object, expected: str) -> RequestError:
    shown = "missing" if value is None else repr(value)[:80]
    return RequestError(f"{place} is {shown}; expected {expected}", param=place)
