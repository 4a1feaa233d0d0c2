"""What one step computes, in ids only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens start : start + length of a sequence."""

    seq_id: str
    start: int
    length: int
    samples: bool
    """The piece ends with the sequence's newest token: its last row yields the next one."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Batch:
    """The pieces of one step, at most one of each sequence; decoding sequences first."""

    pieces: tuple[Piece, ...]
