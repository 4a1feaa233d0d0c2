"""What every wire model shares: nulls, unknown fields, and errors that name value and expectation.

Requests are read leniently where the meaning is certain (`null` is absent, `1` is fine for `1.0`, `16.0` for `16`) and
refused by name where ignoring a field would change the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from ling_serve.errors import RequestError, UnsupportedParameter

_SHOWN_LENGTH = 80


class ExpectationError(ValueError):
    """Raised by a field's check with what was expected; the field's name and value are added by `parse_body`."""


@dataclass(frozen=True)
class Refusal:
    """A known field that is not supported, unless its value asks for nothing."""

    instead: str
    """What is supported, completing the sentence "…; "."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing and are accepted."""


_NO_REFUSALS: Mapping[str, Refusal] = MappingProxyType({})


class WireModel(BaseModel):
    """A JSON object of the API. Unknown fields are kept aside in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class RequestPart(WireModel):
    """An object inside a request."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: Any) -> Any:
        """`null` equals absent for every optional field (and is reported as missing for a required one)."""
        if isinstance(data, Mapping):
            return {name: value for name, value in cast("Mapping[str, Any]", data).items() if value is not None}
        return data


class RequestBody(RequestPart):
    """The body of a request: knows which fields it refuses and which it may ignore."""

    refused: ClassVar[Mapping[str, Refusal]] = _NO_REFUSALS
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            refusal = self.refused.get(name)
            if refusal is not None and value not in refusal.neutral:
                raise UnsupportedParameter(f"{name} is {shown(value)}; {refusal.instead}", param=name)
        return self

    def unknown_fields(self) -> tuple[str, ...]:
        """Names that mean nothing to this server, for a warning."""
        return tuple(sorted(set(self.model_extra or ()) - self.ignored - set(self.refused)))


Body = TypeVar("Body", bound=RequestPart)


def parse_body(body_type: type[Body], data: object) -> Body:
    """Validate decoded JSON as `body_type`.

    Raises `RequestError` (400) naming the first wrong field, its value and the expectation, and `UnsupportedParameter`
    for a field that is known but refused.
    """
    if not isinstance(data, Mapping):
        raise RequestError(f"the body is {shown(data)}; expected a JSON object")
    try:
        return body_type.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = field_path(first["loc"])
    where = path or "the body"
    context = first.get("ctx", {})
    cause = context.get("error")
    if first["type"] == "missing":
        message = f"{where} is missing; it is required"
    elif isinstance(cause, ExpectationError):
        message = f"{where} is {shown(first['input'])}; expected {cause}"
    elif cause is not None:
        message = str(cause)
    else:
        message = f"{where} is {shown(first['input'])}; {first['msg'].replace('Input should', 'it should', 1)}"
    raise RequestError(message, param=path or None)


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` → `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def shown(value: object) -> str:
    """A value for an error message, cut to one short line."""
    text = repr(value[: _SHOWN_LENGTH + 1] if isinstance(value, str | list) else value)  # pyright: ignore[reportUnknownArgumentType]
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"


def number(low: float, high: float, *, above_low: bool = False) -> BeforeValidator:
    """A check for a JSON number (an integer is fine, a boolean or a string is not) between two bounds."""
    start = f"above {low:g}" if above_low else f"from {low:g}"
    if math.isinf(high):
        expected = f"a number {start}" if above_low else f"a number of at least {low:g}"
    else:
        expected = f"a number {start} to {high:g}"

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ExpectationError(expected)
        try:
            real = float(value)
        except OverflowError:  # JSON integers have no limit
            real = math.inf
        if not math.isfinite(real) or real < low or real > high or (above_low and real == low):
            raise ExpectationError(expected)
        return real

    return BeforeValidator(check)


def whole(low: int, high: int | None = None) -> BeforeValidator:
    """A check for a JSON integer (`16.0` is one, a boolean or a string is not) between two bounds."""
    expected = f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"
    return BeforeValidator(_whole_check(low, high, expected))


def _whole_check(low: int, high: int | None, expected: str) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ExpectationError(expected)
        if value < low or (high is not None and value > high):
            raise ExpectationError(expected)
        return value

    return check


def flag(value: object) -> bool:
    """A check for `true` or `false`, and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise ExpectationError("true or false")
    return value
