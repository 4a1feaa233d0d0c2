"""`GET /v1/models`, `GET /health` and the error body."""

from __future__ import annotations

from typing import Literal

from ling_serve.protocol.base import WireModel


class ModelCard(WireModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ling-serve"
    root: str
    """The checkpoint behind the name."""
    parent: None = None
    max_model_len: int | None
    """Longest prompt plus completion in tokens; None while the model loads."""


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(WireModel):
    status: Literal["ok", "loading", "dead", "stopping"]
    detail: str | None = None


class ErrorDetail(WireModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(WireModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
