"""Loads OpenBLAS before MLX on Linux, where MLX's CPU wheel carries the reference BLAS.

Importing this module first is enough: an fp32 product is then up to 90 times faster (docs/benchmarks.md).
It must run before the first `import mlx.core` of the process, and does nothing on macOS or without the package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path


def preload_openblas() -> Path | None:
    """Load `cmeel-openblas` into the process's global symbols. Returns its path, or None if it is not there."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    for folder in _cmeel_prefixes():
        library = folder / "lib" / "libopenblas.so"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return library
    return None


def _cmeel_prefixes() -> list[Path]:
    spec = importlib.util.find_spec("cmeel")
    site_folders = [Path(p).parent for p in (spec.submodule_search_locations or [])] if spec else []
    site_folders += [Path(p) for p in sys.path if p.endswith("site-packages")]
    return [folder / "cmeel.prefix" for folder in site_folders]


OPENBLAS: Path | None = preload_openblas()
"""The library that was loaded, or None (the start-up table says so)."""
