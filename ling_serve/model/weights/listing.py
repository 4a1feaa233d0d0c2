"""Names in error messages: enough to see the pattern, never thousands of them."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 10


def listing(items: Sequence[str], separator: str = ", ") -> str:
    """The first ten items and how many more there are: `a, b, ... and 12 more (22 in all)`."""
    text = separator.join(items[:SHOWN])
    if len(items) > SHOWN:
        text += f"{separator}... and {len(items) - SHOWN} more ({len(items)} in all)"
    return text
