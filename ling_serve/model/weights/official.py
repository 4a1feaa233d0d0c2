"""The published layout: one tensor for each expert, keys and values of MLA in one projection, PyTorch convolutions.

.mlp.experts.{i}.{gate,up,down}_proj.weight  [out, in]                → .mlp.switch_mlp.*.weight  [E, out, in]
.attention.kv_b_proj.weight                  [H * (nope + v), rank]   → .attention.embed_q.weight [H, rank, nope]
                                                                        .attention.unembed_out.weight [H, v, rank]
.attention.{q,k,v}_conv1d.weight             [P, 1, taps]             → [P, taps, 1]
.attention.A_log                             [1, 1, H, 1]             → [H]
.mlp.gate.e_score_correction_bias            [E]                      → .mlp.gate.expert_bias
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ling_serve.model.config import ModelConfig
from ling_serve.model.weights.recipe import Kind, Recipe, Source, Target


def official(target: Target, config: ModelConfig) -> Iterator[Recipe]:
    if target.kind is not Kind.FLOAT:
        return
    if ".mlp.switch_mlp." in target.path:
        yield _experts(target)
    elif target.path.endswith((".attention.embed_q.weight", ".attention.unembed_out.weight")):
        yield _half_of_kv_b(target, config)
    elif target.path.endswith("_conv1d.weight"):
        width, taps, _ = target.shape
        source = Source(target.path, ((width, 1, taps),))
        yield Recipe("convolutions [channels, 1, taps]", (source,), lambda parts: parts[0].swapaxes(1, 2))
    elif target.leaf == "A_log":
        (heads,) = target.shape
        source = Source(target.path, ((1, 1, heads, 1),))
        yield Recipe("A_log [1, 1, heads, 1]", (source,), lambda parts: parts[0].reshape(target.shape))
    elif target.leaf == "expert_bias":
        source = Source(f"{target.module}.e_score_correction_bias", (target.shape,))
        yield Recipe("router bias under the name e_score_correction_bias", (source,), lambda parts: parts[0])


def _experts(target: Target) -> Recipe:
    count, *shape = target.shape
    names = [target.path.replace(".switch_mlp.", f".experts.{expert}.") for expert in range(count)]
    return Recipe(
        "one tensor for each expert",
        tuple(Source(name, (tuple(shape),)) for name in names),
        lambda parts: mx.stack(list(parts)),
    )


def _half_of_kv_b(target: Target, config: ModelConfig) -> Recipe:
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rank = config.kv_lora_rank
    prefix, _, name = target.module.rpartition(".")

    def build(parts: Sequence[mx.array]) -> mx.array:
        per_head = parts[0].reshape(heads, nope + value, rank)
        if name == "unembed_out":
            return per_head[:, nope:]  # [H, v, rank]
        return per_head[:, :nope].swapaxes(1, 2)  # [H, rank, nope]

    source = Source(f"{prefix}.kv_b_proj.weight", ((heads * (nope + value), rank),))
    return Recipe("keys and values of MLA in one kv_b_proj", (source,), build)
