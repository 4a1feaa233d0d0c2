"""Loaded models answer as mlx-lm does with the same checkpoint, in every layout and mode that both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.convert import convert
from mlx_lm.utils import load_model as mlx_lm_load

from ling_serve.cache.caches import Caches
from ling_serve.model.forward_batch import ForwardBatch
from ling_serve.model.loading import LoadedModel, load_model
from tests.checkpoints import cached_checkpoint

SIZES = {
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
}
BLOCK = 16
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 256, 60)]
PROMPT = 53
"""The rest comes token by token."""

CONVERSIONS: dict[str, dict[str, Any]] = {
    "official": {},
    "unquantised": {"quantize": False},
    "affine 2": {"quantize": True, "q_bits": 2, "q_group_size": 32},
    "affine 4": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "affine 5": {"quantize": True, "q_bits": 5, "q_group_size": 64},
    "affine 8": {"quantize": True, "q_bits": 8, "q_group_size": 64},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8"},
    "nvfp4": {"quantize": True, "q_mode": "nvfp4"},
    "everything in 8 bit": {
        "quantize": True,
        "q_bits": 8,
        "q_group_size": 32,
        # What has an input width of a multiple of 32, the embeddings, the head and MLA included.
        "quant_predicate": lambda path, module: module.weight.shape[-1] % 32 == 0,
    },
}


def logits(loaded: LoadedModel, tokens: list[int], prompt: int) -> mx.array:
    """[len(tokens), vocab]: the prompt in one piece, then one token a step, alone in the caches."""
    layout = loaded.config.cache_layout(loaded.dtype)
    caches = Caches.allocate(layout, num_blocks=4, block_size=BLOCK, num_slots=1)
    rows: list[mx.array] = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(tokens)))]:
        blocks = -(-end // BLOCK)
        batch = ForwardBatch(
            tokens=mx.array(tokens[start:end], mx.int32),
            positions=mx.arange(start, end, dtype=mx.int32),
            cu_seqlens=(0, end - start),
            num_short=int(end - start <= 8),
            page_table=mx.arange(blocks, dtype=mx.int32)[None],
            context_lens=(end,),
            write_at=mx.arange(start, end, dtype=mx.int32),
            read_slots=(caches.states.zero_slot if start == 0 else 0,),
            write_slots=(0,),
            logit_rows=mx.arange(end - start, dtype=mx.int32),
        )
        rows.append(loaded.model.logits(loaded.model(batch, caches)))
        mx.eval(rows[-1], caches.arrays())
    return mx.concatenate(rows)


def relative_rms(ours: mx.array, reference: mx.array) -> mx.array:
    """Of each token: [T]."""
    difference = (ours.astype(mx.float32) - reference).square().mean(axis=-1)
    return (difference / reference.square().mean(axis=-1)).sqrt()


def reference_logits(folder: Path, *, in_float32: bool = True) -> mx.array:
    """mlx-lm's, with every stored number converted to float32 first or as it is."""
    model, _ = mlx_lm_load(folder)
    floats = (mx.bfloat16, mx.float16) if in_float32 else ()
    model.update(tree_map(lambda x: x.astype(mx.float32) if x.dtype in floats else x, model.parameters()))
    return model(mx.array([TOKENS]))[0].astype(mx.float32)


def converted(conversion: str, folder: Path) -> Path:
    source = cached_checkpoint(SIZES)
    if conversion == "official":
        return source
    convert(str(source), str(folder), **CONVERSIONS[conversion])
    return folder


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_float32_logits_equal_those_of_mlx_lm(conversion: str, tmp_path: Path) -> None:
    folder = converted(conversion, tmp_path / "converted")
    errors = relative_rms(logits(load_model(folder, dtype="float32"), TOKENS, PROMPT), reference_logits(folder))
    error = errors.square().mean().sqrt().item()
    print(f"{conversion}: relative RMS {error:.2e}, of the worst token {errors.max().item():.2e}")
    assert error <= 1e-5


@pytest.mark.parametrize("conversion", ["affine 4", "mxfp8", "nvfp4"])
def test_bfloat16_is_no_further_from_float32_than_mlx_lm(conversion: str, tmp_path: Path) -> None:
    """Medians: where two experts nearly tie, rounding may choose the other, and that token is far off in both."""
    folder = converted(conversion, tmp_path / "converted")
    exact = reference_logits(folder)
    ours = logits(load_model(folder, dtype="bfloat16"), TOKENS, PROMPT)
    assert ours.dtype == mx.bfloat16
    error = mx.median(relative_rms(ours, exact)).item()
    theirs = mx.median(relative_rms(reference_logits(folder, in_float32=False), exact)).item()
    print(f"{conversion}: median relative RMS {error:.2e}, mlx-lm's {theirs:.2e}")
    assert error <= 1.5 * theirs


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 4e-2), ("float16", 5e-3)])
def test_half_precision_of_the_official_layout(dtype: Any, limit: float) -> None:
    """mlx-lm cannot run unquantised experts in 16 bits on a CPU, so against float32 alone."""
    folder = cached_checkpoint(SIZES)
    ours = logits(load_model(folder, dtype=dtype), TOKENS, PROMPT)
    assert ours.dtype == getattr(mx, dtype)
    error = mx.median(relative_rms(ours, reference_logits(folder))).item()
    print(f"official in {dtype}: median relative RMS {error:.2e}")
    assert error <= limit
