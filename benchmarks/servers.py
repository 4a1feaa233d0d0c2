"""Starts and stops the servers that are compared, each as it is installed in this environment."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_stream import get_status

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """A server to measure: its name in tables, and the command that serves a checkpoint on a port."""

    name: str
    command: Callable[[Path, int], Sequence[str]]
    served_name: Callable[[Path], str]


def _arguments(checkpoint: Path, port: int) -> list[str]:
    return ["--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]


LING_SERVE = Contender(
    name="ling-serve",
    command=lambda checkpoint, port: [sys.executable, "-m", "ling_serve.cli", *_arguments(checkpoint, port)],
    served_name=str,
)
MLX_LM = Contender(
    name="mlx_lm.server",
    command=lambda checkpoint, port: [sys.executable, "-m", "mlx_lm", "server", *_arguments(checkpoint, port)],
    served_name=lambda _: "default_model",
)
MLX_LM_OPENBLAS = Contender(
    name="mlx_lm.server + OpenBLAS",
    command=lambda checkpoint, port: [
        sys.executable,
        str(_HERE / "mlx_lm_with_openblas.py"),
        *_arguments(checkpoint, port),
    ],
    served_name=lambda _: "default_model",
)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    process_id: int

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far, which a busy machine does not stretch; not a number outside Linux."""
        file = Path(f"/proc/{self.process_id}/stat")
        if not file.exists():
            return math.nan
        user, system = file.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def serving(contender: Contender, checkpoint: Path, log: Path, timeout_s: float = 120) -> AsyncIterator[Running]:
    """Run the server while the block runs; yields once its /health says 200."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *contender.command(checkpoint, port), stdout=output, stderr=output, start_new_session=True, cwd=_HERE.parent
        )
        try:
            deadline = time.monotonic() + timeout_s
            while await get_status(f"{url}/health") != 200:
                if process.returncode is not None:
                    raise RuntimeError(f"{contender.name} exited with {process.returncode}; see {log}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{contender.name} is not healthy after {timeout_s:.0f} s; see {log}")
                await asyncio.sleep(0.2)
            yield Running(url, process.pid)
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for sign, patience_s in ((signal.SIGINT, 5.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
