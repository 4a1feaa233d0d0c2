"""Drives a model step by step over scattered pages and slots, as the engine would, and keeps every token's logits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from ling_serve.cache.caches import Caches
from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig
from ling_serve.model.forward_batch import SHORT_PIECE, ForwardBatch

BLOCK_SIZE = 16


class PackedRun:
    """Sequences that advance together. Blocks are handed out in a shuffled order, and so are slots."""

    def __init__(
        self,
        model: BailingV3,
        config: ModelConfig,
        dtype: mx.Dtype = mx.float32,
        *,
        num_blocks: int = 96,
        num_slots: int = 8,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.caches = Caches.allocate(
            config.cache_layout(dtype), num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=num_slots
        )
        shuffled = random.Random(seed)
        self._free_blocks = shuffled.sample(range(num_blocks), num_blocks)
        self._free_slots = shuffled.sample(range(num_slots), num_slots)
        self._blocks: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def step(self, pieces: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Append each sequence's tokens → its logits [tokens, vocab] float32."""
        order = sorted(pieces, key=lambda name: len(pieces[name]))
        batch = self.batch([(name, pieces[name]) for name in order])
        logits = self.model.logits(self.model(batch, self.caches)).astype(mx.float32)
        mx.eval(logits, self.caches.arrays())
        values = np.array(logits)
        bounds = zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        return {name: values[start:end] for name, (start, end) in zip(order, bounds, strict=True)}

    def feed(self, tokens: Mapping[str, Sequence[int]], chunk: int) -> dict[str, np.ndarray]:
        """Append all tokens, at most `chunk` of each sequence a step."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in tokens}
        for start in range(0, max(map(len, tokens.values())), chunk):
            pieces = {name: all_[start : start + chunk] for name, all_ in tokens.items() if start < len(all_)}
            for name, logits in self.step(pieces).items():
                parts[name].append(logits)
        return {name: np.concatenate(logits) for name, logits in parts.items()}

    def batch(self, pieces: Sequence[tuple[str, Sequence[int]]]) -> ForwardBatch:
        """Arrays for these pieces, in this order; takes the blocks and slots they need."""
        tokens: list[int] = []
        positions: list[int] = []
        write_at: list[int] = []
        cu_seqlens, read_slots, tables = [0], [], []
        for name, new in pieces:
            start = self.lengths.get(name, 0)
            blocks = self._blocks.setdefault(name, [])
            read_slots.append(self._slots.get(name, self.caches.states.zero_slot))
            if name not in self._slots:
                self._slots[name] = self._free_slots.pop()
            self.lengths[name] = start + len(new)
            while len(blocks) * BLOCK_SIZE < start + len(new):
                blocks.append(self._free_blocks.pop())
            tokens += new
            positions += range(start, start + len(new))
            write_at += [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions[cu_seqlens[-1] :]]
            cu_seqlens.append(len(tokens))
            tables.append(blocks)
        width = max(map(len, tables))
        scratch = self.caches.latents.scratch_block
        return ForwardBatch(
            tokens=mx.array(tokens, dtype=mx.int32),
            positions=mx.array(positions, dtype=mx.int32),
            cu_seqlens=tuple(cu_seqlens),
            num_short=sum(len(new) <= SHORT_PIECE for _, new in pieces),
            page_table=mx.array([row + [scratch] * (width - len(row)) for row in tables], dtype=mx.int32),
            context_lens=tuple(self.lengths[name] for name, _ in pieces),
            write_at=mx.array(write_at, dtype=mx.int32),
            read_slots=tuple(read_slots),
            write_slots=tuple(self._slots[name] for name, _ in pieces),
            logit_rows=mx.array(cu_seqlens[1:], dtype=mx.int32) - 1,
        )

    def poison(self, value: float) -> None:
        """Fill every latent block that no sequence owns."""
        owned = {block for blocks in self._blocks.values() for block in blocks}
        unowned = [block for block in range(self.caches.latents.num_blocks) if block not in owned]
        for pool in self.caches.latents.arrays():
            pool[mx.array(unowned)] = value
