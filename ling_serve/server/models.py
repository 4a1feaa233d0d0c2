"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter

from ling_serve.protocol.models import ModelCard, ModelList
from ling_serve.server.service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", summary="List the served names")
    async def list_models() -> ModelList:  # pyright: ignore[reportUnusedFunction]
        return ModelList(data=[_card(service, name) for name in service.model_names])

    @router.get("/v1/models/{model:path}", summary="Show one served name")
    async def show_model(model: str) -> ModelCard:  # pyright: ignore[reportUnusedFunction]
        service.check_model(model)
        return _card(service, model)

    return router


def _card(service: Service, name: str) -> ModelCard:
    info = service.engine.engine_info
    return ModelCard(
        id=name,
        created=service.created,
        root=service.checkpoint,
        max_model_len=None if info is None else info.max_model_len,
    )
