"""`POST /v1/chat/completions`: the request, the answer and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ling_serve.errors import RequestError, UnsupportedParameter
from ling_serve.protocol.base import ExpectationError, Refusal, RequestPart, WireModel, shown
from ling_serve.protocol.fields import IGNORED, REFUSED_IN_CHAT
from ling_serve.protocol.sampling import Flag, LogprobCount, SamplingBody, TokenCount
from ling_serve.protocol.usage import FinishReason, Usage

Role = Literal["system", "user", "assistant", "tool"]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_NO_TEXT = frozenset({"image_url", "input_image", "image", "input_audio", "audio", "video_url", "video", "file"})


def _role(value: object) -> object:
    if value not in _ROLES:
        raise ExpectationError(f"one of {', '.join(_ROLES)}")
    return "system" if value == "developer" else value


def joined_text(value: object) -> str:
    """A message's content, a string or a list of text parts, as one text; the parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ExpectationError("a string or a list of text parts")
    return "\n".join(_text_of_part(part) for part in cast("list[object]", value))


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[str, object]", part if isinstance(part, Mapping) else {})
    given = fields.get("type")
    kind = given if isinstance(given, str) else ""
    if kind in _NO_TEXT:
        raise UnsupportedParameter(
            f"a message holds a part of type {kind!r}; the model reads text only", param="messages"
        )
    text = fields.get(_TEXT_FIELDS[kind]) if kind in _TEXT_FIELDS else None
    if not isinstance(text, str):
        raise ExpectationError('a string or a list of parts {"type": "text", "text": "…"}')
    return text


class TextPart(RequestPart):
    """One part of a message's content."""

    type: Literal["text"] = "text"
    text: str


class FunctionCall(RequestPart):
    name: str
    arguments: str | dict[str, Any] = ""
    """JSON text as the API sends it; an object is taken too."""


class ToolCall(RequestPart):
    """A call the assistant made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(RequestPart):
    """One message of the conversation so far; `developer` reads as `system`."""

    role: Annotated[Role, BeforeValidator(_role)]
    content: Annotated[str | None, BeforeValidator(joined_text, json_schema_input_type=str | list[TextPart] | None)] = (
        None
    )
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def needs_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message of role {self.role} has no content; expected a string", param="messages")
        return self


def _messages(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise ExpectationError("a list of at least one message")
    return cast("object", value)


class ChatCompletionRequest(SamplingBody):
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_CHAT
    ignored: ClassVar[frozenset[str]] = IGNORED

    messages: Annotated[tuple[ChatMessage, ...], BeforeValidator(_messages)]
    max_completion_tokens: TokenCount | None = None
    logprobs: Flag = False
    top_logprobs: LogprobCount | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    add_generation_prompt: Flag = True
    """False = the prompt ends after the last message."""
    continue_final_message: Flag = False
    """The answer goes on where the last message's text ends."""
    add_special_tokens: Flag = False

    @model_validator(mode="after")
    def fields_agree(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; "
                "they mean the same, send one of them",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs} but logprobs is not true; set logprobs", param="top_logprobs"
            )
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt are both true; set one of them",
                    param="continue_final_message",
                )
            if not self.messages[-1].content:
                raise RequestError(
                    f"continue_final_message is true but the last message's content is "
                    f"{shown(self.messages[-1].content)}; there is nothing to go on from",
                    param="continue_final_message",
                )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(WireModel):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(WireModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class AnswerMessage(WireModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None


class ChatChoice(WireModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(WireModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class Delta(WireModel):
    """What a chunk adds: the first one the role, the others text. Absent fields are left out of the JSON."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def leave_out_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class ChatChunkChoice(WireModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(WireModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
