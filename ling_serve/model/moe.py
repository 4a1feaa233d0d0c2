"""Mixture of experts: a grouped sigmoid router, the routed experts, and the shared ones."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ling_serve.model.config import LayerPlan, ModelConfig
from ling_serve.model.experts import Experts, RoutedExperts
from ling_serve.model.mlp import GatedMlp


class ExpertRouter(nn.Module):
    """Chooses experts for each token in float32.

    s = sigmoid(x Wᵀ), c = s + bias. A group scores the sum of its two best c; the best `topk_group` groups stay, and
    of their experts the best `num_experts_per_tok` by c. Weights come from s alone: s / (Σ s + 1e-20) · scaling.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_groups = config.n_group
        self.kept_groups = config.topk_group
        self.normalised = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        self.weight = mx.zeros((config.num_experts, config.hidden_size))
        self.expert_bias = mx.zeros((config.num_experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [N, hidden] → expert ids [N, k] and weights [N, k] float32."""
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.astype(mx.float32).T)  # [N, E]
        biased = scores + self.expert_bias
        if self.kept_groups < self.num_groups:
            biased = self._without_weak_groups(biased)
        experts = mx.argpartition(-biased, kth=self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        if self.normalised:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * self.scaling

    def _without_weak_groups(self, biased: mx.array) -> mx.array:
        """[N, E] → the same with -inf for the experts of all but the best groups."""
        groups = biased.reshape(biased.shape[0], self.num_groups, -1)
        strength = mx.topk(groups, 2, axis=-1).sum(axis=-1)  # [N, G]
        weak = mx.argpartition(strength, kth=self.num_groups - self.kept_groups - 1, axis=-1)
        weak = weak[:, : self.num_groups - self.kept_groups, None]
        return mx.put_along_axis(groups, weak, mx.array(-mx.inf), axis=1).reshape(biased.shape)


class MixtureOfExperts(nn.Module):
    """Routed experts weighted by the router, plus the shared experts."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.gate = ExpertRouter(config)
        self.switch_mlp: Experts = RoutedExperts(config, plan.swiglu_limit)
        if config.num_shared_experts:
            self.shared_experts = GatedMlp(
                config.hidden_size, config.shared_intermediate_size, plan.shared_swiglu_limit
            )

    def __call__(self, x: mx.array) -> mx.array:
        """[N, hidden] → [N, hidden]."""
        experts, weights = self.gate(x)
        outputs = self.switch_mlp(x, experts)  # [N, k, hidden]
        routed = (weights[:, None] @ outputs.astype(mx.float32)).squeeze(1).astype(x.dtype)
        return routed + self.shared_experts(x) if "shared_experts" in self else routed

    def fuse(self) -> None:
        """Rearrange float32 weights for a CPU."""
        if isinstance(self.switch_mlp, RoutedExperts):
            self.switch_mlp = self.switch_mlp.fused()
        if "shared_experts" in self:
            self.shared_experts.fuse()
