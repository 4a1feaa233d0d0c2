"""What the largest step takes besides weights and caches, found by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ling_serve.cache import CacheLayout, Caches
from ling_serve.config import EngineOptions
from ling_serve.engine.request import SamplingParams
from ling_serve.engine.runner import Model
from ling_serve.engine.sampler import Sampler, SamplingRow
from ling_serve.model.forward_batch import SHORT_PIECE, ForwardBatch

FAR_START = 2048
"""Tokens of context, at least, before the slice that shows what context costs: short ones are attended to otherwise."""


@dataclass(frozen=True)
class StepCost:
    bytes: int
    """Peak of a step of --max-num-batched-tokens tokens, but for what its context adds."""
    bytes_per_token: int
    """What each token of context adds, the step's own included."""


def measure_step(
    model: Model, layout: CacheLayout, options: EngineOptions, *, vocab_size: int, max_model_len: int
) -> StepCost:
    """Prefill the longest slice at two context lengths, and sample --max-num-seqs rows.

    What grows with the context is taken to grow in proportion; where attention goes by tiles, that is on the safe side.
    """
    tokens = min(options.max_num_batched_tokens, max_model_len - 1)
    far_start = min(max(2 * tokens, FAR_START), max_model_len - tokens)
    block_size = options.block_size
    num_blocks = -(-(far_start + tokens) // block_size)
    caches = Caches.allocate(layout, num_blocks=num_blocks, block_size=block_size, num_slots=1)
    near, far = (
        _peak(lambda start=start: [model(_slice(start, tokens, block_size, vocab_size, caches), caches)], caches)
        for start in (0, far_start)
    )
    slope = 0
    if far_start >= tokens:  # else the context hardly outgrows a step, and the dearer of the two is its end
        slope = max(0, far - near) // far_start
    sampler = Sampler(vocab_size)
    rows = [
        SamplingRow(str(n), SamplingParams(1, top_p=0.9, logprobs=1), seed=n, prompt=(), output=())
        for n in range(options.max_num_seqs)
    ]
    hidden = mx.repeat(model(_slice(0, 1, block_size, vocab_size, caches), caches), len(rows), axis=0)
    sampling = _peak(lambda: sampler.launch(model.logits(hidden), rows).arrays(), caches)
    mx.clear_cache()
    fixed = max(near, far) if slope == 0 else max(0, near - slope * tokens)
    return StepCost(fixed + sampling, slope)


def _slice(start: int, length: int, block_size: int, vocab_size: int, caches: Caches) -> ForwardBatch:
    """Tokens start : start + length of one sequence that owns the first blocks and slot 0."""
    end = start + length
    span = list(range(start, end))
    return ForwardBatch(
        tokens=mx.array([7919 * t % vocab_size for t in span], dtype=mx.int32),
        positions=mx.array(span, dtype=mx.int32),
        cu_seqlens=(0, length),
        num_short=int(length <= SHORT_PIECE),
        page_table=mx.array([list(range(-(-end // block_size)))], dtype=mx.int32),
        context_lens=(end,),
        write_at=mx.array(span, dtype=mx.int32),
        read_slots=(caches.states.zero_slot,),
        write_slots=(0,),
        logit_rows=mx.array([length - 1], dtype=mx.int32),
    )


def _peak(launch: Callable[[], list[mx.array]], caches: Caches) -> int:
    """Bytes by which evaluating what `launch` builds raises the peak."""
    mx.eval(caches.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(launch(), caches.arrays())
    return max(0, mx.get_peak_memory() - before)
