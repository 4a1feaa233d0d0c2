"""Which blocks hold which sequence's latents, in token order."""

from __future__ import annotations

from ling_serve.cache.allocator import BlockAllocator


class PageTable:
    """Sequence id → block ids. Token t of a sequence lies in its block t // block_size, row t % block_size."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.block_size = block_size
        self._allocator = allocator
        self._blocks: dict[str, list[int]] = {}

    def missing(self, seq_id: str, num_tokens: int) -> int:
        """Blocks that `ensure` would have to allocate."""
        return max(0, -(-num_tokens // self.block_size) - len(self._blocks.get(seq_id, ())))

    def ensure(self, seq_id: str, num_tokens: int) -> None:
        """Make room for the sequence's first `num_tokens` tokens. Raises OutOfBlocks, and then changes nothing."""
        new = self._allocator.allocate(self.missing(seq_id, num_tokens))
        self._blocks.setdefault(seq_id, []).extend(new)

    def blocks(self, seq_id: str) -> list[int]:
        return self._blocks.get(seq_id, [])

    def detach(self, seq_id: str) -> list[int]:
        """Forget the sequence and hand its blocks, still allocated, to the caller."""
        return self._blocks.pop(seq_id, [])

    def release(self, seq_id: str) -> None:
        """Forget the sequence and free its blocks."""
        self._allocator.free(self.detach(seq_id))

    @property
    def num_owned(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())
