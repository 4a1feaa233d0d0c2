"""uvicorn, with the endings that a server of long streams needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI

from ling_serve.errors import ConfigError, LingServeError, ShuttingDown
from ling_serve.server.service import LiveGenerations

log = logging.getLogger(__name__)

DRAIN_S = 1.0
"""Streams that end by themselves within this time after a signal end well."""
GIVE_UP_S = 4.0
"""Connections that are still open after this time are cut."""
KEEP_ALIVE_S = 65
"""Longer than clients keep an idle connection (5 s and 60 s are usual), so that they are the ones to close it."""
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow begins. Raises `ConfigError` when it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, which is no address: {error.strerror}", param="--host") from None
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port is {port}, which cannot be had on {host}: {error.strerror}; choose another", param="--port"
        ) from None
    return listener


class HttpServer(uvicorn.Server):
    """Ends in order on SIGINT, SIGTERM and SIGHUP (unless the parent ignores it), or when told to `end`."""

    def __init__(self, app: FastAPI, live: LiveGenerations, on_started: Callable[[], None]) -> None:
        """`on_started` is called once the server answers."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GIVE_UP_S),
        )
        super().__init__(config)
        self._live = live
        self._on_started = on_started
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = self._loop = asyncio.get_running_loop()
        hang_up_is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup, and it stays so
        caught = [number for number in _ENDING_SIGNALS if number is not signal.SIGHUP or not hang_up_is_ignored]
        for number in caught:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def _on_signal(self, number: int) -> None:
        if self.should_exit:
            log.warning("second signal: cutting what is open")
            self.force_exit = True
            return
        log.info("%s: shutting down", signal.Signals(number).name)
        self.drain()

    def drain(self) -> None:
        """Take nothing new, give what is open a moment, then end it with an error. On the event loop."""
        error = ShuttingDown("the server is shutting down")
        self._live.close(error)
        asyncio.get_running_loop().call_later(DRAIN_S if self._live.choices else 0.0, self._live.fail_all, error)
        self.should_exit = True

    def end(self, error: LingServeError, after_s: float) -> None:
        """Fail what is open with `error`, and end `after_s` seconds later. From any thread, once it has started."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the server has not started")

        def fail() -> None:
            self._live.fail_all(error)
            loop.call_later(after_s, self._exit)

        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(fail)

    def _exit(self) -> None:
        self.should_exit = True
