"""A batch of ids as the arrays a forward pass reads."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ling_serve.cache import Caches, SequenceMemory
from ling_serve.engine.batch import Batch, Piece
from ling_serve.engine.sequence import Sequence
from ling_serve.model.forward_batch import SHORT_PIECE, ForwardBatch


def in_forward_order(batch: Batch) -> list[Piece]:
    """One-token pieces, then short ones, then long ones; as they come within each kind."""
    return sorted(batch.pieces, key=lambda piece: (piece.length > 1) + (piece.length > SHORT_PIECE))


def pack(
    pieces: list[Piece], sequences: Mapping[str, Sequence], memory: SequenceMemory, caches: Caches
) -> ForwardBatch:
    """Lay out `pieces`, which are in forward order. The page table is as wide as the longest context needs."""
    block_size = memory.block_size
    tokens, positions, write_at = list[int](), list[int](), list[int]()
    cu_seqlens, logit_rows = [0], list[int]()
    tables = list[list[int]]()
    for piece in pieces:
        span = range(piece.start, piece.end)
        blocks = memory.blocks(piece.seq_id)[: -(-piece.end // block_size)]
        tokens += sequences[piece.seq_id].tokens[piece.start : piece.end]
        positions += span
        write_at += [blocks[t // block_size] * block_size + t % block_size for t in span]
        cu_seqlens.append(len(tokens))
        tables.append(blocks)
        if piece.samples:
            logit_rows.append(len(tokens) - 1)
    width = max(len(blocks) for blocks in tables)
    scratch = caches.latents.scratch_block
    slots = tuple(memory.slot(piece.seq_id) for piece in pieces)
    return ForwardBatch(
        tokens=mx.array(tokens, dtype=mx.int32),
        positions=mx.array(positions, dtype=mx.int32),
        cu_seqlens=tuple(cu_seqlens),
        num_short=sum(piece.length <= SHORT_PIECE for piece in pieces),
        page_table=mx.array([blocks + [scratch] * (width - len(blocks)) for blocks in tables], dtype=mx.int32),
        context_lens=tuple(piece.end for piece in pieces),
        write_at=mx.array(write_at, dtype=mx.int32),
        read_slots=tuple(
            caches.states.zero_slot if piece.start == 0 else slot for piece, slot in zip(pieces, slots, strict=True)
        ),
        write_slots=slots,
        logit_rows=mx.array(logit_rows, dtype=mx.int32),
    )
