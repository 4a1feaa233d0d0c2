"""`ling-serve MODEL`: the engine on its thread, HTTP on the main one."""

from __future__ import annotations

import ling_serve.blas  # isort: skip  # noqa: F401  # pyright: ignore[reportUnusedImport]  (before MLX)

import ipaddress
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from ling_serve.cache.budget import Row
from ling_serve.commands.http_server import HttpServer, listen
from ling_serve.commands.leave import leave, report
from ling_serve.commands.loading_progress import LoadingProgress
from ling_serve.config import ServeConfig
from ling_serve.engine.engine import Engine
from ling_serve.engine.thread import EngineState, EngineThread
from ling_serve.errors import EngineDead, LingServeError
from ling_serve.model.checkpoint_path import resolve_checkpoint
from ling_serve.server.app import create_app
from ling_serve.server.service import LiveGenerations, Service, model_names
from ling_serve.text.text_side import TextSide

log = logging.getLogger(__name__)

DEAD_S = 2.0
"""How long `/health` still says that the engine has died before the process ends."""
STOP_S = 5.0
"""The longest the engine may take to finish its step at the end."""


def serve(config: ServeConfig) -> NoReturn:
    """Serve until a signal or the engine's death, then end the process. The last line of the output says why.

    Raises `ConfigError` for an address that cannot be had.
    """
    console = Console(stderr=True)
    _set_up_logging(config.http.log_level, console)
    with listen(config.http.host, config.http.port) as listener:
        _warn(config)
        code = _run(config, listener, console)
    leave(code)


def _run(config: ServeConfig, listener: socket.socket, console: Console) -> int:
    text: Future[TextSide] = Future()
    progress = LoadingProgress(console)
    engine = EngineThread(lambda: _load(config, text, progress))
    service = Service(
        engine=engine,
        text=text,
        model_names=model_names(config.model.model, config.model.served_model_names),
        checkpoint=config.model.model,
        live=LiveGenerations(config.engine.max_num_seqs + config.engine.max_queue_len),
        api_key=config.http.api_key,
    )
    server = HttpServer(create_app(service), service.live, engine.start)
    url = _url(config.http.host, listener.getsockname()[1])
    was_ready = False

    def on_state_change(state: EngineState) -> None:
        nonlocal was_ready
        if state == "ready" and engine.engine_info is not None:
            was_ready = True
            _show(console, service.model_names, engine.engine_info.rows)
            log.info("ready: %s/v1 (Ctrl-C ends it)", url)
        if state == "dead":
            died = EngineDead("the engine stopped after an internal error; the server is ending")
            server.end(died, DEAD_S if was_ready else 0.0)

    engine.on_state_change = on_state_change
    log.info("listening at %s, loading %s", url, config.model.model)
    server.run(sockets=[listener])
    progress.close()
    if engine.error is not None:
        return _explain(engine.error, was_ready)
    if engine.state == "ready" and not engine.stop(STOP_S):
        log.warning("the engine is still in a step; leaving without it")
    log.info("ended")
    return 0


def _load(config: ServeConfig, text: Future[TextSide], progress: LoadingProgress) -> Engine:
    """The text side first: it is quick, and a broken tokenizer should not cost a long wait for weights."""
    path = resolve_checkpoint(config.model.model)
    text.set_result(TextSide.from_checkpoint(path, config.model))
    # MLX and transformers take seconds to import, and meanwhile /health is answered already.
    from ling_serve.engine.build import build_engine_from

    engine = build_engine_from(path, config, progress)
    progress.close()
    return engine


def _explain(error: BaseException, was_ready: bool) -> int:
    if isinstance(error, LingServeError) and not was_ready:
        return report(error)
    log.error("the engine died: %s: %s", type(error).__name__, error)
    return 1


class _ConsoleHandler(logging.Handler):
    """Writes whole lines above a progress bar, unwrapped so that paths and addresses can be copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def _set_up_logging(level: str, console: Console) -> None:
    handler = _ConsoleHandler(console)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("ling_serve").setLevel(level.upper())


def _warn(config: ServeConfig) -> None:
    if config.model.trust_remote_code:
        log.warning("--trust-remote-code is accepted, but code from a checkpoint is never run")
    if config.http.api_key is None and not _is_loopback(config.http.host):
        log.warning(
            "ANYONE WHO CAN REACH %s MAY USE THIS SERVER: give --api-key KEY, or listen on 127.0.0.1", config.http.host
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _show(console: Console, names: Sequence[str], rows: Sequence[Row]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("served as", ", ".join(names))
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)
