"""A request's sampling fields and the model's defaults → what the engine is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from ling_serve.choice_text import StopPlan
from ling_serve.engine.request import SamplingParams
from ling_serve.errors import ContextLengthExceeded, RequestError
from ling_serve.protocol.sampling import SamplingBody
from ling_serve.server.service import Ready
from ling_serve.text.generation_config import GenerationDefaults

Number = TypeVar("Number", int, float)


def sampling_params(body: SamplingBody, ready: Ready, prompt: Sequence[int], prompt_field: str) -> SamplingParams:
    """The request's values, and the model's defaults for what it leaves open.

    Raises `ContextLengthExceeded` when `prompt` and the tokens asked for don't fit the model's context, and
    `RequestError` for ids outside the vocabulary.
    """
    defaults = ready.text.defaults
    max_tokens = _max_tokens(body, ready, len(prompt), prompt_field)
    if body.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {body.min_tokens}; expected at most max_tokens, {max_tokens}", param="min_tokens"
        )
    _check_ids(prompt, ready.vocab_size, prompt_field)
    _check_ids(body.stop_token_ids, ready.vocab_size, "stop_token_ids")
    _check_ids(body.logit_bias, ready.vocab_size, "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.temperature),
        top_p=_first(body.top_p, defaults.top_p),
        top_k=max(0, _first(body.top_k, defaults.top_k)),
        min_p=_first(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=dict(body.logit_bias),
        min_tokens=body.min_tokens,
        seed=body.seed,
        logprobs=body.wanted_logprobs,
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def stop_plan(body: SamplingBody, defaults: GenerationDefaults) -> StopPlan:
    """What ends the text besides the engine's own stop tokens."""
    return StopPlan(
        strings=body.stop,
        implicit=() if body.ignore_eos else defaults.implicit_stop_strings,
        include=body.include_stop_str_in_output,
        after_tokens=body.min_tokens,
        token_ids=frozenset(body.stop_token_ids),
        skip_special_tokens=body.skip_special_tokens,
    )


def _max_tokens(body: SamplingBody, ready: Ready, prompt_tokens: int, prompt_field: str) -> int:
    if prompt_tokens == 0:
        raise RequestError(f"{prompt_field} holds no tokens; expected at least one", param=prompt_field)
    left = ready.max_model_len - prompt_tokens
    asked = body.token_limit
    if left < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, but the context holds {ready.max_model_len} for prompt and "
            "completion together; shorten the prompt",
            param=prompt_field,
        )
    if asked is None:
        default = ready.text.defaults.max_new_tokens
        return left if default is None else min(default, left)
    if asked > left:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {asked}, together {prompt_tokens + asked}, but "
            f"the context holds {ready.max_model_len}; shorten the prompt or lower max_tokens to at most {left}",
            param=prompt_field,
        )
    return asked


def _check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise RequestError(
            f"{field} holds the token id {highest}; expected ids below the vocabulary size, {vocab_size}", param=field
        )


def _first(value: Number | None, default: Number) -> Number:
    return default if value is None else value
