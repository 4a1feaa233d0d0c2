"""From the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")


class Bridge:
    """Carries items into queues of the event loop, with one wake-up for all that arrive before it looks.

    A wake-up is a system call that lets go of the interpreter lock: one for each token would make the engine wait for
    the loop, and that as often as there are streams.
    """

    def __init__(self) -> None:
        self._arrived: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def into(self, queue: asyncio.Queue[Item]) -> Callable[[Item], None]:
        """A function that any thread may call to put an item into `queue`. Call this on the queue's event loop."""
        loop = asyncio.get_running_loop()

        def put(item: Item) -> None:
            self._arrived.append(lambda: queue.put_nowait(item))
            if not self._is_scheduled:
                self._is_scheduled = True
                with suppress(RuntimeError):  # the loop has closed: nobody reads any more
                    loop.call_soon_threadsafe(self._drain)

        return put

    def _drain(self) -> None:
        # First the flag: what arrives from now on either is seen below or schedules a drain of its own.
        self._is_scheduled = False
        while self._arrived:
            self._arrived.popleft()()
