"""Refuses requests that could never be answered, or would be answered wrongly, with the numbers."""

from __future__ import annotations

import math

from ling_serve.engine.request import MAX_LOGPROBS, Request, SamplingParams
from ling_serve.errors import ContextLengthExceeded, RequestError


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError naming the parameter, or ContextLengthExceeded."""
    if not request.prompt:
        raise RequestError("the prompt is empty; expected at least one token", param="prompt")
    if len(request.prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.prompt)} tokens; this server's context holds {max_model_len}, "
            "completion included. Shorten the prompt, or raise --max-model-len",
            param="prompt",
        )
    strangers = [token for token in request.prompt if not 0 <= token < vocab_size]
    if strangers:
        raise RequestError(
            f"the prompt contains token id {strangers[0]}; the vocabulary has ids 0 to {vocab_size - 1}", param="prompt"
        )
    _check_sampling(request.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    logprobs = sampling.logprobs if sampling.logprobs is not None else 0
    checks: tuple[tuple[str, float, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf, "0 or more"),
        ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "0 to 1"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "a finite number"),
        ("repetition_penalty", sampling.repetition_penalty, 0.0 < sampling.repetition_penalty < math.inf, "above 0"),
        ("min_tokens", sampling.min_tokens, 0 <= sampling.min_tokens <= sampling.max_tokens, "0 to max_tokens"),
        ("logprobs", logprobs, 0 <= logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
    )
    for name, value, good, expected in checks:
        if not good:
            raise RequestError(f"{name} is {value}; expected {expected}", param=name)
    for token, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise RequestError(f"logit_bias of token {token} is {bias}; expected a finite number", param="logit_bias")
