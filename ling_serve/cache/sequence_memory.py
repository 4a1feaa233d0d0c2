"""Everything a sequence holds in the caches, taken and given back together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ling_serve.cache.allocator import BlockAllocator, SlotAllocator
from ling_serve.cache.page_table import PageTable
from ling_serve.errors import InvariantViolated


class ReleaseLedger:
    """Puts off releases until no launched step names their owner any more.

    Steps are collected in the order in which they were launched.
    """

    def __init__(self) -> None:
        self._launched = 0
        self._collected = 0
        self._last_step: dict[str, int] = {}
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def launch(self, owners: Iterable[str]) -> None:
        """A step that names these owners was launched."""
        self._launched += 1
        for owner in owners:
            self._last_step[owner] = self._launched

    def collect(self) -> None:
        """The oldest launched step is over: run the releases that waited for it."""
        self._collected += 1
        due = [free for step, free in self._waiting if step <= self._collected]
        self._waiting = [(step, free) for step, free in self._waiting if step > self._collected]
        for free in due:
            free()

    def release(self, owner: str, free: Callable[[], None]) -> None:
        """Run `free` once every step launched so far that names `owner` has been collected: possibly now."""
        last = self._last_step.pop(owner, 0)
        if last <= self._collected:
            free()
        else:
            self._waiting.append((last, free))


class SequenceMemory:
    """Blocks and one state slot per sequence.

    Before anyone else can have them, `on_slot_freed` gets each slot that is free again, and `clear_blocks` blocks in
    which there may be numbers that are not finite.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        on_slot_freed: Callable[[int], None] = lambda slot: None,
        clear_blocks: Callable[[list[int]], None] = lambda blocks: None,
    ) -> None:
        self._blocks = BlockAllocator(num_blocks)
        self._slots = SlotAllocator(num_slots)
        self._table = PageTable(self._blocks, block_size)
        self._slot_of: dict[str, int] = {}
        self._on_slot_freed = on_slot_freed
        self._clear_blocks = clear_blocks
        self.ledger = ReleaseLedger()
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_ids

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_slots(self) -> int:
        return self._slots.num_ids

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    def fits(self, seq_id: str, num_tokens: int) -> bool:
        """Whether the sequence's first `num_tokens` tokens have room, or get it from what is free."""
        needs_slot = seq_id not in self._slot_of
        return self._table.missing(seq_id, num_tokens) <= self.num_free_blocks and self.num_free_slots >= needs_slot

    def hold(self, seq_id: str, num_tokens: int) -> None:
        """Give the sequence a slot, if it has none, and room for its first `num_tokens` tokens."""
        self._table.ensure(seq_id, num_tokens)
        if seq_id not in self._slot_of:
            [self._slot_of[seq_id]] = self._slots.allocate()

    def blocks(self, seq_id: str) -> list[int]:
        return self._table.blocks(seq_id)

    def slot(self, seq_id: str) -> int:
        return self._slot_of[seq_id]

    def release(self, seq_id: str, *, clear: bool = False) -> None:
        """Take everything back from the sequence, as soon as the ledger allows.

        `clear` empties its blocks: attention weighs the unused rows of a block by 0, and 0 · NaN is NaN.
        """
        blocks = self._table.detach(seq_id)
        slot = self._slot_of.pop(seq_id, None)
        self.ledger.release(seq_id, lambda: self._free(blocks, slot, clear))

    def audit(self) -> None:
        """Raises InvariantViolated unless free + owned = all, for blocks and for slots. For times without a step."""
        owned_blocks, owned_slots = self._table.num_owned, len(self._slot_of)
        if (
            self.num_free_blocks + owned_blocks != self.num_blocks
            or self.num_free_slots + owned_slots != self.num_slots
        ):
            raise InvariantViolated(
                f"blocks: {self.num_free_blocks} free + {owned_blocks} owned of {self.num_blocks}; "
                f"slots: {self.num_free_slots} free + {owned_slots} owned of {self.num_slots}; "
                f"{self.ledger.num_waiting} releases wait for a step"
            )

    def _free(self, blocks: list[int], slot: int | None, clear: bool) -> None:
        if clear and blocks:
            self._clear_blocks(blocks)
        self._blocks.free(blocks)
        if slot is not None:
            self._on_slot_freed(slot)
            self._slots.free([slot])
