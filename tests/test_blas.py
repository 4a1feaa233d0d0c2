"""OpenBLAS leaves cores to the rest of the server, unless the user says otherwise."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ling_serve.blas
from ling_serve.errors import ConfigError

COUNT = """
import ctypes, ling_serve.blas
print(ctypes.CDLL(str(ling_serve.blas.OPENBLAS)).openblas_get_num_threads())
"""


@pytest.mark.skipif(ling_serve.blas.OPENBLAS is None, reason="no OpenBLAS here")
@pytest.mark.parametrize("asked", [None, "2"])
def test_half_of_the_cores_or_what_the_user_asked_for(asked: str | None):
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if asked is not None:
        environment["OPENBLAS_NUM_THREADS"] = asked
    printed = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    cores = os.cpu_count() or 1
    expected = max(1, cores // 2) if asked is None else min(int(asked), cores)
    assert 1 <= int(printed.stdout) <= expected  # the library has a compiled-in limit of its own
    if expected <= 2:
        assert int(printed.stdout) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_it_is_loaded_where_it_is_installed():
    importlib.metadata.version("cmeel-openblas")
    assert ling_serve.blas.OPENBLAS is not None


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one backend")
def test_mlx_without_a_backend_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(ling_serve.blas, "_site_packages", lambda: [tmp_path])
    with pytest.raises(ConfigError, match=r"without a backend; .*\[cpu\].*\[cuda\]"):
        ling_serve.blas.preload_openblas()
