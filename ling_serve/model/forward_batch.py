"""The arrays one forward pass reads: N tokens of R pieces, packed without padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

SHORT_PIECE = 8
"""Longest piece, in tokens, that the step kernels take: decode (1) and speculative verification (2 to 8)."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step's pieces, ordered: one-token pieces first, then the other short ones, then the long ones.

    Host tuples are the structure (loops, slices, choices); arrays are what layers compute with.
    """

    tokens: mx.array
    """[N] int32 token ids."""
    positions: mx.array
    """[N] int32 position of each token in its sequence."""
    cu_seqlens: tuple[int, ...]
    """[R + 1] piece r holds rows cu_seqlens[r] : cu_seqlens[r + 1]."""
    num_short: int
    """Pieces 0 : num_short have at most SHORT_PIECE tokens, the others more."""
    page_table: mx.array
    """[R, max_blocks] int32 block ids of each piece's sequence; entries past its context name the scratch block."""
    context_lens: tuple[int, ...]
    """[R] tokens of the sequence in cache once this step has written = first position + piece length."""
    write_at: mx.array
    """[N] int32 latent row of each token: block * block_size + offset."""
    read_slots: tuple[int, ...]
    """[R] state slot to start from; the zero slot for a fresh sequence. May repeat."""
    write_slots: tuple[int, ...]
    """[R] state slot to leave the new state in; the scratch slot to drop it. Unique, the scratch slot apart."""
    logit_rows: mx.array
    """[L] int32 rows whose hidden states go to the head."""

    @property
    def num_pieces(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def num_single(self) -> int:
        """Leading pieces of exactly one token."""
        return sum(1 for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False) if b - a == 1)
