"""The routed experts over tokens sorted by expert, with their weights as stored or as a CPU reads them fastest."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from ling_kernels.device import on_cpu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ling_serve.model.config import ModelConfig
from ling_serve.model.dense_weights import dense_weight
from ling_serve.model.joined import input_major, is_plain_float32
from ling_serve.model.mlp import clamped_swiglu
from ling_serve.model.projection import prefers_dense

MIN_SORTED_ROWS = 64
"""(token, expert) pairs from which sorting them by expert pays."""
MIN_SORTED_ROWS_INPUT_MAJOR = 16
"""The same for weights stored input-major."""
MIN_ROWS_PER_EXPERT = 32
"""Mean rows of an expert from which, on a CPU, one dense product per expert beats gathered ones."""


class Experts(nn.Module):
    """Sorts (token, expert) pairs by expert where that pays; how weights are stored is left to the subclass."""

    def __init__(self, num_experts: int, limit: float | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.limit = limit

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [N, hidden], experts [N, k] → each chosen expert's output [N, k, hidden]."""
        N, k = experts.shape
        loops = self._prefers_loop(N * k)
        if not loops and N * k < self._min_sorted_rows():
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

    @abstractmethod
    def _min_sorted_rows(self) -> int: ...

    @abstractmethod
    def _prefers_loop(self, num_rows: int) -> bool: ...

    @abstractmethod
    def _gathered(self, rows: mx.array, experts: mx.array, *, in_order: bool) -> mx.array:
        """rows [..., 1, hidden] through the expert named for each."""

    @abstractmethod
    def _one(self, rows: mx.array, expert: int) -> mx.array:
        """rows [m, hidden] float32 through one expert."""

    def _looped(self, rows: mx.array, experts: mx.array) -> mx.array:
        """rows [M, hidden] sorted by expert, expert by expert in float32; `experts` [M] in any order is read here."""
        counts = (experts[:, None] == mx.arange(self.num_experts)).sum(axis=0)
        outputs: list[mx.array] = []
        start = 0
        for expert, count in enumerate(cast("list[int]", counts.tolist())):
            if count:
                outputs.append(self._one(rows[start : start + count].astype(mx.float32), expert))
                start += count
        return mx.concatenate(outputs)


class RoutedExperts(Experts):
    """The routed experts' projections, stacked `[experts, out, in]`."""

    gate_proj: SwitchLinear | QuantizedSwitchLinear
    up_proj: SwitchLinear | QuantizedSwitchLinear
    down_proj: SwitchLinear | QuantizedSwitchLinear

    def __init__(self, config: ModelConfig, limit: float | None) -> None:
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        super().__init__(count, limit)
        self.gate_proj = SwitchLinear(hidden, inner, count, bias=False)
        self.up_proj = SwitchLinear(hidden, inner, count, bias=False)
        self.down_proj = SwitchLinear(inner, hidden, count, bias=False)

    def fused(self) -> Experts:
        """The same experts input-major if their weights are float32, else these; these lose what was rearranged."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        return InputMajorExperts(self) if all(is_plain_float32(layer) for layer in layers) else self

    def _min_sorted_rows(self) -> int:
        return MIN_SORTED_ROWS

    def _prefers_loop(self, num_rows: int) -> bool:
        """On a CPU: many rows per expert, few ones of weights slow to multiply with, or 16-bit ones, which MLX has no
        gathered product for there."""
        if not on_cpu():
            return False
        mean_rows = num_rows // self.num_experts
        plain_16_bit = "scales" not in self.gate_proj and self.gate_proj.weight.dtype != mx.float32
        return plain_16_bit or mean_rows >= MIN_ROWS_PER_EXPERT or prefers_dense(self.gate_proj, mean_rows)

    def _gathered(self, rows: mx.array, experts: mx.array, *, in_order: bool) -> mx.array:
        gate = self.gate_proj(rows, experts, sorted_indices=in_order)
        up = self.up_proj(rows, experts, sorted_indices=in_order)
        return self.down_proj(clamped_swiglu(gate, up, self.limit), experts, sorted_indices=in_order)

    def _one(self, rows: mx.array, expert: int) -> mx.array:
        gate = rows @ dense_weight(self.gate_proj, expert).T
        up = rows @ dense_weight(self.up_proj, expert).T
        return clamped_swiglu(gate, up, self.limit) @ dense_weight(self.down_proj, expert).T


class InputMajorExperts(Experts):
    """Float32 experts for a CPU: gate and up joined `[experts, hidden, 2 · inner]`, down `[experts, inner, hidden]`.

    MLX multiplies one row at a time there; rows that follow each other through one expert find its weights in cache.
    16 tokens, each through 4 of 16 experts, take 0.9 instead of 1.1 ms where no layer's weights stay in cache.
    """

    def __init__(self, experts: RoutedExperts) -> None:
        """Takes the weights out of `experts`, so that each exists once but for the one being rearranged."""
        super().__init__(experts.num_experts, experts.limit)
        self.gate_up = input_major([experts.gate_proj.weight, experts.up_proj.weight])
        mx.eval(self.gate_up)
        del experts.gate_proj, experts.up_proj
        self.down = input_major([experts.down_proj.weight])
        mx.eval(self.down)
        del experts.down_proj

    def _min_sorted_rows(self) -> int:
        return MIN_SORTED_ROWS_INPUT_MAJOR

    def _prefers_loop(self, num_rows: int) -> bool:
        return num_rows // self.num_experts >= MIN_ROWS_PER_EXPERT

    def _gathered(self, rows: mx.array, experts: mx.array, *, in_order: bool) -> mx.array:
        gate_up = mx.gather_mm(rows, self.gate_up, rhs_indices=experts, sorted_indices=in_order)
        return mx.gather_mm(self._activated(gate_up), self.down, rhs_indices=experts, sorted_indices=in_order)

    def _one(self, rows: mx.array, expert: int) -> mx.array:
        return self._activated(rows @ self.gate_up[expert]) @ self.down[expert]

    def _activated(self, gate_up: mx.array) -> mx.array:
        gate, up = mx.split(gate_up, 2, axis=-1)
        return clamped_swiglu(gate, up, self.limit)
