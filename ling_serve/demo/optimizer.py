"""What both backends' optimisers share: which rule a parameter follows, and the numbers of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The quintic's coefficients of Keller Jordan's Muon: singular values land near 1 after five rounds."""
NEWTON_SCHULZ_ROUNDS = 5

_NOT_MUON = ("word_embeddings", "lm_head", "mlp.gate.", "conv1d", "b_proj")


@dataclass(frozen=True)
class OptimizerOptions:
    """Muon for the hidden matrices, AdamW for the rest. A Muon update is scaled to the root mean square that AdamW's
    usually has."""

    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.05
    max_norm: float = 1.0
    update_rms: float = 0.2
    adam_share: float = 0.5
    """AdamW's learning rate relative to Muon's."""


def uses_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether the parameter is a hidden matrix, or a stack of them."""
    return len(shape) > 1 and min(shape[-2:]) >= 16 and not any(part in name for part in _NOT_MUON)
