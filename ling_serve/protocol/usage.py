"""What an answer cost, and why it ended."""

from __future__ import annotations

from typing import Literal

from ling_serve.protocol.base import WireModel

FinishReason = Literal["stop", "length"]


class Usage(WireModel):
    """Token counts; an end-of-sequence token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
