"""ling-serve: an MLX inference server for Ling-3.0 (Bailing V3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ling_serve._version import __version__

if TYPE_CHECKING:
    from ling_serve.engine.request import SamplingParams as SamplingParams
    from ling_serve.llm import LLM as LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from ling_serve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from ling_serve.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
