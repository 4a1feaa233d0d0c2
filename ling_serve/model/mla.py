"""Multi-head latent attention with a gate per head: one cached latent per token, shared by all heads."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from ling_kernels.paged_mla_decode import paged_mla_decode
from ling_kernels.softmax import unnormalised_softmax
from mlx_lm.models.mla import MultiLinear

from ling_serve.cache.caches import Caches
from ling_serve.model.config import ModelConfig
from ling_serve.model.dense_weights import dense_weight
from ling_serve.model.forward_batch import ForwardBatch
from ling_serve.model.joined import join, products
from ling_serve.model.mla_plan import AbsorbedGroup, MaterialisedPiece, MlaPlan
from ling_serve.model.projection import Projection
from ling_serve.model.rope import rotate, softmax_scale


class MlaAttention(nn.Module):
    """Queries through a low-rank pair or one projection, keys and values through latents.

    The cached row of a token is `kv_a_layernorm(c) ‖ rotated k`. Scores, softmax and the gate are float32.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.num_heads = heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_dim, self.value_dim = config.kv_lora_rank, config.v_head_dim
        self.scale = softmax_scale(config)
        if config.q_lora_rank is None:
            self.q_proj = Projection(hidden, heads * config.qk_head_dim)
        else:
            self.q_a_proj = Projection(hidden, config.q_lora_rank)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = Projection(config.q_lora_rank, heads * config.qk_head_dim)
        self._inputs = (("q_proj" if config.q_lora_rank is None else "q_a_proj",), ("kv_a_proj_with_mqa",), ("g_proj",))
        self.kv_a_proj_with_mqa = Projection(hidden, config.latent_width)
        self.kv_a_layernorm = nn.RMSNorm(self.latent_dim, eps=config.rms_norm_eps)
        self.embed_q = MultiLinear(self.nope_dim, self.latent_dim, heads)
        self.unembed_out = MultiLinear(self.latent_dim, self.value_dim, heads)
        self.g_proj = Projection(hidden, heads)
        self.dense = Projection(heads * self.value_dim, hidden)

    def __call__(self, x: mx.array, batch: ForwardBatch, caches: Caches, layer: int, plan: MlaPlan) -> mx.array:
        """x [N, hidden] → [N, hidden]; appends the batch's latents to the pool of model layer `layer`."""
        N = x.shape[0]
        q, latent, gate = products(self, self._inputs, x)
        if "q_b_proj" in self:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.reshape(N, self.num_heads, -1)
        c, k_rope = mx.split(latent, [self.latent_dim], axis=-1)
        rotary = rotate(mx.concatenate([q[..., self.nope_dim :], k_rope[:, None]], axis=1), plan.turns)
        q_nope = q[..., : self.nope_dim].astype(mx.float32) * self.scale  # [N, H, nope]
        q_rope = rotary[:, :-1] * self.scale  # [N, H, rope]
        latents = mx.concatenate([self.kv_a_layernorm(c), rotary[:, -1].astype(x.dtype)], axis=-1)
        # Written before it is read: the pool's buffer is then updated in place.
        caches.latents.write(layer, batch.write_at, latents)

        parts = [
            self._absorbed(q_nope[group.rows], q_rope[group.rows], caches.latents.blocks(layer), group)
            for group in plan.absorbed
        ]
        for piece in plan.materialised:
            context = latents[piece.rows]
            if piece.page_ids is not None:
                context = caches.latents.pages(layer, piece.page_ids)[0, : piece.context_len]
            parts.append(self._materialised(q_nope[piece.rows], q_rope[piece.rows], context, piece))
        mixed = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        mixed = mixed if plan.back is None else mixed[plan.back]  # [N, H, v]

        gate = mx.sigmoid(gate.astype(mx.float32))
        return self.dense((mixed * gate[..., None]).reshape(N, -1).astype(x.dtype))

    def fuse(self) -> None:
        """Rearrange float32 weights for a CPU."""
        join(self, self._inputs)

    def _absorbed(self, q_nope: mx.array, q_rope: mx.array, pool: mx.array, group: AbsorbedGroup) -> mx.array:
        """Queries [r·T, H, nope] and [r·T, H, rope] over the group's pages → [r·T, H, v] float32."""
        r, T, _ = group.bias.shape
        absorbed = cast("mx.array", self.embed_q(q_nope.swapaxes(0, 1)))  # [H, r·T, latent]
        queries = mx.concatenate([absorbed.swapaxes(0, 1), q_rope], axis=-1).reshape(r, T, self.num_heads, -1)
        mixed = paged_mla_decode(queries, pool, group.page_ids, group.bias, self.latent_dim)
        mixed = mixed.reshape(r * T, self.num_heads, -1).swapaxes(0, 1)
        return cast("mx.array", self.unembed_out(mixed)).swapaxes(0, 1)

    def _materialised(
        self, q_nope: mx.array, q_rope: mx.array, context: mx.array, piece: MaterialisedPiece
    ) -> mx.array:
        """Queries [T, H, nope] and [T, H, rope] over the context [L, latent + rope] → [T, H, v] float32.

        Keys and values are expanded once, a few heads at a time where they are many; tiles of query rows then read only
        what their last row may see.
        """
        context = context.astype(mx.float32)
        c, k_rope = mx.contiguous(context[:, : self.latent_dim]), context[:, self.latent_dim :]
        queries = mx.concatenate([q_nope, q_rope], axis=-1).swapaxes(0, 1)  # [H, T, nope + rope]
        outputs: list[mx.array] = []
        for first in range(0, self.num_heads, piece.tile_heads):
            heads = slice(first, min(first + piece.tile_heads, self.num_heads))
            k_nope = c @ dense_weight(self.embed_q, heads)  # [h, L, nope]
            keys = mx.concatenate([k_nope, mx.broadcast_to(k_rope, (*k_nope.shape[:2], self.rope_dim))], axis=-1)
            values = c @ dense_weight(self.unembed_out, heads).swapaxes(-1, -2)  # [h, L, v]
            outputs.append(_attend_causally(queries[heads], keys, values, piece))
        return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).swapaxes(0, 1)


def _attend_causally(queries: mx.array, keys: mx.array, values: mx.array, piece: MaterialisedPiece) -> mx.array:
    """queries [h, T, d] that end the context, keys [h, L, d], values [h, L, v] → [h, T, v]."""
    T, L = queries.shape[1], piece.context_len
    tiles: list[mx.array] = []
    for start in range(0, T, piece.tile_rows):
        end = min(start + piece.tile_rows, T)
        seen = L - T + end
        bias = piece.bias[piece.tile_rows - (end - start) :, L - seen :]
        scores = queries[:, start:end] @ keys[:, :seen].swapaxes(-1, -2) + bias
        weights, total = unnormalised_softmax(scores)
        tiles.append(weights @ values[:, :seen] / total)
    return mx.concatenate(tiles, axis=1)
