"""Kimi Delta Attention for one new token of many sequences (decode)."""

from ling_kernels.kda_step.reference import kda_gate, kda_recurrent, kda_step

__all__ = ["kda_gate", "kda_recurrent", "kda_step"]
