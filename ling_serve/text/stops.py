"""Stop strings in text that comes in pieces.

The text ends at the first moment at which some stop string is complete, however the text was cut into pieces. Of
several that are complete at that same moment the longest counts, that is, the one that starts furthest to the left.
A stop string that starts earlier but would be complete later does not win: the text has ended before it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    text: str
    """Text that is certain to belong to the answer."""
    matched: str | None
    """The stop string that ended it; nothing comes after."""


@dataclass
class _Node:
    """A prefix of some stop strings (Aho–Corasick)."""

    depth: int
    children: dict[str, _Node]
    fallback: _Node | None = None
    """The longest proper suffix of this prefix that is itself a prefix of a stop string; None at the root."""
    stop: str | None = None
    """The longest stop string that ends here."""


class StopMatcher:
    """Passes text on, except what might still become a stop string."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` keeps the matched stop string in the text. Raises `ValueError` for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._root = _build(stops)
        self._node = self._root
        self._include = include
        self._held = ""
        self._matched: str | None = None

    @property
    def held(self) -> str:
        """Text kept back: the longest end of the text so far that begins a stop string."""
        return self._held

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> StopResult:
        """The next piece of text, without any end of it that might begin a stop string."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._root.children:
            return StopResult(text, None)
        pending = self._held + text
        node = self._node
        for at, character in enumerate(text, start=len(self._held) + 1):
            node = _advance(node, character)
            if node.stop is not None:
                self._matched, self._held, self._node = node.stop, "", self._root
                return StopResult(pending[: at if self._include else at - len(node.stop)], node.stop)
        self._node = node
        certain = len(pending) - node.depth
        self._held = pending[certain:]
        return StopResult(pending[:certain], None)

    def flush(self) -> str:
        """The text kept back: it ended before it could become a stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _advance(node: _Node, character: str) -> _Node:
    at: _Node | None = node
    while at is not None:
        child = at.children.get(character)
        if child is not None:
            return child
        node, at = at, at.fallback
    return node


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0, {})
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1, {}))
        node.stop = stop
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for character, child in node.children.items():
            child.fallback = root if node.fallback is None else _advance(node.fallback, character)
            child.stop = child.stop or child.fallback.stop
            waiting.append(child)
    return root
