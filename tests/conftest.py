"""Loads OpenBLAS before any test imports MLX."""

import ling_serve.blas  # noqa: F401  (must come before MLX)
