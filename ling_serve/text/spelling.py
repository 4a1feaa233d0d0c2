"""How a vocabulary entry spells bytes, read from the `decoder` of tokenizer.json.

A token's bytes never depend on its neighbours, so text can be put together one token at a time. Only the first token
of a text is special where a SentencePiece vocabulary puts a space before the first word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ling_serve.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """Turns entries of one vocabulary into bytes."""

    @property
    def leading_space(self) -> bool:
        """A text decoded from its beginning loses one leading space."""
        ...

    def bytes_of(self, token: str) -> bytes:
        """The exact bytes of one entry, which need not be whole characters."""
        ...


@dataclass(frozen=True)
class ByteLevelSpelling:
    """Byte-level BPE: each character of an entry stands for one byte."""

    leading_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, written as it reads
            return token.encode("utf-8", "replace")


@dataclass(frozen=True)
class PieceSpelling:
    """SentencePiece: entries are text with a mark for the space; `<0x0A>` is a byte where `byte_fallback` is on."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    leading_space: bool

    def bytes_of(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """Understands the `decoder` object of tokenizer.json.

    Raises `CheckpointError` for a decoder whose tokens cannot be spelled one by one.
    """
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return ByteLevelSpelling()
    replacements: list[tuple[str, str]] = []
    leading_space = False
    for step, kind in zip(steps, kinds, strict=True):
        match kind:
            case "Replace" if isinstance(pattern := step["pattern"].get("String"), str):
                replacements.append((pattern, str(step["content"])))
            case "Metaspace":
                replacements.append((str(step["replacement"]), " "))
                leading_space = leading_space or step.get("prepend_scheme", "always") != "never"
            case "Strip" if (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
                leading_space = True
            case "ByteFallback" | "Fuse":
                pass
            case _:
                raise _unsupported(kinds)
    if not replacements and "ByteFallback" not in kinds:
        raise _unsupported(kinds)
    return PieceSpelling(tuple(replacements), "ByteFallback" in kinds, leading_space)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [inner for step in cast("Sequence[Mapping[str, Any]]", decoder["decoders"]) for inner in _steps(step)]
    return [decoder]


def _unsupported(kinds: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json: decoder is {' + '.join(kinds) or 'missing'}; expected ByteLevel, Metaspace, or Replace, "
        "ByteFallback, Fuse and Strip in the SentencePiece manner"
    )


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others, in order, for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_by_character()
