"""Shows how far the weights are: a bar on a terminal, elsewhere a plain line now and then and one at the end."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ling_serve.cache.budget import show_bytes

log = logging.getLogger(__name__)
_LINE_EVERY_S = 5.0


class LoadingProgress:
    """Called with the bytes read so far and in all. `close` takes the bar away."""

    def __init__(self, console: Console) -> None:
        self._bar = (
            Progress(
                TextColumn("loading weights"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._task: TaskID | None = None
        self._next_line = time.monotonic() + _LINE_EVERY_S

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is not None:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task("loading weights", total=total_bytes)
            self._bar.update(self._task, completed=done_bytes)
            return
        if done_bytes >= total_bytes or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            log.info("loading weights: %d %% of %s", 100 * done_bytes // max(total_bytes, 1), show_bytes(total_bytes))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
