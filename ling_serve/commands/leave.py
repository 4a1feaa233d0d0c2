"""How a command ends: one line for an error, and a code."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from ling_serve.errors import ConfigError, LingServeError


def report(error: LingServeError) -> int:
    """Say on stderr what is wrong. Returns 2 for a flag or setting, 1 for anything else."""
    print(f"ling-serve: error: {error.message}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down: MLX's own threads may still run, and then that aborts."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
