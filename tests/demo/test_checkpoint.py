"""The bundled checkpoint: small, in the official layout, with every structural feature of the architecture."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from ling_serve.demo import CHECKPOINT
from ling_serve.model.config import AttentionKind, MlpKind, ModelConfig

CONFIG = ModelConfig.from_file(CHECKPOINT)


@pytest.fixture(scope="module")
def header() -> dict[str, Any]:
    """dtype and shape of each tensor, read from the safetensors header alone."""
    with (CHECKPOINT / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        values = json.loads(file.read(size))
    values.pop("__metadata__", None)
    return values


def test_it_is_small() -> None:
    sizes = {file.name: file.stat().st_size for file in CHECKPOINT.iterdir()}
    print(sizes)
    assert sum(sizes.values()) <= 12_000_000
    assert set(sizes) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_config_has_every_feature() -> None:
    kinds = [plan.attention for plan in CONFIG.layers]
    assert kinds == ([AttentionKind.KDA] * 3 + [AttentionKind.MLA]) * 2
    assert [plan.mlp for plan in CONFIG.layers] == [MlpKind.DENSE] + [MlpKind.MOE] * 7
    assert CONFIG.q_lora_rank is not None
    assert (CONFIG.n_group, CONFIG.topk_group, CONFIG.num_experts, CONFIG.num_experts_per_tok) == (4, 2, 16, 4)
    assert CONFIG.num_shared_experts == 1
    assert CONFIG.max_position_embeddings == 8192


def test_the_layout_is_the_official_one(header: dict[str, Any]) -> None:
    h, width, heads, experts = 192, 128, 4, 16
    expected: dict[str, list[int]] = {
        "model.word_embeddings.weight": [512, h],
        "lm_head.weight": [512, h],
        "model.norm.weight": [h],
    }
    kda = {f"{name}_proj.weight": [width, h] for name in "qkvfg"} | {
        f"{name}_conv1d.weight": [width, 1, 4] for name in "qkv"
    }
    kda |= {"b_proj.weight": [heads, h], "A_log": [heads], "dt_bias": [width], "o_norm.weight": [32]}
    kda |= {"o_proj.weight": [h, width]}
    mla = {"q_a_proj.weight": [64, h], "q_a_layernorm.weight": [64], "q_b_proj.weight": [heads * 48, 64]}
    mla |= {"kv_a_proj_with_mqa.weight": [80, h], "kv_a_layernorm.weight": [64], "kv_b_proj.weight": [heads * 64, 64]}
    mla |= {"g_proj.weight": [heads, h], "dense.weight": [h, width]}

    def mlp(prefix: str, inner: int) -> dict[str, list[int]]:
        wide, narrow = [inner, h], [h, inner]
        shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}

    for plan in CONFIG.layers:
        layer = {"input_layernorm.weight": [h], "post_attention_layernorm.weight": [h]}
        attention = kda if plan.attention is AttentionKind.KDA else mla
        layer |= {f"attention.{name}": shape for name, shape in attention.items()}
        if plan.mlp is MlpKind.DENSE:
            layer |= mlp("mlp.", 384)
        else:
            layer |= {"mlp.gate.weight": [experts, h], "mlp.gate.expert_bias": [experts]}
            layer |= mlp("mlp.shared_experts.", 64)
            for expert in range(experts):
                layer |= mlp(f"mlp.experts.{expert}.", 64)
        expected |= {f"model.layers.{plan.index}.{name}": shape for name, shape in layer.items()}
    assert {name: value["shape"] for name, value in header.items()} == expected


def test_dtypes_are_the_official_ones(header: dict[str, Any]) -> None:
    wide = {name for name, value in header.items() if value["dtype"] == "F32"}
    assert wide == {name for name in header if name.endswith((".A_log", ".dt_bias", ".expert_bias"))}
    assert {value["dtype"] for name, value in header.items() if name not in wide} == {"BF16"}


def test_token_ids_agree_between_the_files() -> None:
    tokens = {
        token["content"]: token["id"]
        for token in json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    }
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text(encoding="utf-8"))
    assert CONFIG.eos_token_ids == (tokens["<|role_end|>"],) == (generation["eos_token_id"],)
    assert CONFIG.pad_token_id == tokens["<|endoftext|>"] == generation["pad_token_id"]
    assert max(tokens.values()) == CONFIG.vocab_size - 1
