"""Loads OpenBLAS before MLX on Linux, where MLX's CPU wheel carries the reference BLAS.

Importing this module first is enough: a large fp32 product is then some 17 times faster (docs/decisions/0001).
It must run before the first `import mlx.core` of the process, and does nothing on macOS or without the package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

from ling_serve.errors import ConfigError

_OPENBLAS_FILE = Path("cmeel.prefix", "lib", "libopenblas.so")


def preload_openblas() -> Path | None:
    """Load `cmeel-openblas` into the process's global symbols. Returns its path, or None if it cannot be had."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    _require_backend()
    found = [(packages, packages / _OPENBLAS_FILE) for packages in _site_packages()]
    packages, library = next(((p, file) for p, file in found if file.exists()), (Path(), None))
    if library is None:
        return None
    try:
        openblas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # a machine without libgfortran.so.5
        try:
            _load_bundled_gfortran(packages / "mlx_cpu.libs")
            openblas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return None
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # Its threads wait for each other by spinning: with a busy neighbour on a core, products take 10 times as long.
        openblas.openblas_set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    return library


def _require_backend() -> None:
    """Raises ConfigError where MLX's front end is installed without a backend: importing it would not say why."""
    places = _site_packages()
    if places and not any((packages / "mlx" / "lib" / "libmlx.so").exists() for packages in places):
        raise ConfigError(
            "MLX is installed without a backend; install exactly one: pip install 'ling-serve[cpu]' or "
            "'ling-serve[cuda]'"
        )


def _load_bundled_gfortran(folder: Path) -> None:
    """Offer the Fortran runtime of MLX's own wheel under the name OpenBLAS asks for.

    Wheel repair tools rename a bundled library (`libgfortran-<hash>.so.5.0.0`) and its soname with it, so the loader
    does not recognise it. An in-memory copy with the plain soname is what it looks for; the shorter name fits in place.
    """
    for quadmath in folder.glob("libquadmath-*.so*"):
        ctypes.CDLL(str(quadmath), mode=ctypes.RTLD_GLOBAL)
    for gfortran in folder.glob("libgfortran-*.so.5*"):
        bundled_name = gfortran.name.encode() + b"\0"
        image = gfortran.read_bytes().replace(bundled_name, b"libgfortran.so.5".ljust(len(bundled_name), b"\0"))
        handle = os.memfd_create("libgfortran.so.5")
        with os.fdopen(handle, "wb") as file:
            file.write(image)
            file.flush()
            ctypes.CDLL(f"/proc/self/fd/{file.fileno()}", mode=ctypes.RTLD_GLOBAL)


def _site_packages() -> list[Path]:
    """The folders that hold a package `mlx`, found without importing it: a stray folder of that name counts too."""
    spec = importlib.util.find_spec("mlx")
    locations = list(spec.submodule_search_locations or []) if spec else []
    return [Path(location).parent for location in locations]


OPENBLAS: Path | None = preload_openblas()
"""The library that was loaded, or None (the start-up table says so)."""
