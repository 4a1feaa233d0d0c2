"""The fields by which every generating endpoint says how to sample and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from ling_serve.errors import RequestError
from ling_serve.protocol.base import ExpectationError, RequestBody, RequestPart, flag, number, shown, whole

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings together: the matcher keeps a node for each."""
MAX_LOGPROBS = 20

Flag = Annotated[bool, BeforeValidator(flag)]
Temperature = Annotated[float, number(0, 2), Field(ge=0, le=2)]
TopP = Annotated[float, number(0, 1, above_low=True), Field(gt=0, le=1)]
MinP = Annotated[float, number(0, 1), Field(ge=0, le=1)]
Penalty = Annotated[float, number(-2, 2), Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, number(0, math.inf, above_low=True), Field(gt=0)]
TopK = Annotated[int, whole(-1), Field(ge=-1)]
Seed = Annotated[int, whole(-(2**63), 2**64 - 1)]
TokenCount = Annotated[int, whole(1), Field(ge=1)]
LogprobCount = Annotated[int, whole(0, MAX_LOGPROBS), Field(ge=0, le=MAX_LOGPROBS)]


def stop_strings(value: object) -> tuple[str, ...]:
    """One string or a list of them → all of them."""
    expected = f"a string or a list of up to {MAX_STOP_STRINGS} strings, none of them empty"
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ExpectationError(expected)
    stops = cast("list[object]", items)
    if len(stops) > MAX_STOP_STRINGS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ExpectationError(expected)
    strings = tuple(cast("list[str]", stops))
    if (length := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise ExpectationError(f"at most {MAX_STOP_CHARACTERS} characters in all, and there are {length}")
    return strings


def logit_biases(value: object) -> dict[int, float]:
    """`{"token id": bias}`: JSON keys are strings."""
    expected = "an object of token ids with numbers from -100 to 100"
    if not isinstance(value, Mapping):
        raise ExpectationError(expected)
    biases: dict[int, float] = {}
    for key, bias in cast("Mapping[object, object]", value).items():
        name = str(key)
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise ExpectationError(f"{expected}; {name[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ExpectationError(f"{expected}; the one for {name} is {bias!r}")
        biases[int(name)] = float(bias)
    return biases


def token_ids(value: object) -> tuple[int, ...]:
    """A list of token ids (their upper bound is the model's, checked by the server)."""
    if not isinstance(value, list | tuple):
        raise ExpectationError("a list of token ids")
    ids = cast("list[object]", value)
    for item in ids:
        if type(item) is not int or item < 0:
            raise ExpectationError(f"a list of token ids; {shown(item)} is not one")
    return tuple(cast("list[int]", ids))


class StreamOptions(RequestPart):
    """`stream_options`: what a stream carries besides the text."""

    include_usage: Flag = False
    """One last chunk with `choices: []` and the usage."""
    continuous_usage_stats: Flag = False
    """The usage so far on every chunk, as vLLM has it."""


class SamplingBody(RequestBody):
    """The part of a body that says how to sample, when to stop, and whether to stream."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, whole(0), Field(ge=0)] = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(logit_biases, json_schema_input_type=dict[str, float])] = (
        Field(default_factory=dict[int, float])
    )
    seed: Seed | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_strings, json_schema_input_type=str | list[str])] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(token_ids, json_schema_input_type=list[int])] = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True

    @model_validator(mode="after")
    def options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is given but stream is not true; set stream or leave stream_options out"
            raise RequestError(message, param="stream_options")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, or None when the request leaves it to the server."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens to report per position; None = no logprobs at all."""
        raise NotImplementedError
