"""What was asked of the engine, in ids only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

_NO_BIAS: Mapping[int, float] = MappingProxyType({})
MAX_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words. `ABORT` never reaches a client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Neutral values switch a feature off."""

    max_tokens: int = 256
    """Most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from each token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the tokens generated so far."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt or the completion."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be drawn before this many tokens."""
    seed: int | None = None
    """Same seed, same prompt, same parameters → same tokens, whatever else is in the batch."""
    logprobs: int | None = None
    """None = none; k = the chosen token's and the k likeliest tokens' (0 to 20), of the model's raw distribution."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence besides the model's end-of-sequence ids, `ignore_eos` or not."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. `id` is unique among live requests."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
