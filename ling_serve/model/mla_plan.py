"""What the MLA layers of one forward pass share: rotary turns, and which pieces attend in which form and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ling_serve.model.config import ModelConfig
from ling_serve.model.forward_batch import SHORT_PIECE, ForwardBatch
from ling_serve.model.rope import RotaryTurns

ONE_BUCKET_TOKENS = 512
"""Contexts of up to this many tokens are padded to each other; longer ones at most to twice their length."""
GATHER_TOKENS = 32768
"""Latents one gather may hold, padding included, unless a single sequence is longer."""
TILE_SCORES = 1 << 20
"""Attention scores a tile may hold (4 MiB): larger ones leave the processor's cache."""
LEAST_TILE_ROWS = 16
EXPANDED_VALUES = 1 << 26
"""Numbers that expanded keys and values may take at a time (256 MiB), unless a single head needs more."""


def prefers_absorbed(config: ModelConfig, piece_len: int, context_len: int) -> bool:
    """Whether attention over latents takes fewer operations than over expanded keys and values.

    Multiply-adds per head, for T tokens over a context of L, with latent width c, rotary width p, key width n and value
    width v:
        absorbed      T·c·(n + v)  (into and out of latent space)  +  T·L·(2c + p)
        materialised  L·c·(n + v)  (every latent expanded)         +  T·L·(n + p + v)
    Short pieces are always absorbed: those of many sequences then attend together.
    """
    if piece_len <= SHORT_PIECE:
        return True
    c, p, n, v = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    pairs = piece_len * context_len
    absorbed = piece_len * c * (n + v) + pairs * (2 * c + p)
    materialised = context_len * c * (n + v) + pairs * (n + p + v)
    return absorbed < materialised


@dataclass(frozen=True)
class AbsorbedGroup:
    """T tokens of each of r pieces that attend together in latent space."""

    rows: slice | mx.array
    """The r·T rows of the batch, piece after piece."""
    page_ids: mx.array
    """[r, b] int32."""
    bias: mx.array
    """[r, T, b · block_size] float32: 0 up to each token's own position, -inf after it."""


@dataclass(frozen=True)
class MaterialisedPiece:
    """One piece whose whole context is expanded into keys and values."""

    rows: slice
    page_ids: mx.array | None
    """[1, b] int32; None = the piece is its whole context, and its latents are at hand."""
    context_len: int
    tile_heads: int
    """Heads expanded at a time."""
    tile_rows: int
    """Query rows attended to at a time."""
    bias: mx.array
    """[tile_rows, context_len] float32: the causal mask of `tile_rows` rows that end the context."""


@dataclass(frozen=True)
class MlaPlan:
    """Made once per forward pass, read by every MLA layer."""

    turns: mx.array
    """[N, 1, rope / 2] complex64, of every token's position."""
    absorbed: tuple[AbsorbedGroup, ...]
    materialised: tuple[MaterialisedPiece, ...]
    back: mx.array | None
    """[N] int32: where each row of the batch lies in the parts' results, end to end; None = they are in order."""


def plan_mla(config: ModelConfig, batch: ForwardBatch, block_size: int, turns_of: RotaryTurns) -> MlaPlan:
    """Split the pieces of `batch` between the two forms, and the absorbed ones into groups of similar length."""
    lengths = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    pages = [-(-context // block_size) for context in batch.context_lens]
    short: dict[tuple[int, int], list[int]] = {}
    long: list[int] = []
    for piece, (length, context) in enumerate(zip(lengths, batch.context_lens, strict=True)):
        if prefers_absorbed(config, length, context):
            short.setdefault((length, _bucket(pages[piece], block_size)), []).append(piece)
        else:
            long.append(piece)

    row_order: list[int] = []
    absorbed: list[AbsorbedGroup] = []
    for (_, bucket), pieces in short.items():
        for some in _split(pieces, max(1, GATHER_TOKENS // (bucket * block_size))):
            num_pages = max(pages[piece] for piece in some)
            rows = [row for piece in some for row in range(batch.cu_seqlens[piece], batch.cu_seqlens[piece + 1])]
            row_order += rows
            absorbed.append(_absorbed_group(batch, some, rows, num_pages, block_size))
    materialised: list[MaterialisedPiece] = []
    for piece in long:
        row_order += range(batch.cu_seqlens[piece], batch.cu_seqlens[piece + 1])
        materialised.append(_materialised_piece(config, batch, piece, pages[piece]))
    return MlaPlan(turns_of(batch.positions), tuple(absorbed), tuple(materialised), _inverse(row_order))


def _absorbed_group(
    batch: ForwardBatch, pieces: Sequence[int], rows: Sequence[int], num_pages: int, block_size: int
) -> AbsorbedGroup:
    selected = _selection(rows)
    page_ids = batch.page_table[_selection(pieces), :num_pages]
    positions = batch.positions[selected].reshape(len(pieces), -1, 1)
    visible = mx.arange(num_pages * block_size) <= positions
    return AbsorbedGroup(selected, page_ids, mx.where(visible, 0.0, -mx.inf))


def _materialised_piece(config: ModelConfig, batch: ForwardBatch, piece: int, num_pages: int) -> MaterialisedPiece:
    start, end = batch.cu_seqlens[piece], batch.cu_seqlens[piece + 1]
    context = batch.context_lens[piece]
    expanded = context * (config.qk_head_dim + config.v_head_dim)
    tile_heads = min(max(1, EXPANDED_VALUES // expanded), config.num_attention_heads)
    tile_rows = min(max(TILE_SCORES // (tile_heads * context), LEAST_TILE_ROWS), end - start)
    last_visible = mx.arange(context - tile_rows, context)[:, None]
    return MaterialisedPiece(
        rows=slice(start, end),
        page_ids=None if context == end - start else batch.page_table[piece : piece + 1, :num_pages],
        context_len=context,
        tile_heads=tile_heads,
        tile_rows=tile_rows,
        bias=mx.where(mx.arange(context) <= last_visible, 0.0, -mx.inf),
    )


def _bucket(pages: int, block_size: int) -> int:
    """The power of two at or above `pages`; the least is that of ONE_BUCKET_TOKENS."""
    return 1 << (max(pages, ONE_BUCKET_TOKENS // block_size) - 1).bit_length()


def _split(pieces: Sequence[int], size: int) -> list[Sequence[int]]:
    return [pieces[first : first + size] for first in range(0, len(pieces), size)]


def _selection(rows: Sequence[int]) -> slice | mx.array:
    """Consecutive rows as a slice, any others as indices."""
    first, count = rows[0], len(rows)
    if rows[-1] - first == count - 1 and list(rows) == list(range(first, first + count)):
        return slice(first, first + count)
    return mx.array(list(rows), dtype=mx.int32)


def _inverse(order: Sequence[int]) -> mx.array | None:
    """The permutation that undoes `order`, or None for the identity."""
    if all(row == place for place, row in enumerate(order)):
        return None
    back = [0] * len(order)
    for place, row in enumerate(order):
        back[row] = place
    return mx.array(back, dtype=mx.int32)
