"""A request's body: read within the limit, and decoded."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic_core import from_json

from ling_serve.errors import BodyTooLarge, RequestError, UnsupportedMediaType

_DISCARDED_FACTOR = 4


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes of the body. Raises `UnsupportedMediaType` and `BodyTooLarge`."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"Content-Type is {kind!r}; expected application/json")
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        # A client reads the answer only once it has sent everything, so a little too much is read and dropped.
        if size > limit * _DISCARDED_FACTOR:
            break
        if size <= limit:
            body += piece
    if size > limit:
        raise BodyTooLarge(f"the body has more than {limit} bytes; send a shorter prompt")
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """The JSON value in `body`. Raises `RequestError` saying where it is broken."""
    if not body.strip():
        raise RequestError("the body is empty; expected a JSON object")
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
