"""Mixture of experts: a grouped sigmoid router, experts over tokens sorted by expert, and the shared experts."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ling_serve.model.config import LayerPlan, ModelConfig
from ling_serve.model.dense_weights import dense_weight
from ling_serve.model.mlp import GatedMlp, clamped_swiglu
from ling_serve.model.projection import prefers_dense

MIN_SORTED_ROWS = 64
"""(token, expert) pairs from which sorting them by expert pays."""
MIN_ROWS_PER_EXPERT = 32
"""Mean rows of an expert from which, on a CPU, one dense product per expert beats gathered ones."""


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


class RoutedExperts(nn.Module):
    """The routed experts' projections, stacked `[experts, out, in]`."""

    gate_proj: SwitchLinear | QuantizedSwitchLinear
    up_proj: SwitchLinear | QuantizedSwitchLinear
    down_proj: SwitchLinear | QuantizedSwitchLinear

    def __init__(self, config: ModelConfig, limit: float | None) -> None:
        super().__init__()
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.gate_proj = SwitchLinear(hidden, inner, count, bias=False)
        self.up_proj = SwitchLinear(hidden, inner, count, bias=False)
        self.down_proj = SwitchLinear(inner, hidden, count, bias=False)
        self.limit = limit

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [N, hidden], experts [N, k] → each chosen expert's output [N, k, hidden]."""
        N, k = experts.shape
        loops = self._prefers_loop(N * k)
        if N * k < MIN_SORTED_ROWS and not loops:
            return self._gathered(x.reshape(N, 1, 1, -1), experts, in_order=False).squeeze(-2)
        flat = experts.reshape(-1)
        order = mx.argsort(flat)
        back = mx.argsort(order)
        rows = x[order // k]  # [N * k, hidden], sorted by expert
        if loops:
            outputs = self._looped(rows, flat)
        else:
            outputs = self._gathered(rows.reshape(N * k, 1, -1), flat[order], in_order=True).squeeze(-2)
        return outputs[back].reshape(N, k, -1)

    def _prefers_loop(self, num_rows: int) -> bool:
        """On a CPU: many rows per expert, few ones of weights slow to multiply with, or 16-bit ones, which MLX has no
        gathered product for there."""
        if mx.default_device().type != mx.DeviceType.cpu:
            return False
        mean_rows = num_rows // self.gate_proj.num_experts
        plain_16_bit = "scales" not in self.gate_proj and self.gate_proj.weight.dtype != mx.float32
        return plain_16_bit or mean_rows >= MIN_ROWS_PER_EXPERT or prefers_dense(self.gate_proj, mean_rows)

    def _gathered(self, rows: mx.array, experts: mx.array, *, in_order: bool) -> mx.array:
        """rows [..., 1, hidden] through the expert named for each."""
        gate = self.gate_proj(rows, experts, sorted_indices=in_order)
        up = self.up_proj(rows, experts, sorted_indices=in_order)
        return self.down_proj(clamped_swiglu(gate, up, self.limit), experts, sorted_indices=in_order)

    def _looped(self, rows: mx.array, experts: mx.array) -> mx.array:
        """rows [M, hidden] sorted by expert, expert by expert in float32; `experts` [M] in any order is read here."""
        counts = (experts[:, None] == mx.arange(self.gate_proj.num_experts)).sum(axis=0)
        outputs: list[mx.array] = []
        start = 0
        for expert, count in enumerate(cast("list[int]", counts.tolist())):
            if count:
                x = rows[start : start + count].astype(mx.float32)
                gate = x @ dense_weight(self.gate_proj, expert).T
                up = x @ dense_weight(self.up_proj, expert).T
                outputs.append(clamped_swiglu(gate, up, self.limit) @ dense_weight(self.down_proj, expert).T)
                start += count
        return mx.concatenate(outputs)


class MixtureOfExperts(nn.Module):
    """Routed experts weighted by the router, plus the shared experts."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.gate = ExpertRouter(config)
        self.switch_mlp = RoutedExperts(config, plan.swiglu_limit)
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
