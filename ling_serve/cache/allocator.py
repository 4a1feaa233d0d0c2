"""Free lists of block and slot ids, which know nothing of who holds an id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ling_serve.errors import InvariantViolated, LingServeError


class OutOfBlocks(LingServeError):
    """More blocks were asked for than are free."""


class OutOfSlots(LingServeError):
    """Every state slot is taken."""


class FreeList:
    """Hands out the ids 0 .. num_ids - 1, most recently freed first (its memory is the likeliest to be warm)."""

    noun: ClassVar[str]
    exhausted: ClassVar[type[LingServeError]]

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self._free = list(range(num_ids - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_ids)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` ids, or none at all and raise `exhausted`."""
        if count > len(self._free):
            raise self.exhausted(f"{count} {self.noun}s asked for, {len(self._free)} of {self.num_ids} are free")
        taken = [self._free.pop() for _ in range(count)]
        for one in taken:
            self._is_free[one] = 0
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back. Raises InvariantViolated on an id that is free already or never existed."""
        for one in ids:
            if not 0 <= one < self.num_ids:
                raise InvariantViolated(f"{self.noun} {one} was freed; there are {self.num_ids}, from 0")
            if self._is_free[one]:
                raise InvariantViolated(f"{self.noun} {one} was freed twice")
            self._is_free[one] = 1
            self._free.append(one)


class BlockAllocator(FreeList):
    """Blocks of MLA latents."""

    noun = "block"
    exhausted = OutOfBlocks


class SlotAllocator(FreeList):
    """Slots of KDA state."""

    noun = "slot"
    exhausted = OutOfSlots
