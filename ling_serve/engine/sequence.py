"""A request while it lives in the engine."""

from __future__ import annotations

from enum import Enum

from ling_serve.engine.request import FinishReason, Request


class Status(Enum):
    QUEUED = "queued"
    """Waits for a slot and blocks; nothing computed."""
    PREFILL = "prefill"
    """Holds a slot; more than the newest token is still to be computed."""
    DECODE = "decode"
    """Holds a slot; each step computes the newest token and samples the next."""
    PREEMPTED = "preempted"
    """Gave everything back and waits to compute its tokens again."""
    ENDED = "ended"


class Sequence:
    """The tokens of one request. While it lives: 0 <= computed < len(tokens) <= the engine's max_model_len."""

    def __init__(self, request: Request, *, seed: int, arrival: int, queued_at_step: int) -> None:
        self.id = request.id
        self.request = request
        self.seed = seed
        """Of its random numbers: the request's, or one the engine drew."""
        self.arrival = arrival
        """Position in the order of all requests; the newest is the first to be preempted."""
        self.queued_at_step = queued_at_step
        self.tokens = list(request.prompt)
        self.output: list[int] = []
        self.computed = 0
        """Tokens whose latents and states are in the caches."""
        self.status = Status.QUEUED
        self.is_unproven = False
        """Nothing was sampled since tokens were last computed: what the caches hold of them may not be finite."""

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def preempt(self) -> None:
        self.computed = 0
        self.is_unproven = False
        self.status = Status.PREEMPTED

    def advance(self, length: int) -> None:
        """A step computed `length` more tokens."""
        self.computed += length
        self.is_unproven = True
        self.status = Status.DECODE if self.remaining <= 1 and self.output else Status.PREFILL

    def append(self, token: int, max_model_len: int) -> FinishReason | None:
        """Add a sampled token, and say why the sequence ends with it, if it does."""
        self.is_unproven = False
        self.tokens.append(token)
        self.output.append(token)
        self.status = Status.DECODE
        if token in self.stop_ids:
            return FinishReason.STOP
        if len(self.output) >= self.request.sampling.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the sequence."""
        sampling = self.request.sampling
        return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | self.request.eos_token_ids

    @property
    def blocked_ids(self) -> frozenset[int]:
        """Ids that `min_tokens` forbids now."""
        return self.stop_ids if len(self.output) < self.request.sampling.min_tokens else frozenset()
