"""Answers as JSON, errors included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import Response
from fastapi.responses import JSONResponse

from ling_serve.engine.request import FinishReason
from ling_serve.errors import AuthenticationError, LingServeError, QueueFull
from ling_serve.protocol.base import WireModel


def json_response(body: WireModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")


def error_response(error: LingServeError, headers: Mapping[str, str] | None = None) -> Response:
    """OpenAI's error body with the error's status and the headers that go with it."""
    extra = dict(headers or {})
    if isinstance(error, QueueFull):
        extra["retry-after"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationError):
        extra["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=extra)


def wire_finish(finish: FinishReason | None) -> Literal["stop", "length"]:
    """Why an answer ended, in the API's words. Raises `LingServeError` for an answer that has not."""
    if finish is None or finish is FinishReason.ABORT:
        raise LingServeError(f"an answer ended with finish reason {finish}")
    return finish.value
