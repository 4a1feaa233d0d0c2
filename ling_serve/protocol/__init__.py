"""The wire format of the HTTP API, shared by the server and its clients. Loads neither MLX nor a web framework."""

from ling_serve.protocol.base import RequestBody, WireModel, parse_body
from ling_serve.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest, ChatMessage
from ling_serve.protocol.completions import Completion, CompletionRequest
from ling_serve.protocol.models import ErrorBody, Health, ModelCard, ModelList
from ling_serve.protocol.usage import Usage

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "ErrorBody",
    "Health",
    "ModelCard",
    "ModelList",
    "RequestBody",
    "Usage",
    "WireModel",
    "parse_body",
]
