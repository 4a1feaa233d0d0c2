"""What the engine reports about a request, in order; the last event of a request is its only terminal one."""

from __future__ import annotations

from dataclasses import dataclass

from ling_serve.engine.request import FinishReason
from ling_serve.errors import LingServeError


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats) of one sampled token under the model's raw distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, descending."""


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. `finish` is set on the last one; a stop or end-of-sequence id is reported like any other."""

    request_id: str
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    is_stop_token: bool = False
    """The token itself ended the sequence: it carries no text."""


@dataclass(frozen=True)
class ErrorEvent:
    """The request ended without an answer."""

    request_id: str
    error: LingServeError


@dataclass(frozen=True)
class AbortedEvent:
    """The request was aborted and holds nothing any more."""

    request_id: str


Event = TokenEvent | ErrorEvent | AbortedEvent
