"""How a token is chosen from logits: pure functions on arrays, row by row, so that a batch changes no row's result.

The order is vLLM's: bias and blocked ids, penalties, temperature, min_p, top_k, top_p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ling_serve.engine.sampling_plan import BiasEntries, Cut, DrawRows, PenaltyRows

_LEAST_UNIFORM = 2.0**-33
_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def add_bias(logits: mx.array, bias: BiasEntries) -> mx.array:
    """[R, V] float32 with single logits raised, lowered or (-inf) blocked."""
    return logits.at[bias.rows, bias.tokens].add(bias.values)


def penalise(logits: mx.array, penalties: PenaltyRows, counts: mx.array, in_prompt: mx.array) -> mx.array:
    """Lower what has been said: logits [r, V] float32, counts [r, V] of the output, in_prompt [r, V] bool.

    Repetition (Keskar et al., CTRL, arXiv:1909.05858 §4.1) divides positive and multiplies negative logits of tokens of
    prompt or output. Frequency and presence (OpenAI's API reference) subtract per occurrence, and once, in the output.
    """
    said = counts > 0
    if penalties.repetition is not None:
        scaled = mx.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
        logits = mx.where(said | in_prompt, scaled, logits)
    return logits - penalties.frequency * counts - penalties.presence * said


def draw(logits: mx.array, rows: DrawRows, positions: Sequence[int]) -> mx.array:
    """Draw one token per row: logits [r, V] float32, each row's position in its random stream → [r] uint32.

    The largest of logits + Gumbel noise is a draw from their softmax (Maddison et al., arXiv:1411.0030 §2). The noise
    of a token depends on (seed, position, token id) alone.
    """
    words = [random_word(seed, position) for seed, position in zip(rows.seeds, positions, strict=True)]
    if rows.cut is None or rows.cut.candidates == logits.shape[-1]:
        keys = mx.array([[word >> 32, word & _MASK32] for word in words], dtype=mx.uint32)
        noise = gumbel(keys, (logits.shape[-1],))
        return mx.argmax(_cut(logits, rows) + noise, axis=-1)
    ids = mx.argpartition(logits, kth=-rows.cut.candidates, axis=-1)[:, -rows.cut.candidates :].astype(mx.uint32)
    streams = mx.broadcast_to(mx.array([[word & _MASK32] for word in words], dtype=mx.uint32), ids.shape)
    noise = gumbel(mx.stack([streams, ids], axis=-1).reshape(-1, 2), ()).reshape(ids.shape)
    place = mx.argmax(_cut(mx.take_along_axis(logits, ids, axis=-1), rows) + noise, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, place, axis=-1)[:, 0]


def _cut(logits: mx.array, rows: DrawRows) -> mx.array:
    """Divide by the temperature and drop (-inf) what min_p, then top_k, then top_p exclude: [r, C] → [r, C]."""
    scaled = (logits - mx.max(logits, axis=-1, keepdims=True)) / rows.temperature  # the likeliest is at 0
    floor = rows.log_min_p
    if rows.cut is not None:
        floor = lowest_kept(scaled, rows.cut, floor)
    return scaled if floor is None else mx.where(scaled >= floor, scaled, -mx.inf)


def lowest_kept(scaled: mx.array, cut: Cut, log_min_p: mx.array | None) -> mx.array:
    """The smallest logit that min_p, then top_k, then top_p keep: scaled [r, C], largest 0 → [r, 1].

    A cut is a value, not a rank: tokens that tie with the last one kept are kept, so the order of ids never matters.
    """
    ascending = mx.sort(scaled, axis=-1)
    rank = mx.arange(scaled.shape[-1] - 1, -1, -1, dtype=mx.int32)
    in_reach = rank < cut.top_k
    if log_min_p is not None:
        in_reach = in_reach & (ascending >= log_min_p)
    weight = mx.where(in_reach, mx.exp(ascending), 0.0)
    above = mx.cumsum(weight, axis=-1, reverse=True, inclusive=False)
    kept = in_reach & (above < cut.top_p * mx.sum(weight, axis=-1, keepdims=True))
    return mx.min(mx.where(kept, ascending, mx.inf), axis=-1, keepdims=True)


def gumbel(keys: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Standard Gumbel noise [K, *shape] float32, each entry from its own random key of [K, 2] uint32 alone."""

    def uniform(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=shape, key=key)

    # Large noise, which decides, comes from small u, where float32 is finest; u = 0 would be infinite.
    return -mx.log(-mx.log1p(-mx.maximum(mx.vmap(uniform)(keys), _LEAST_UNIFORM)))


def random_word(seed: int, position: int) -> int:
    """64 random bits, entry `position` of the stream of any integer seed (SplitMix64: Steele et al., OOPSLA 2014)."""
    return _mix((_mix(seed & _MASK64) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def token_logprobs(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Log-softmax in float32 of raw logits [r, V] at the tokens [r] and at the `top` likeliest.

    Returns ([r], ids [r, top], logprobs [r, top]), the likeliest in no particular order.
    """
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm
    ids = mx.argpartition(logits, kth=-top, axis=-1)[:, -top:]
    return chosen[:, 0], ids, mx.take_along_axis(logits, ids, axis=-1) - norm
