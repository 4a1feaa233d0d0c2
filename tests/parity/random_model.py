"""Small configs and random parameters whose activations stay of order one, shared by name between models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ling_serve.model.bailing_v3 import BailingV3
from ling_serve.model.config import ModelConfig


def small_config(**overrides: Any) -> dict[str, Any]:
    """A valid config.json object: 4 layers (KDA, KDA, KDA, MLA), q_lora, 8 experts in 4 groups."""
    values: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "layer_group_size": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "no_kda_lora": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_interleave": True,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return values | overrides


FLASH_LIKE: dict[str, Any] = {
    "q_lora_rank": None,
    "layer_group_size": 3,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 0.7},
    "expert_swiglu_limit_list": [0, 0, None, 0.3, 0.4],
    "share_expert_swiglu_limit_list": [0, 0, 0.2, 0, 0.5, 0.6],
}
"""Direct queries, YaRN, and clamps that bite: different ones for routed and shared experts."""


def random_parameters(values: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Parameter path → float32 array, for every parameter of the model of this config."""
    rng = np.random.default_rng(seed)
    shapes = {name: array.shape for name, array in tree_flatten(BailingV3(ModelConfig.from_dict(values)).parameters())}
    return {name: mx.array(_random(name, shape, rng).astype(np.float32)) for name, shape in shapes.items()}


def random_model(values: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> BailingV3:
    """The model of a config with `random_parameters`; float32 stays for A_log, dt_bias and expert_bias."""
    model = BailingV3(ModelConfig.from_dict(values))
    parameters = {
        name: array if name.endswith(("A_log", "dt_bias", "expert_bias")) else array.astype(dtype)
        for name, array in random_parameters(values, seed).items()
    }
    model.load_weights(list(parameters.items()), strict=True)
    mx.eval(model.parameters())
    return model


def relative_rms(actual: np.ndarray, expected: np.ndarray) -> float:
    """RMS of the difference over the RMS of `expected`."""
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    return float(np.sqrt((difference**2).mean()) / np.sqrt((expected.astype(np.float64) ** 2).mean()))


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("A_log"):
        return 0.5 * noise
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name.endswith("expert_bias"):
        return 0.1 * noise
    if "conv1d" in name:
        return 0.6 * noise
    if "word_embeddings" in name:
        return noise
    return 1.2 * noise / np.sqrt(shape[-1])
