"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ling_serve._version import __version__
from ling_serve.errors import LingServeError, MethodNotAllowed, RequestError, UnknownRoute
from ling_serve.server.chat import chat_router
from ling_serve.server.completions import completions_router
from ling_serve.server.health import health_router
from ling_serve.server.middleware import ApiKey, RequestScope
from ling_serve.server.models import models_router
from ling_serve.server.responses import error_response
from ling_serve.server.service import Service


def create_app(service: Service) -> FastAPI:
    """An ASGI application that serves `service`. Every error is an OpenAI error body."""
    app = FastAPI(title="ling-serve", version=__version__, redirect_slashes=False, redoc_url=None)
    for router in (health_router, models_router, chat_router, completions_router):
        app.include_router(router(service))
    app.add_exception_handler(LingServeError, _project_error)
    app.add_exception_handler(HTTPException, _http_error)
    if service.api_key is not None:
        app.add_middleware(ApiKey, key=service.api_key)
    app.add_middleware(RequestScope)
    return app


async def _project_error(_: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, LingServeError) else LingServeError(str(error)))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    where = f"{request.method} {request.url.path}"
    if status == 404:
        return error_response(UnknownRoute(f"there is no {where}; GET /openapi.json lists what there is"))
    if status == 405:
        allowed = (headers or {}).get("Allow", "another method")
        return error_response(MethodNotAllowed(f"there is no {where}; expected {allowed}"), headers)
    return error_response(RequestError(f"{where} was refused with status {status}"), headers)
