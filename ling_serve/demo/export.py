"""Reads and writes the checkpoint's model.safetensors: `python -m ling_serve.demo.export TRAINING_FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ling_serve.demo import CHECKPOINT
from ling_serve.demo.parameters import NEVER_BF16, Arrays, from_official_layout, official_layout
from ling_serve.demo.train import load_parameters
from ling_serve.model.config import ModelConfig


def write_weights(parameters: Mapping[str, npt.NDArray[np.float32]], config: ModelConfig, file: Path) -> None:
    """Write `parameters` with the official names, axes and dtypes: bfloat16 but for `NEVER_BF16`."""
    tensors = {
        name: mx.array(value).astype(mx.float32 if name.endswith(NEVER_BF16) else mx.bfloat16)
        for name, value in official_layout(parameters, config).items()
    }
    mx.save_safetensors(str(file), tensors, metadata={"format": "pt"})


def read_weights(folder: Path = CHECKPOINT) -> Arrays:
    """The parameters of a checkpoint in the official layout, in float32 by full name."""
    tensors = cast("dict[str, mx.array]", cast("Any", mx.load(str(folder / "model.safetensors"))))
    values = {name: np.array(value.astype(mx.float32), dtype=np.float32) for name, value in tensors.items()}
    return from_official_layout(values, ModelConfig.from_file(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the training wrote its parameters")
    folder: Path = parser.parse_args().folder
    write_weights(load_parameters(folder), ModelConfig.from_file(CHECKPOINT), CHECKPOINT / "model.safetensors")


if __name__ == "__main__":
    main()
