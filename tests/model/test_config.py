from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ling_serve.errors import CheckpointError, ConfigFieldError, UnsupportedCheckpoint
from ling_serve.model.config import AttentionKind, MlpKind, ModelConfig, RopeKind
from tests.parity.random_model import small_config

TINY = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 157184,
    "tie_word_embeddings": False,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "layer_group_size": 4,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 4608,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "num_shared_experts": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 6000000,
    "rope_interleave": True,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 0,
    "kda_safe_gate": True,
    "kda_lower_bound": -5,
    "no_kda_lora": True,
    "use_kda_lora": False,
    "short_conv_kernel_size": 4,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 156895,
    "pad_token_id": 156892,
    # Present in published configs, without effect in this architecture.
    "use_qk_norm": True,
    "group_norm_size": 4,
    "linear_silu": False,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "up_proj_norm": False,
    "value_norm": False,
    "scale_router_input": False,
    "mtp_use_kda": False,
}
FLASH = TINY | {
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "layer_group_size": 6,
    "num_attention_heads": 32,
    "intermediate_size": 6144,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768,
    "num_experts": 512,
    "q_lora_rank": None,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "num_nextn_predict_layers": 1,
    "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
}


def test_the_tiny_geometry() -> None:
    config = ModelConfig.from_dict(TINY)
    assert config.mla_layers == (3, 7, 11, 15, 19, 23)
    assert len(config.kda_layers) == 18
    assert [plan.mlp for plan in config.layers].count(MlpKind.DENSE) == 1
    assert all(plan.swiglu_limit is None and plan.shared_swiglu_limit is None for plan in config.layers)
    assert config.eos_token_ids == (156895,)
    layout = config.cache_layout(mx.bfloat16)
    assert layout.bytes_per_token == 6912
    assert layout.bytes_per_slot == 18 * (16 * 128 * 128 * 4 + 3 * 3 * 2048 * 2)
    assert (layout.conv_taps, layout.conv_width, layout.latent_width) == (3, 6144, 576)


def test_the_flash_geometry() -> None:
    config = ModelConfig.from_dict(FLASH)
    assert config.mla_layers == (5, 11, 17, 23, 29, 35, 41)
    assert len(config.kda_layers) == 35
    assert config.q_lora_rank is None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == (RopeKind.YARN, 2.0)
    assert [config.layers[i].swiglu_limit for i in (34, 35, 41)] == [None, 4.0, 4.0]
    assert [config.layers[i].shared_swiglu_limit for i in (33, 34, 39, 40)] == [None, 5.0, 5.0, 7.0]
    assert config.num_nextn_predict_layers == 1


@pytest.mark.parametrize(
    ("layers", "group", "expected"),
    [
        (4, 4, "KKKM"),
        (5, 2, "KMKMM"),
        (8, 3, "KKMKKMMM"),
        (3, 4, "MMM"),
        (4, 1, "MMMM"),
        (12, 6, "KKKKKMKKKKKM"),
    ],
)
def test_layer_kinds(layers: int, group: int, expected: str) -> None:
    config = ModelConfig.from_dict(small_config(num_hidden_layers=layers, layer_group_size=group))
    assert "".join("M" if plan.attention is AttentionKind.MLA else "K" for plan in config.layers) == expected
    assert [plan.index for plan in config.layers] == list(range(layers))


def test_limit_lists_may_be_short_long_and_hold_nulls() -> None:
    values = small_config(expert_swiglu_limit_list=[None, 0, 2], share_expert_swiglu_limit_list=[1.5] * 9)
    plans = ModelConfig.from_dict(values).layers
    assert [plan.swiglu_limit for plan in plans] == [None, None, 2.0, None]
    assert [plan.shared_swiglu_limit for plan in plans] == [1.5] * 4


def test_defaults_of_optional_fields() -> None:
    values = small_config()
    optional = ("tie_word_embeddings", "rope_scaling", "norm_topk_prob", "moe_shared_expert_intermediate_size")
    for name in (*optional, "kda_safe_gate", "no_kda_lora", "rope_interleave"):
        del values[name]
    config = ModelConfig.from_dict(values)
    assert config == ModelConfig.from_dict(small_config())
    assert ModelConfig.from_dict(values | dict.fromkeys(optional)) == config


def test_rope_parameters_stand_in_for_the_older_fields() -> None:
    values = small_config()
    del values["rope_theta"], values["rope_scaling"]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = ModelConfig.from_dict(values | {"rope_parameters": {"rope_theta": 5e5, **yarn}})
    assert (config.rope_theta, config.rope_scaling.kind) == (5e5, RopeKind.YARN)


REQUIRED = sorted(
    set(small_config())
    - {"architectures", "model_type", "tie_word_embeddings", "rope_scaling", "norm_topk_prob", "rope_interleave"}
    - {"moe_shared_expert_intermediate_size", "kda_safe_gate", "no_kda_lora"}
)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_is_missing(name: str) -> None:
    values = small_config()
    del values[name]
    with pytest.raises(ConfigFieldError, match="is missing; expected") as caught:
        ModelConfig.from_dict(values)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "48"),
        ("hidden_size", 48.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", None),
        ("num_experts", -8),
        ("num_hidden_layers", 0),
        ("layer_group_size", 0),
        ("q_lora_rank", 0),
        ("q_lora_rank", False),
        ("qk_rope_head_dim", 7),
        ("rope_theta", float("nan")),
        ("rope_theta", "1e4"),
        ("rms_norm_eps", 0),
        ("routed_scaling_factor", float("inf")),
        ("tie_word_embeddings", 1),
        ("norm_topk_prob", "yes"),
        ("n_group", 3),
        ("n_group", 8),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("first_k_dense_replace", 5),
        ("short_conv_kernel_size", 1),
        ("kda_lower_bound", -10.5),
        ("kda_lower_bound", 0),
        ("kda_lower_bound", 1.0),
        ("kda_safe_gate", False),
        ("no_kda_lora", False),
        ("use_kda_lora", True),
        ("rope_interleave", False),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("score_function", "softmax"),
        ("hidden_act", "gelu"),
        ("use_qkv_bias", True),
        ("attention_bias", True),
        ("norm_head", True),
        ("moe_router_enable_expert_bias", False),
        ("expert_swiglu_limit_list", 4),
        ("expert_swiglu_limit_list", [0, -1]),
        ("expert_swiglu_limit_list", [0, "4"]),
        ("share_expert_swiglu_limit_list", [True]),
        ("share_expert_swiglu_limit_list", [float("nan")]),
        ("num_nextn_predict_layers", -1),
        ("eos_token_id", 97),
        ("eos_token_id", [1, -1]),
        ("pad_token_id", "0"),
        ("rope_scaling", "yarn"),
        ("quantization", [4]),
        ("dtype", 16),
    ],
)
def test_a_field_is_malformed(name: str, value: Any) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        ModelConfig.from_dict(small_config(**{name: value}))
    print(caught.value)
    assert caught.value.field == name
    assert repr(value) in str(caught.value)
    assert caught.value.expected in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"type": "dynamic", "factor": 2.0}, "type"),
        ({"rope_type": "longrope"}, "rope_type"),
        ({"type": "yarn"}, "factor"),
        ({"type": "yarn", "factor": 0}, "factor"),
        ({"type": "yarn", "factor": 2, "beta_fast": "32"}, "beta_fast"),
        ({"type": "yarn", "factor": 2, "attention_factor": 1.1}, "attention_factor"),
        ({"type": "linear"}, "factor"),
    ],
)
def test_rope_scaling_is_malformed(scaling: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        ModelConfig.from_dict(small_config(rope_scaling=scaling))
    assert caught.value.field == f"rope_scaling.{field}"


@pytest.mark.parametrize("architectures", [None, [], "BailingMoeV3ForCausalLM", [3]])
def test_the_architecture_is_never_guessed(architectures: Any) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        ModelConfig.from_dict(small_config(architectures=architectures))
    assert caught.value.field == "architectures"
    values = small_config()
    del values["architectures"]
    with pytest.raises(ConfigFieldError, match="architectures is missing"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    "architectures", [["BailingMoeV2_5ForCausalLM"], ["BailingMoeV3ForCausalLM", "LlamaForCausalLM"]]
)
def test_another_architecture_of_the_same_model_type_is_refused(architectures: list[str]) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"only BailingMoeV3ForCausalLM .*Ling-2\.6") as caught:
        ModelConfig.from_dict(small_config(architectures=architectures))
    assert architectures[-1] in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [{"turboquant": True}, {"k_quant": "q8_0"}, {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}],
)
def test_quantised_caches_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="quantised caches are not served"):
        ModelConfig.from_dict(small_config(**overrides))


def test_weight_quantisation_is_kept_as_written() -> None:
    quantization = {"group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp": False}
    config = ModelConfig.from_dict(small_config(quantization=quantization, quantization_config=quantization))
    assert config.quantization == config.quantization_config == quantization


def test_from_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_file(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        ModelConfig.from_file(tmp_path)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        ModelConfig.from_file(file)
    file.write_text(json.dumps(small_config()))
    assert ModelConfig.from_file(tmp_path) == ModelConfig.from_dict(small_config())
