"""What the checkpoint's makers recommend for sampling, and the ids that end an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ling_serve.config import GenerationConfigSource
from ling_serve.errors import CheckpointError
from ling_serve.text.tokenizer import Tokenizer

GENERATION_CONFIG_FILE = "generation_config.json"
MODEL_CONFIG_FILE = "config.json"

_SAMPLING_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """Values for what a request leaves open. The defaults here are neutral: the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Most tokens of an answer where a request names no number; None = what the context leaves."""
    eos_token_ids: frozenset[int] = frozenset()
    """Ids of generation_config.json, config.json and the tokenizer together."""
    implicit_stop_strings: tuple[str, ...] = ()
    """Texts of the special tokens among `eos_token_ids`: a model may spell `<|role_end|>` with ordinary tokens.

    They end an answer like stop strings, unless the request says `ignore_eos`; they are never part of it.
    """

    @classmethod
    def from_checkpoint(
        cls, path: Path, source: GenerationConfigSource = "auto", tokenizer: Tokenizer | None = None
    ) -> GenerationDefaults:
        """Reads generation_config.json and the end-of-sequence ids of config.json in the folder `path`.

        Without the file, or where it says nothing about sampling, Ling's published values hold: temperature 1.0,
        top_p 0.95, top_k 20. `do_sample: false` is temperature 0. Source `none` leaves the file unread and sampling
        neutral. The tokenizer's own end-of-sequence ids count too, and only with it there are implicit stop strings.

        Raises `CheckpointError` naming the file and field, the value and the expectation.
        """
        model = _Fields(MODEL_CONFIG_FILE, _read(path / MODEL_CONFIG_FILE))
        eos_ids = model.token_ids("eos_token_id") | (tokenizer.eos_ids if tokenizer else frozenset[int]())
        if source == "none":
            return cls(eos_token_ids=eos_ids, implicit_stop_strings=_special_texts(tokenizer, eos_ids))
        file = _Fields(GENERATION_CONFIG_FILE, _read(path / GENERATION_CONFIG_FILE))
        eos_ids |= file.token_ids("eos_token_id")
        published = cls(top_p=0.95, top_k=20)
        neutral = published if file.are_absent(_SAMPLING_FIELDS) else cls()
        temperature = file.number("temperature", neutral.temperature, _non_negative, "a number of at least 0")
        return cls(
            temperature=0.0 if not file.flag("do_sample", True) else temperature,
            top_p=file.number("top_p", neutral.top_p, _fraction_above_0, "a number above 0 and at most 1"),
            top_k=max(0, file.integer("top_k", neutral.top_k, -1, "an integer of at least 0, or -1 for all")),
            min_p=file.number("min_p", neutral.min_p, _fraction, "a number from 0 to 1"),
            repetition_penalty=file.number(
                "repetition_penalty", neutral.repetition_penalty, _positive, "a number above 0"
            ),
            max_new_tokens=file.integer("max_new_tokens", 0, 1, "an integer of at least 1") or None,
            eos_token_ids=eos_ids,
            implicit_stop_strings=_special_texts(tokenizer, eos_ids),
        )


@dataclass(frozen=True)
class _Fields:
    """One JSON file's fields, read with their checks. Null equals absent."""

    file: str
    values: Mapping[str, Any]

    def are_absent(self, names: tuple[str, ...]) -> bool:
        return all(self.values.get(name) is None for name in names)

    def number(self, name: str, default: float, accept: Callable[[float], bool], expected: str) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(name, value, expected)
        try:
            number = float(value)
        except OverflowError:  # JSON integers have no limit
            number = math.inf
        if not math.isfinite(number) or not accept(number):
            raise self._refused(name, value, expected)
        return number

    def integer(self, name: str, default: int, least: int, expected: str) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._refused(name, value, expected)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        value: object = self.values.get(name)
        ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        known = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if len(known) < len(set(map(repr, ids))):
            raise self._refused(name, ids, "a token id or a list of token ids")
        return known

    def _refused(self, name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {name} is {value!r}; expected {expected}", param=name)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return cast("dict[str, Any]", content)


def _special_texts(tokenizer: Tokenizer | None, ids: frozenset[int]) -> tuple[str, ...]:
    if tokenizer is None:
        return ()
    texts = (tokenizer.token_text(i) for i in sorted(ids & tokenizer.special_ids))
    return tuple(text for text in texts if text)


def _non_negative(value: float) -> bool:
    return value >= 0


def _positive(value: float) -> bool:
    return value > 0


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


def _fraction_above_0(value: float) -> bool:
    return 0 < value <= 1
