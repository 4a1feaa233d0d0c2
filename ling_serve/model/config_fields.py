"""Reads single fields of config.json: one checked value, or one error that names field, value and expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ling_serve.errors import MISSING, ConfigFieldError


@dataclass(frozen=True)
class FieldReader:
    """Typed access to a JSON object. Every method raises `ConfigFieldError` for a value it does not accept.

    `default` is what an absent or null field means; without one the field is required.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    """Put before the names in errors: `rope_scaling.` for a nested object."""

    def error(self, name: str, expected: str) -> ConfigFieldError:
        return ConfigFieldError(self.prefix + name, self.values.get(name, MISSING), expected)

    def integer(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        """An integer of at least `least`; booleans and floats are refused."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def optional_integer(self, name: str, *, least: int = 1) -> int | None:
        """An integer of at least `least`, or null. The field itself is required: absence is not null."""
        if name in self.values and self.values[name] is None:
            return None
        value = self.values.get(name, MISSING)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"null or an integer of at least {least}")
        return value

    def number(self, name: str, *, above: float | None = None, default: float | None = None) -> float:
        """A finite number, integers included, greater than `above`."""
        value = self._value(name, default)
        number = finite(value)
        if number is None or (above is not None and number <= above):
            raise self.error(name, "a finite number" if above is None else f"a finite number above {above:g}")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def fixed(self, name: str, only: object, reason: str) -> None:
        """A field of which one value is supported; absent and null mean that value."""
        value = self.values.get(name)
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise self.error(name, f"{_json(only)} ({reason})")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A JSON object, or None when the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "an object or null")
        return cast("Mapping[str, Any]", value)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "a string or null")
        return value

    def token_ids(self, name: str, *, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of ids, or none at all (absent or null)."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = list(cast("Sequence[Any]", value)) if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.error(name, f"token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def limits(self, name: str, *, count: int) -> tuple[float | None, ...]:
        """`count` clamp limits, one a layer: 0, null and places past the end of the list mean no clamp.

        Entries past `count` belong to layers that are not part of the main model and are checked, then dropped.
        """
        value = self.values.get(name)
        if value is None:
            return (None,) * count
        expected = "null or a list with one number of at least 0 (or null) for each layer"
        if not isinstance(value, list):
            raise self.error(name, expected)
        limits: list[float | None] = []
        for entry in cast("list[Any]", value):
            number = 0.0 if entry is None else finite(entry)
            if number is None or number < 0.0:
                raise self.error(name, expected)
            limits.append(number or None)
        limits.extend([None] * (count - len(limits)))
        return tuple(limits[:count])

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name, MISSING)
        return default if default is not None and (value is None or value is MISSING) else value


def finite(value: object) -> float | None:
    """The value as a float, or None if it is no finite number (booleans are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON integers have no limit
        return None
    return number if math.isfinite(number) else None


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
