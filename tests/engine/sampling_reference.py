"""A token's distribution in plain numpy and float64, one row at a time: what the sampler is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ling_serve.engine.request import SamplingParams

Row = NDArray[np.float64]


def edited(
    logits: Iterable[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    blocked: Iterable[int] = (),
) -> Row:
    """Logits [V] after bias, blocked ids and penalties."""
    row = np.array(list(logits), dtype=np.float64)
    for token, value in params.logit_bias.items():
        row[token] += value
    for token in blocked:
        row[token] = -np.inf
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


def distribution(row: Row, params: SamplingParams) -> Row:
    """Probabilities [V] after temperature, min_p, top_k and top_p of edited logits [V]."""
    scaled = (row - row.max()) / params.temperature
    weights = np.exp(scaled)
    weights[weights < params.min_p] = 0.0
    if 0 < params.top_k < len(row):
        weights[weights < np.sort(weights)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        above = np.cumsum(weights[order]) - weights[order]
        kept = np.maximum(params.top_p, 1e-30) * weights.sum() > above
        weights[weights < weights[order][kept].min()] = 0.0
    return weights / weights.sum()


def log_softmax(logits: Iterable[float]) -> Row:
    row = np.array(list(logits), dtype=np.float64)
    row = row - row.max()
    return row - np.log(np.exp(row).sum())
