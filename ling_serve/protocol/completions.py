"""`POST /v1/completions`: the request, the answer and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, cast

from pydantic import BeforeValidator

from ling_serve.protocol.base import ExpectationError, Refusal, WireModel
from ling_serve.protocol.fields import IGNORED, REFUSED_IN_COMPLETIONS
from ling_serve.protocol.sampling import Flag, LogprobCount, SamplingBody
from ling_serve.protocol.usage import FinishReason, Usage

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids."""


def prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists → the prompts, in order."""
    if isinstance(value, str):
        return (value,)
    expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if not isinstance(value, list | tuple) or not value:
        raise ExpectationError(f"{expected}, none of them empty")
    items = cast("Sequence[object]", value)
    if all(isinstance(item, str) for item in items):
        return tuple(cast("Sequence[str]", items))
    if all(_is_id(item) for item in items):
        return (tuple(cast("Sequence[int]", items)),)
    if all(isinstance(item, list | tuple) for item in items):
        lists = cast("Sequence[Sequence[object]]", items)
        if all(ids and all(_is_id(item) for item in ids) for ids in lists):
            return tuple(tuple(cast("Sequence[int]", ids)) for ids in lists)
    raise ExpectationError(f"{expected}, none of them empty")


def _is_id(item: object) -> bool:
    return type(item) is int and item >= 0


class CompletionRequest(SamplingBody):
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_COMPLETIONS
    ignored: ClassVar[frozenset[str]] = IGNORED

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    """Every prompt gets its own choice, in order."""
    logprobs: LogprobCount | None = None
    add_special_tokens: Flag = True

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class CompletionLogprobs(WireModel):
    """One entry per token; `text_offset` counts characters from the start of the completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(WireModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(WireModel):
    """The whole answer, or (with partial texts) one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
