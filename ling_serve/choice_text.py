"""One choice's text as its tokens come: detokenised, cut at stop strings, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ling_serve.engine.events import TokenEvent, TokenLogprobs
from ling_serve.engine.request import FinishReason
from ling_serve.text.detokenizer import Detokenizer
from ling_serve.text.stops import StopMatcher
from ling_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopPlan:
    """What ends the text besides the engine's own stop tokens."""

    strings: tuple[str, ...] = ()
    """The request's stop strings."""
    implicit: tuple[str, ...] = ()
    """The model's end marks spelled as ordinary text; never part of the answer."""
    include: bool = False
    """The request's stop string (or stop token) that ended the text stays in it."""
    after_tokens: int = 0
    """Stop strings do not count within this many tokens."""
    token_ids: frozenset[int] = frozenset()
    """The request's stop tokens."""
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class TextToken:
    """One generated token with its log-probabilities."""

    id: int
    text_offset: int
    """Characters of the choice's text before it."""
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Part:
    """What a choice gained since the part before."""

    index: int
    text: str
    tokens: tuple[TextToken, ...]
    """Tokens whose text is out, where log-probabilities were asked for."""
    finish: FinishReason | None


class ChoiceText:
    """Turns the token events of one engine request into parts. The parts' texts, joined, are the answer."""

    def __init__(self, index: int, tokenizer: Tokenizer, plan: StopPlan) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finished = False
        self._plan = plan
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=plan.skip_special_tokens)
        self._implicit = StopMatcher(plan.implicit)
        self._stops = StopMatcher(plan.strings, plan.include)
        self._decoded = 0
        self._emitted = 0
        self._waiting: list[TextToken] = []

    def push(self, event: TokenEvent) -> Part:
        """The next token. When a stop string ends the text, the part says so though the engine goes on."""
        self.completion_tokens += 1
        has_text = not event.is_stop_token or (self._plan.include and event.token in self._plan.token_ids)
        if event.logprobs is not None and has_text:
            self._waiting.append(TextToken(event.token, self._decoded, event.logprobs))
        text = self._detokenizer.push([event.token]) if has_text else ""
        if event.finish is not None:
            text += self._detokenizer.finish()
        self._decoded += len(text)
        text, stopped = self._cut(text)
        finish = event.finish
        if stopped:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._rest()
        self._emitted += len(text)
        self.finished = finish is not None
        return Part(self.index, text, self._released(ended=self.finished and not stopped), finish)

    def _cut(self, text: str) -> tuple[str, bool]:
        """The text that is certain to stay, and whether a stop string ends it."""
        if self.completion_tokens <= self._plan.after_tokens:
            return text, False
        implicit = self._implicit.push(text)
        stop = self._stops.push(implicit.text)
        if stop.matched is None and implicit.matched is not None:
            return stop.text + self._stops.flush(), True
        return stop.text, stop.matched is not None

    def _rest(self) -> str:
        """What was held back as the possible start of a stop string, now that nothing follows."""
        stop = self._stops.push(self._implicit.flush())
        return stop.text if stop.matched is not None else stop.text + self._stops.flush()

    def _released(self, *, ended: bool) -> tuple[TextToken, ...]:
        """Waiting tokens whose text has begun to go out; at an end that no stop string made, all of them."""
        count = 0
        while count < len(self._waiting) and (ended or self._waiting[count].text_offset < self._emitted):
            count += 1
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(released)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Parts that came while the reader was busy, as one per choice."""
    if len(parts) == 1:
        return list(parts)
    by_choice: dict[int, Part] = {}
    for part in parts:
        before = by_choice.get(part.index)
        if before is not None:
            part = Part(part.index, before.text + part.text, before.tokens + part.tokens, part.finish)
        by_choice[part.index] = part
    return list(by_choice.values())
