"""Fresh parameters, and their translation to the official layout and back: NumPy arrays by full name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ling_serve.model.config import AttentionKind, LayerPlan, MlpKind, ModelConfig

Arrays = dict[str, npt.NDArray[np.float32]]

NEVER_BF16 = (".A_log", ".dt_bias", ".expert_bias")
"""Parameters that the official layout keeps in float32."""


def initial_parameters(config: ModelConfig, seed: int) -> Arrays:
    """Float32 parameters by full name. Matrices are normal with variance 1 / inputs, those that write to the residual
    stream smaller by the square root of the number of writes."""
    rng = np.random.default_rng(seed)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    result: Arrays = {}
    for name, shape in _shapes(config).items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            value = np.ones(shape)
        elif name.endswith((".A_log", ".expert_bias")):
            value = np.zeros(shape)
        elif name.endswith(".dt_bias"):  # decays from none to fast
            value = rng.uniform(-6.0, 0.0, shape)
        elif name.endswith("conv1d.weight"):
            value = 0.3 * rng.standard_normal(shape)
            value[:, -1] += 0.7
        else:
            scale = 0.5 if name == "model.word_embeddings.weight" else shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight")):
                scale *= shrink
            value = scale * rng.standard_normal(shape)
        result[name] = value.astype(np.float32)
    return result


def expert_bias_names(config: ModelConfig) -> list[str]:
    """The router's bias of each MoE layer, in the order of the layers."""
    moe = (plan.index for plan in config.layers if plan.mlp is MlpKind.MOE)
    return [f"model.layers.{index}.mlp.gate.expert_bias" for index in moe]


def official_layout(parameters: Mapping[str, npt.NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """The same values with experts one by one, MLA keys and values in one matrix, convolutions as [P, 1, taps]."""
    result: Arrays = {}
    for name, value in parameters.items():
        if "switch_mlp" in name:
            for expert in range(config.num_experts):
                result[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        elif name.endswith("conv1d.weight"):
            result[name] = value.swapaxes(1, 2)
        elif name.endswith("embed_q.weight"):  # [H, c, nope]
            values = parameters[name.replace("embed_q", "unembed_out")]  # [H, v, c]
            both = np.concatenate([value.swapaxes(1, 2), values], axis=1)
            result[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, config.kv_lora_rank)
        elif not name.endswith("unembed_out.weight"):
            result[name] = value
    return result


def from_official_layout(tensors: Mapping[str, npt.NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """The inverse of `official_layout`."""
    result: Arrays = {}
    for name in _shapes(config):
        if "switch_mlp" in name:
            parts = [tensors[name.replace("switch_mlp", f"experts.{i}")] for i in range(config.num_experts)]
            result[name] = np.stack(parts)
        elif name.endswith("conv1d.weight"):
            result[name] = tensors[name].swapaxes(1, 2)
        elif name.endswith(("embed_q.weight", "unembed_out.weight")):
            prefix = name.rsplit(".", 2)[0]
            both = tensors[f"{prefix}.kv_b_proj.weight"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
            result[name] = keys.swapaxes(1, 2) if name.endswith("embed_q.weight") else values
        else:
            result[name] = tensors[name]
    return result


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (config.vocab_size, hidden)}
    for plan in config.layers:
        shapes |= {f"model.layers.{plan.index}.{name}": shape for name, shape in _layer_shapes(config, plan).items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def _layer_shapes(config: ModelConfig, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    attention = _kda_shapes(config) if plan.attention is AttentionKind.KDA else _mla_shapes(config)
    shapes |= {f"attention.{name}": shape for name, shape in attention.items()}
    if plan.mlp is MlpKind.DENSE:
        return shapes | _mlp_shapes("mlp.", (), hidden, config.intermediate_size)
    return (
        shapes
        | {"mlp.gate.weight": (config.num_experts, hidden), "mlp.gate.expert_bias": (config.num_experts,)}
        | _mlp_shapes("mlp.switch_mlp.", (config.num_experts,), hidden, config.moe_intermediate_size)
        | _mlp_shapes("mlp.shared_experts.", (), hidden, config.shared_intermediate_size)
    )


def _mlp_shapes(prefix: str, stack: tuple[int, ...], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (*stack, width, hidden), (*stack, hidden, width)
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _kda_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, width, heads = config.hidden_size, config.kda_width, config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (width, hidden) for name in "qkvfg"}
    shapes |= {f"{name}_conv1d.weight": (width, config.short_conv_kernel_size, 1) for name in "qkv"}
    return shapes | {
        "b_proj.weight": (heads, hidden),
        "A_log": (heads,),
        "dt_bias": (width,),
        "o_norm.weight": (config.head_dim,),
        "o_proj.weight": (hidden, width),
    }


def _mla_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rank, queries = config.q_lora_rank, heads * config.qk_head_dim
    shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
    if rank is not None:
        shapes = {
            "q_a_proj.weight": (rank, hidden),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (queries, rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (latent,),
        "embed_q.weight": (heads, latent, config.qk_nope_head_dim),
        "unembed_out.weight": (heads, config.v_head_dim, latent),
        "g_proj.weight": (heads, hidden),
        "dense.weight": (hidden, heads * config.v_head_dim),
    }
