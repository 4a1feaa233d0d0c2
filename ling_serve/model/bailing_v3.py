"""Bailing V3 (Ling-3.0): KDA and MLA layers, dense and mixture-of-experts blocks, over one packed batch."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from ling_kernels.device import on_cpu

from ling_serve.cache.caches import Caches
from ling_serve.model.config import AttentionKind, LayerPlan, MlpKind, ModelConfig
from ling_serve.model.forward_batch import ForwardBatch
from ling_serve.model.kda import KdaAttention
from ling_serve.model.mla import MlaAttention
from ling_serve.model.mla_plan import MlaPlan, plan_mla
from ling_serve.model.mlp import GatedMlp
from ling_serve.model.moe import MixtureOfExperts
from ling_serve.model.projection import Projection
from ling_serve.model.rope import RotaryTurns

_ATTENTION = {AttentionKind.KDA: KdaAttention, AttentionKind.MLA: MlaAttention}


MOST_STARTED_TOKENS = 32
"""Steps of more tokens compute for so long that building their graph matters little, and are measured for the memory
plan: their peak must not depend on how far the computation gets while the graph is built."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.index = plan.index
        self.attention = _ATTENTION[plan.attention](config)
        self.mlp = (
            MixtureOfExperts(config, plan)
            if plan.mlp is MlpKind.MOE
            else GatedMlp(config.hidden_size, config.intermediate_size, limit=None)
        )
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, batch: ForwardBatch, caches: Caches, mla_plan: MlaPlan | None) -> mx.array:
        """[N, hidden] → [N, hidden]. `mla_plan` is present whenever the model has an MLA layer."""
        normed = self.input_layernorm(x)
        if isinstance(self.attention, MlaAttention):
            assert mla_plan is not None
            x = x + self.attention(normed, batch, caches, self.index, mla_plan)
        else:
            x = x + self.attention(normed, batch, caches, self.index)
        _start(x)
        x = x + self.mlp(self.post_attention_layernorm(x))
        _start(x)
        return x


class BailingBody(nn.Module):
    """Everything but the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, plan) for plan in config.layers]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class BailingV3(nn.Module):
    """The model. Parameter paths are those of mlx-lm's `bailing_moe_v3`, so its conversions load as they are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = BailingBody(config)
        if not config.tie_word_embeddings:
            self.lm_head = Projection(config.hidden_size, config.vocab_size)
        self._config = config
        self._turns = RotaryTurns(config)

    def __call__(self, batch: ForwardBatch, caches: Caches) -> mx.array:
        """Run N packed tokens → hidden states [N, hidden] after the final norm; appends to the caches."""
        plan = None
        if self._config.mla_layers:
            plan = plan_mla(self._config, batch, caches.latents.block_size, self._turns)
        x = self.model.word_embeddings(batch.tokens)
        for layer in self.model.layers:
            x = layer(x, batch, caches, plan)
        return self.model.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden [L, hidden] → [L, vocab_size]."""
        if "lm_head" in self:
            return self.lm_head(hidden)
        return self.model.word_embeddings.as_linear(hidden)

    def fuse(self) -> None:
        """On a CPU, rearrange float32 weights for speed, layer by layer; elsewhere, and for other weights, do nothing.

        Parameter paths change: load first. Memory holds one layer's weights twice at most.
        """
        if not on_cpu():
            return
        for layer in self.model.layers:
            layer.attention.fuse()
            layer.mlp.fuse()
            mx.clear_cache()


def _start(x: mx.array) -> None:
    """On a CPU, let the computation of `x` begin while Python builds the rest of the graph.

    Decoding is short enough there for the two to take turns otherwise: a fifth of a step's time.
    """
    if x.shape[0] <= MOST_STARTED_TOKENS and on_cpu():
        mx.async_eval(x)
