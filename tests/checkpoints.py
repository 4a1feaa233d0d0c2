"""Writes small random Bailing V3 checkpoints for tests, from the published layout, not from the loader's own code."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from tests.byte_tokenizer import END_OF_TEXT, ROLE_END, write_tokenizer

Layout = Literal["official", "mlx_lm"]

_MTP_SEED = 1 << 20


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The object of a valid config.json: four layers (KDA, KDA, KDA, MLA), the first with a dense MLP."""
    config: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "torch_dtype": "bfloat16",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_enable_expert_bias": True,
        "layer_group_size": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "no_kda_lora": True,
        "use_kda_lora": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 6000000.0,
        "rope_interleave": True,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 0,
        "gated_attention_proj_granularity_type": "head_wise",
        "tie_word_embeddings": False,
        "expert_swiglu_limit_list": None,
        "share_expert_swiglu_limit_list": None,
        "eos_token_id": ROLE_END,
        "pad_token_id": END_OF_TEXT,
    }
    return config | overrides


def write_checkpoint(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    layout: Layout = "official",
    dtype: str = "bfloat16",
    shards: int = 2,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint into `folder` (created if need be) and return it.

    `official` has one tensor for each expert, joined kv_b_proj and convolutions [P, 1, taps], and the
    multi-token-prediction layers that `num_nextn_predict_layers` asks for; `mlx_lm` has stacked experts, embed_q and
    unembed_out, convolutions [P, taps, 1]. The same seed and config give the same numbers in both. `dtype` is that of
    all tensors but A_log, dt_bias and expert_bias (float32), and of the config's torch_dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(torch_dtype=dtype) | dict(overrides or {})
    tensors = official_tensors(config, seed)
    if layout == "mlx_lm":
        tensors = _as_mlx_lm(tensors, config)
    arrays = {
        name: mx.array(value).astype(mx.float32 if name.endswith(_FLOAT32) else getattr(mx, dtype))
        for name, value in tensors.items()
    }
    write_json(folder / "config.json", config)
    write_shards(folder, arrays, shards)
    eos_ids = [config["eos_token_id"], config["pad_token_id"]]
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "eos_token_id": eos_ids},
    )
    if tokenizer:
        write_tokenizer(folder)
    return folder


def cached_checkpoint(overrides: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Like `write_checkpoint`, into a temporary folder that all tests of the process share: never change its files."""
    return _cached(json.dumps([dict(overrides or {}), options], sort_keys=True))


def write_shards(folder: Path, arrays: Mapping[str, mx.array], shards: int) -> None:
    """Split the arrays, in their order, over `shards` safetensors files with an index; one shard has no index."""
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), dict(arrays), metadata={"format": "pt"})
        return
    names = list(arrays)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(np.array_split(np.arange(len(names)), shards), start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        chosen = {names[i]: arrays[names[i]] for i in part}
        mx.save_safetensors(str(folder / file), chosen, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    total = sum(array.nbytes for array in arrays.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


_FLOAT32 = ("A_log", "dt_bias", "expert_bias")


def official_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the official layout, float32, scaled so that activations keep their size from layer to layer."""
    random = np.random.default_rng(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {"model.word_embeddings.weight": random.standard_normal((vocab, hidden), np.float32)}
    for index in range(config["num_hidden_layers"]):
        tensors |= _named(f"model.layers.{index}", _layer(config, index, random))
    tensors["model.norm.weight"] = _norm(random, hidden)
    if not config["tie_word_embeddings"]:
        # Spread-out logits keep greedy choices away from ties.
        tensors["lm_head.weight"] = 3.0 * _linear(random, vocab, hidden)
    for extra in range(config["num_nextn_predict_layers"]):
        layer = _mtp_layer(config, np.random.default_rng([seed, _MTP_SEED + extra]))
        tensors |= _named(f"model.layers.{config['num_hidden_layers'] + extra}", layer)
    return tensors


def _layer(config: Mapping[str, Any], index: int, random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden = config["hidden_size"]
    yield "input_layernorm.weight", _norm(random, hidden)
    yield "post_attention_layernorm.weight", _norm(random, hidden)
    layers, group = config["num_hidden_layers"], config["layer_group_size"]
    is_mla = (index + 1) % group == 0 or index >= layers // group * group
    yield from _mla(config, random) if is_mla else _kda(config, random)
    if index < config["first_k_dense_replace"]:
        yield from _mlp("mlp", hidden, config["intermediate_size"], random)
    else:
        yield from _moe(config, random)


def _kda(config: Mapping[str, Any], random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    width, taps = heads * head_dim, config["short_conv_kernel_size"]
    for letter in "qkvfg":
        yield f"attention.{letter}_proj.weight", _linear(random, width, hidden)
    yield "attention.b_proj.weight", _linear(random, heads, hidden)
    for letter in "qkv":
        yield f"attention.{letter}_conv1d.weight", random.standard_normal((width, 1, taps), np.float32) / taps**0.5
    yield "attention.A_log", np.log(random.uniform(0.5, 4.0, heads)).astype(np.float32)
    yield "attention.dt_bias", random.uniform(-4.0, 1.0, width).astype(np.float32)
    yield "attention.o_norm.weight", _norm(random, head_dim)
    yield "attention.o_proj.weight", _linear(random, hidden, width)


def _mla(config: Mapping[str, Any], random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank = config["q_lora_rank"]
    if q_rank is None:
        yield "attention.q_proj.weight", _linear(random, heads * (nope + rope), hidden)
    else:
        yield "attention.q_a_proj.weight", _linear(random, q_rank, hidden)
        yield "attention.q_a_layernorm.weight", _norm(random, q_rank)
        yield "attention.q_b_proj.weight", _linear(random, heads * (nope + rope), q_rank)
    yield "attention.kv_a_proj_with_mqa.weight", _linear(random, rank + rope, hidden)
    yield "attention.kv_a_layernorm.weight", _norm(random, rank)
    yield "attention.kv_b_proj.weight", _linear(random, heads * (nope + value), rank)
    yield "attention.g_proj.weight", _linear(random, heads, hidden)
    yield "attention.dense.weight", _linear(random, hidden, heads * value)


def _moe(config: Mapping[str, Any], random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield "mlp.gate.weight", _linear(random, experts, hidden)
    yield "mlp.gate.expert_bias", random.uniform(-0.1, 0.1, experts).astype(np.float32)
    for expert in range(experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"], random)
    shared = config["moe_shared_expert_intermediate_size"] * config["num_shared_experts"]
    if shared:
        yield from _mlp("mlp.shared_experts", hidden, shared, random)


def _mlp(prefix: str, hidden: int, inner: int, random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{prefix}.gate_proj.weight", _linear(random, inner, hidden)
    yield f"{prefix}.up_proj.weight", _linear(random, inner, hidden)
    yield f"{prefix}.down_proj.weight", _linear(random, hidden, inner)


def _mtp_layer(config: Mapping[str, Any], random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    hidden = config["hidden_size"]
    for name in ("enorm", "hnorm", "final_layernorm", "input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", _norm(random, hidden)
    yield "eh_proj.weight", _linear(random, hidden, 2 * hidden)
    yield from _mla(config, random)
    yield from _moe(config, random)


def _linear(random: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    return random.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)


def _norm(random: np.random.Generator, width: int) -> np.ndarray:
    return (1.0 + 0.1 * random.standard_normal(width)).astype(np.float32)


def _named(prefix: str, tensors: Iterator[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{prefix}.{name}": value for name, value in tensors}


def _as_mlx_lm(official: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What `mlx_lm.convert` makes of the official tensors, in numpy."""
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    converted: dict[str, np.ndarray] = {}
    for name, array in official.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if layer >= config["num_hidden_layers"]:
            continue
        if name.endswith("kv_b_proj.weight"):
            per_head = array.reshape(heads, nope + value, -1)
            prefix = name.removesuffix("kv_b_proj.weight")
            converted[prefix + "embed_q.weight"] = np.ascontiguousarray(per_head[:, :nope].swapaxes(1, 2))
            converted[prefix + "unembed_out.weight"] = np.ascontiguousarray(per_head[:, nope:])
        elif name.endswith("_conv1d.weight"):
            converted[name] = np.ascontiguousarray(array.swapaxes(1, 2))
        elif ".mlp.experts." in name:
            prefix, rest = name.split(".mlp.experts.")
            expert, projection = rest.split(".", 1)
            if expert == "0":
                stack = [official[f"{prefix}.mlp.experts.{i}.{projection}"] for i in range(config["num_experts"])]
                converted[f"{prefix}.mlp.switch_mlp.{projection}"] = np.stack(stack)
        else:
            converted[name] = array
    return converted


@functools.cache
def _cached(key: str) -> Path:
    overrides, options = json.loads(key)
    folder = Path(tempfile.mkdtemp(prefix="ling-checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_checkpoint(folder, overrides, **options)
