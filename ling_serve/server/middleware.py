"""What surrounds every request: its id, one log line, the API key, and an OpenAI error body whatever happens."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ling_serve.errors import AuthenticationError, LingServeError
from ling_serve.server.generation import ClientDisconnected
from ling_serve.server.responses import error_response

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
OPEN_PATHS = frozenset({"/health"})


class RequestScope:
    """Outermost: names the request, logs its end in one line, and answers what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        started = time.monotonic()
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        line = f"{scope['method']} {scope['path']!r}"
        try:
            await self._app(scope, receive, send_named)
        except (ClientDisconnected, ClientDisconnect) as gone:
            when = str(gone) or "while sending the request"
            log.info("%s client disconnected %s, %.3f s, %s", line, when, time.monotonic() - started, request_id)
            return
        except asyncio.CancelledError:  # only the end of the server does that, to clients that have stopped reading
            log.info("%s cut off, %.3f s, %s", line, time.monotonic() - started, request_id)
            return
        except Exception:
            log.exception("%s failed, %s", line, request_id)
            if status is None:
                answer = error_response(LingServeError("internal error; the server's log has it under this request id"))
                await answer(scope, receive, send_named)
        quiet = scope["path"] in OPEN_PATHS
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s, %.3f s, %s",
            line,
            status,
            time.monotonic() - started,
            request_id,
        )


class ApiKey:
    """Lets through only who knows the key; `/health` is open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                said = "no API key was given" if not given else "the API key is wrong"
                error = AuthenticationError(f"{said}; expected the header Authorization: Bearer KEY")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
