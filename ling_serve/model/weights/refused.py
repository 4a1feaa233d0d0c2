"""Checkpoints that are not read, told apart before anything is loaded, and what to use instead. No pickle is opened."""

from __future__ import annotations

from pathlib import Path

from ling_serve.errors import CheckpointError, UnsupportedCheckpoint
from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.catalog import Catalog
from ling_serve.model.weights.listing import listing

_INSTEAD = "use the BF16 checkpoint, or one written by mlx_lm.convert (mxfp8, mxfp4, affine)"

_METHODS = {
    "fp8": "FP8 in blocks",
    "compressed-tensors": "compressed-tensors",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4 as transformers packs it",
    "mxfp8": "MXFP8 as transformers packs it",
}

_SUFFIXES = {
    ".weight_scale_inv": "FP8 in blocks",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight_packed": "compressed-tensors",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".global_scale": "nvfp4 with a scale for each expert",
    ".quant_state": "bitsandbytes",
}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def refuse_folder(folder: Path) -> None:
    """Raise unless `folder` is a folder with safetensors files."""
    if folder.suffix == ".gguf":
        raise UnsupportedCheckpoint(f"{folder} is a GGUF file; {_INSTEAD}")
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; expected a checkpoint folder")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; expected the folder that holds config.json and the safetensors files"
        )
    if next(folder.glob("*.safetensors"), None) or (folder / "model.safetensors.index.json").exists():
        return
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        raise UnsupportedCheckpoint(f"{folder} holds GGUF files ({listing(gguf)}); {_INSTEAD}")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedCheckpoint(
            f"{folder} holds pickled weights ({listing(pickles)}), which can run code and are never opened; "
            "use a checkpoint with safetensors files"
        )
    raise CheckpointError(f"{folder} holds no *.safetensors file; expected config.json and the weights in it")


def refuse_quantization_method(config: ModelConfig) -> None:
    """Raise UnsupportedCheckpoint if config.json announces a quantisation that is not MLX's own."""
    if config.quantization is not None or config.quantization_config is None:
        return
    method = config.quantization_config.get("quant_method")
    if method is None:
        return
    known = _METHODS.get(str(method))
    raise UnsupportedCheckpoint(
        f"config.json: quantization_config.quant_method is {method!r}"
        + (f" ({known})" if known else ", which is not known")
        + f"; {_INSTEAD}",
        param="quantization_config",
    )


def refuse_tensors(catalog: Catalog) -> None:
    """Raise UnsupportedCheckpoint if tensors are named, or stored, as only an unread quantisation does."""
    for suffix, method in _SUFFIXES.items():
        names = [name for name in catalog if name.endswith(suffix)]
        if names:
            raise UnsupportedCheckpoint(
                f"{catalog.folder} is quantised as {method} ({len(names)} tensors such as {names[0]}); {_INSTEAD}"
            )
    names = [name for name, tensor in catalog.items() if tensor.dtype.startswith(("F8_", "F6_", "F4"))]
    if names:
        raise UnsupportedCheckpoint(
            f"{catalog.folder} holds {len(names)} tensors of a small float type, such as {names[0]} "
            f"({catalog[names[0]].dtype}); {_INSTEAD}"
        )
