"""Loading whole checkpoints: the right numbers, in one model's worth of memory."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.utils import load_model as mlx_lm_load

from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig
from ling_serve.model.loading import load_model, read_weights
from tests.checkpoints import cached_checkpoint, official_tensors, tiny_config, write_checkpoint

WIDE_EXPERTS = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "kv_lora_rank": 64}

CONVERSIONS: dict[str, dict[str, Any]] = {
    "unquantised": {},
    "affine 4 group 32": {"q_bits": 4, "q_group_size": 32},
    "affine 8 group 64": {"q_bits": 8, "q_group_size": 64},
    "affine 3 group 64": {"q_bits": 3, "q_group_size": 64},
    "affine 6 group 32": {"q_bits": 6, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "nvfp4": {"q_mode": "nvfp4"},
}


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def quantised_modules(model: Any) -> dict[str, tuple[int, int, str]]:
    return {
        path: (module.bits, module.group_size, module.mode)
        for path, module in model.named_modules()
        if hasattr(module, "bits")
    }


def unfused(folder: Path, dtype: Any = "auto") -> tuple[Any, mx.Dtype, tuple[str, ...]]:
    """The model with its parameters as stored, before any are joined for speed."""
    loaded = read_weights(folder, dtype=dtype)
    return loaded.model, loaded.dtype, loaded.notes


def assert_same_numbers(ours: Any, theirs: Any) -> None:
    mine, reference = parameters(ours), parameters(theirs)
    assert sorted(mine) == sorted(reference)
    for name, value in mine.items():
        expected = reference[name]
        assert value.shape == expected.shape, name
        assert mx.array_equal(value, expected.astype(value.dtype)), name


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"q_lora_rank": None},
        {"num_hidden_layers": 6, "layer_group_size": 4, "first_k_dense_replace": 2},
        {"num_attention_heads": 3, "v_head_dim": 24, "num_nextn_predict_layers": 1},
        {"tie_word_embeddings": True},
    ],
    ids=["base", "direct q", "tail of MLA", "odd heads and MTP", "tied"],
)
@pytest.mark.parametrize("layout", ["official", "mlx_lm"])
def test_both_layouts_give_the_parameters_mlx_lm_gives(overrides: dict[str, Any], layout: str) -> None:
    folder = cached_checkpoint(overrides, layout=layout, tokenizer=False)
    model, dtype, _ = unfused(folder)
    reference, _ = mlx_lm_load(folder, lazy=True)
    assert_same_numbers(model, reference)
    assert dtype == mx.float32


def test_official_layout_by_hand() -> None:
    """Against the writer's own numbers, without mlx-lm in between."""
    folder = cached_checkpoint(dtype="float32", tokenizer=False)
    config = tiny_config()
    stored = official_tensors(config, seed=0)
    ours = {name: np.array(value) for name, value in parameters(unfused(folder)[0]).items()}

    kv_b = stored["model.layers.3.attention.kv_b_proj.weight"]
    for head in range(2):
        rows = kv_b[head * 32 : (head + 1) * 32]
        np.testing.assert_array_equal(ours["model.layers.3.attention.embed_q.weight"][head], rows[:16].T)
        np.testing.assert_array_equal(ours["model.layers.3.attention.unembed_out.weight"][head], rows[16:])
    for expert in range(8):
        np.testing.assert_array_equal(
            ours["model.layers.2.mlp.switch_mlp.down_proj.weight"][expert],
            stored[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"],
        )
    conv = stored["model.layers.1.attention.v_conv1d.weight"]
    np.testing.assert_array_equal(ours["model.layers.1.attention.v_conv1d.weight"][:, :, 0], conv[:, 0, :])


def test_other_spellings_of_the_official_layout(tmp_path: Path) -> None:
    """A_log [1, 1, H, 1] and the router bias under its other name hold the same numbers."""
    folder = write_checkpoint(tmp_path / "checkpoint", shards=1, tokenizer=False)
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    mx.eval(tensors)
    renamed = {
        name.replace("expert_bias", "e_score_correction_bias"): array.reshape(1, 1, -1, 1) if "A_log" in name else array
        for name, array in tensors.items()
    }
    renamed["model.layers.3.attention.rotary_emb.inv_freq"] = mx.ones((4,))
    mx.save_safetensors(file, renamed)
    model, _, notes = unfused(folder)
    assert_same_numbers(model, unfused(cached_checkpoint(tokenizer=False))[0])
    assert any("e_score_correction_bias: 3" in note for note in notes)
    assert any("inv_freq" in note for note in notes)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mlx_lm_conversions_load_as_in_mlx_lm(conversion: str, dtype: str, tmp_path: Path) -> None:
    options = CONVERSIONS[conversion]
    folder = tmp_path / "converted"
    convert(str(cached_checkpoint(WIDE_EXPERTS)), str(folder), quantize=bool(options), **options)
    model, _, notes = unfused(folder, dtype)
    reference, _ = mlx_lm_load(folder, lazy=True)
    assert_same_numbers(model, reference)
    print(notes)
    mode = options.get("q_mode", "affine")
    assert any(note.startswith(mode) for note in notes) == bool(options)
    assert quantised_modules(model) == quantised_modules(reference)


def test_mixed_modes_by_path(tmp_path: Path) -> None:
    """Each path in its own mode, another one unquantised, and one that only its tensors tell."""

    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        if path.endswith("mlp.switch_mlp.down_proj"):
            return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
        if path.endswith("attention.f_proj"):
            return {"bits": 2, "group_size": 64, "mode": "affine"}
        return path.endswith(("up_proj", "gate_proj", "embed_q", "word_embeddings", "lm_head"))

    folder = tmp_path / "converted"
    source = str(cached_checkpoint(WIDE_EXPERTS | {"qk_nope_head_dim": 32}))
    convert(source, str(folder), quantize=True, q_bits=8, q_group_size=32, quant_predicate=choose)
    model, _, _ = unfused(folder)
    reference, _ = mlx_lm_load(folder, lazy=True)
    assert_same_numbers(model, reference)
    modules = dict(model.named_modules())
    assert modules["model.layers.1.mlp.switch_mlp.down_proj"].mode == "mxfp4"
    assert modules["model.layers.0.attention.f_proj"].bits == 2
    assert type(modules["model.word_embeddings"]).__name__ == "QuantizedEmbedding"
    assert type(modules["model.layers.3.attention.embed_q"]).__name__ == "QuantizedMultiLinear"
    assert not hasattr(modules["model.layers.0.attention.o_proj"], "bits")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_every_parameter_is_in_the_dtype_asked_for(stored: str, asked: str) -> None:
    model, dtype, _ = unfused(cached_checkpoint(dtype=stored, tokenizer=False), asked)
    assert dtype == getattr(mx, asked)
    for name, value in parameters(model).items():
        if name.endswith(("A_log", "dt_bias", "expert_bias")):
            assert value.dtype == mx.float32, name
        elif name.endswith(".mlp.gate.weight") and asked != "float32":
            assert value.dtype == getattr(mx, stored), name
        else:
            assert value.dtype == dtype, name


def test_mtp_layers_are_skipped_and_said_so_once() -> None:
    folder = cached_checkpoint({"num_nextn_predict_layers": 2}, tokenizer=False)
    loaded = load_model(folder)
    (note,) = [note for note in loaded.notes if "multi-token prediction" in note]
    print(note)
    # 5 norms, eh_proj, 8 of MLA, 2 of the router, 8 experts and the shared one of 3 each: twice.
    assert "skipped 86 tensors" in note
    assert note.endswith("of layer 4, 5")


def test_progress_reaches_the_whole_in_order() -> None:
    folder = cached_checkpoint(tokenizer=False)
    calls: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {done[-1]}
    # kv_b_proj is read for each of its halves.
    stored = sum(array.nbytes for file in folder.glob("*.safetensors") for array in mx.load(str(file)).values())
    assert done[-1] == stored + 64 * 32 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_one_model_and_a_layer(dtype: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_experts": 64, "moe_intermediate_size": 128, "num_hidden_layers": 8, "n_group": 8}
    folder = write_checkpoint(tmp_path / "large", sizes, tokenizer=False)
    layer = 64 * 3 * 256 * 128 * getattr(mx, dtype).size
    before = mx.get_active_memory()
    mx.clear_cache()
    mx.reset_peak_memory()
    start = time.perf_counter()
    loaded = load_model(folder, dtype=dtype)
    mx.eval(loaded.model.parameters())  # whatever was put off counts too
    peak = mx.get_peak_memory() - before
    print(
        f"weights {loaded.weight_bytes / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB, a layer {layer / 1e6:.1f} MB, "
        f"{time.perf_counter() - start:.2f} s"
    )
    assert loaded.weight_bytes > 80e6
    assert peak <= 1.1 * loaded.weight_bytes + layer
    assert mx.get_active_memory() - before <= 1.01 * loaded.weight_bytes
    assert mx.get_cache_memory() == 0


def test_weight_bytes_are_those_of_the_parameters() -> None:
    loaded = load_model(cached_checkpoint(tokenizer=False), dtype="bfloat16")
    assert loaded.weight_bytes == sum(array.nbytes for array in parameters(loaded.model).values())
    assert isinstance(loaded.model, BailingV3)
    assert isinstance(loaded.config, ModelConfig)
    count = sum(math.prod(array.shape) for array in parameters(loaded.model).values())
    assert count * 2 <= loaded.weight_bytes < count * 2.02
