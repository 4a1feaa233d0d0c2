"""`mlx_lm.server` with the BLAS that ling-serve loads: the same products under both, so only the servers differ."""

import ling_serve.blas  # noqa: F401  (must come before MLX)

from mlx_lm.server import main  # isort: skip

if __name__ == "__main__":
    main()
