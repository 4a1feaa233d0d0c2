"""Text from tokens as they come.

A token is a run of bytes whatever its neighbours are (`text/spelling.py`), so an incremental UTF-8 decoder is all the
state there is: at most three bytes of a character that is not complete yet. No window of past tokens is decoded again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from ling_serve.text.tokenizer import Tokenizer


class Detokenizer:
    """One sequence's text. The pushes and the finish, joined, are `tokenizer.decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False, continuing: bool = True) -> None:
        """`continuing`: the tokens follow a prompt, so a SentencePiece vocabulary's first space is kept."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._at_start = tokenizer.strips_first_space and not continuing
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. Bytes of an unfinished character wait; bytes that can never be part of one
        come out as U+FFFD as soon as that is certain."""
        tokenizer, skipped = self._tokenizer, self._skipped
        spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        return self._emit(self._decoder.decode(spelled))

    def finish(self) -> str:
        """What was still waiting, as U+FFFD: the sequence ended inside a character."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
