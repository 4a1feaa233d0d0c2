"""OpenBLAS leaves cores to the rest of the server, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ling_serve.blas

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
