"""Bailing V3 for one sequence in float64 NumPy, written from its formulas: no chunks, no pages, no absorption.

Every product is spelled out, the KDA state advances token by token, and attention forms all keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def dense_logits(values: Mapping[str, Any], parameters: Mapping[str, Any], tokens: Sequence[int]) -> Array:
    """Logits [tokens, vocab] float64 of the config.json object `values`, with parameters named as in the model."""
    p = {name: np.array(array, dtype=np.float64) for name, array in parameters.items()}
    x = p["model.word_embeddings.weight"][list(tokens)]
    layers, group = values["num_hidden_layers"], values["layer_group_size"]
    for i in range(layers):
        w = {
            name.removeprefix(f"model.layers.{i}."): a for name, a in p.items() if name.startswith(f"model.layers.{i}.")
        }
        normed = rms_norm(x, w["input_layernorm.weight"], values)
        is_mla = (i + 1) % group == 0 or i >= layers // group * group
        x = x + (mla(normed, w, values) if is_mla else kda(normed, w, values))
        normed = rms_norm(x, w["post_attention_layernorm.weight"], values)
        if i < values["first_k_dense_replace"]:
            x = x + gated_mlp(normed, w, "mlp.", None)
        else:
            x = x + moe(normed, w, values, limit(values, "expert_swiglu_limit_list", i))
            if values["num_shared_experts"]:
                shared_limit = limit(values, "share_expert_swiglu_limit_list", i)
                x = x + gated_mlp(normed, w, "mlp.shared_experts.", shared_limit)
    x = rms_norm(x, p["model.norm.weight"], values)
    head = p["model.word_embeddings.weight"] if values.get("tie_word_embeddings") else p["lm_head.weight"]
    return x @ head.T


def kda(x: Array, w: Mapping[str, Array], values: Mapping[str, Any]) -> Array:
    T, H, D = len(x), values["num_attention_heads"], values["head_dim"]
    q, k, v = (
        silu(causal_conv(x @ w[f"attention.{n}_proj.weight"].T, w[f"attention.{n}_conv1d.weight"])).reshape(T, H, D)
        for n in "qkv"
    )
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * D**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    f = (x @ w["attention.f_proj.weight"].T + w["attention.dt_bias"]).reshape(T, H, D)
    g = values["kda_lower_bound"] * sigmoid(np.exp(w["attention.A_log"])[:, None] * f)
    beta = sigmoid(x @ w["attention.b_proj.weight"].T)
    S = np.zeros((H, D, D))  # [head, key, value]
    o = np.zeros((T, H, D))
    for t in range(T):
        for h in range(H):
            S[h] = np.exp(g[t, h])[:, None] * S[h]
            u = beta[t, h] * (v[t, h] - k[t, h] @ S[h])
            S[h] += np.outer(k[t, h], u)
            o[t, h] = q[t, h] @ S[h]
    o = rms_norm(o, w["attention.o_norm.weight"], values)
    o = o * sigmoid(x @ w["attention.g_proj.weight"].T).reshape(T, H, D)
    return o.reshape(T, H * D) @ w["attention.o_proj.weight"].T


def mla(x: Array, w: Mapping[str, Array], values: Mapping[str, Any]) -> Array:
    T, H = len(x), values["num_attention_heads"]
    nope, rope, latent = values["qk_nope_head_dim"], values["qk_rope_head_dim"], values["kv_lora_rank"]
    if values["q_lora_rank"] is None:
        q = x @ w["attention.q_proj.weight"].T
    else:
        q = rms_norm(x @ w["attention.q_a_proj.weight"].T, w["attention.q_a_layernorm.weight"], values)
        q = q @ w["attention.q_b_proj.weight"].T
    q = q.reshape(T, H, nope + rope)
    compressed = x @ w["attention.kv_a_proj_with_mqa.weight"].T
    c = rms_norm(compressed[:, :latent], w["attention.kv_a_layernorm.weight"], values)
    q_rope = rotate(q[..., nope:], values)
    k_rope = rotate(compressed[:, None, latent:], values)[:, 0]
    gate = sigmoid(x @ w["attention.g_proj.weight"].T)  # [T, H]
    heads = []
    for h in range(H):
        keys = np.concatenate([c @ w["attention.embed_q.weight"][h], k_rope], axis=-1)
        value = c @ w["attention.unembed_out.weight"][h].T
        scores = np.concatenate([q[:, h, :nope], q_rope[:, h]], axis=-1) @ keys.T * attention_scale(values)
        scores[np.triu_indices(T, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ value * gate[:, h : h + 1])
    return np.concatenate(heads, axis=-1) @ w["attention.dense.weight"].T


def moe(x: Array, w: Mapping[str, Array], values: Mapping[str, Any], clamp: float | None) -> Array:
    """The routed experts only."""
    scores = sigmoid(x @ w["mlp.gate.weight"].T)
    biased = scores + w["mlp.gate.expert_bias"]
    group_size = values["num_experts"] // values["n_group"]
    out = np.zeros_like(x)
    for t in range(len(x)):
        groups = biased[t].reshape(-1, group_size)
        strength = np.sort(groups, axis=-1)[:, -2:].sum(-1)
        kept = np.argsort(-strength)[: values["topk_group"]]
        allowed = [g * group_size + e for g in kept for e in range(group_size)]
        chosen = sorted(allowed, key=lambda e: -biased[t, e])[: values["num_experts_per_tok"]]
        total = scores[t, chosen].sum() + 1e-20 if values.get("norm_topk_prob", True) else 1.0
        for e in chosen:
            one = {n: w[f"mlp.switch_mlp.{n}_proj.weight"][e] for n in ("gate", "up", "down")}
            y = swiglu(one["gate"] @ x[t], one["up"] @ x[t], clamp) @ one["down"].T
            out[t] += y * scores[t, e] / total * values["routed_scaling_factor"]
    return out


def gated_mlp(x: Array, w: Mapping[str, Array], prefix: str, clamp: float | None) -> Array:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return swiglu(gate, up, clamp) @ w[f"{prefix}down_proj.weight"].T


def swiglu(gate: Array, up: Array, clamp: float | None) -> Array:
    if clamp is None:
        return silu(gate) * up
    return np.minimum(silu(gate), clamp) * np.clip(up, -clamp, clamp)


def limit(values: Mapping[str, Any], name: str, layer: int) -> float | None:
    entries = values.get(name) or []
    return (entries[layer] or None) if layer < len(entries) else None


def causal_conv(x: Array, weight: Array) -> Array:
    """x [T, P], weight [P, taps, 1], the last tap being the present token's."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return sum(padded[tap : tap + len(x)] * weight[:, tap, 0] for tap in range(taps))


def rotate(x: Array, values: Mapping[str, Any]) -> Array:
    """x [T, heads, rope] at positions 0 : T."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * np.outer(np.arange(len(x)), frequencies(values)))[:, None]
    scaling = values.get("rope_scaling")
    if scaling:
        turned *= magnitude(scaling, scaling.get("mscale", 1.0)) / magnitude(
            scaling, scaling.get("mscale_all_dim", 0.0)
        )
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def frequencies(values: Mapping[str, Any]) -> Array:
    dims, theta, scaling = values["qk_rope_head_dim"], values["rope_theta"], values.get("rope_scaling")
    plain = theta ** (-np.arange(0, dims, 2) / dims)
    if not scaling:
        return plain
    context = scaling.get("original_max_position_embeddings", 4096)

    def pair_with_turns(turns: float) -> float:
        # theta^(-2 i / dims) * context = 2 pi turns, solved for i
        return dims / 2 * math.log(context / (2 * math.pi * turns)) / math.log(theta)

    low = max(math.floor(pair_with_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_with_turns(scaling.get("beta_slow", 1))), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / scaling["factor"] * ramp


def attention_scale(values: Mapping[str, Any]) -> float:
    scale = (values["qk_nope_head_dim"] + values["qk_rope_head_dim"]) ** -0.5
    scaling = values.get("rope_scaling")
    return scale * magnitude(scaling, scaling.get("mscale_all_dim", 0.0)) ** 2 if scaling else scale


def magnitude(scaling: Mapping[str, Any], mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0


def rms_norm(x: Array, weight: Array, values: Mapping[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + values["rms_norm_eps"]) * weight


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)
