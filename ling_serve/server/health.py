"""`GET /health`: 200 when a request would be served, 503 with the reason otherwise."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ling_serve.protocol.models import Health
from ling_serve.server.responses import json_response
from ling_serve.server.service import Service


def health_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether requests are served", response_model=Health)
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        body = health_of(service)
        return json_response(body, 200 if body.status == "ok" else 503)

    return router


def health_of(service: Service) -> Health:
    """The state in one word; the detail never holds more than the kind of failure (the log has the rest)."""
    if service.live.closed:
        return Health(status="stopping", detail="the server is shutting down")
    match service.engine.state:
        case "ready":
            return Health(status="ok")
        case "loading":
            return Health(status="loading", detail="the model is still loading")
        case "dead":
            return Health(status="dead", detail=f"the engine died: {type(service.engine.error).__name__}")
        case _:
            return Health(status="stopping", detail="the engine has stopped")
