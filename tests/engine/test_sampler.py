"""The sampler against numpy in float64, feature by feature."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_serve.engine.request import SamplingParams
from ling_serve.engine.sampler import Sampled, Sampler, SamplingRow, Unsampled
from ling_serve.engine.sampling_arrays import gumbel, random_word
from ling_serve.engine.sampling_plan import TOP_WINDOW
from ling_serve.errors import InvariantViolated
from tests.engine.sampling_reference import distribution, edited, log_softmax

VOCAB = 300
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PLAIN = SamplingParams(max_tokens=8)

FEATURES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.3),
    "top_k": replace(PLAIN, top_k=5),
    "wide top_k": replace(PLAIN, top_k=TOP_WINDOW + 40),
    "top_p": replace(PLAIN, top_p=0.6),
    "top_k and top_p": replace(PLAIN, top_k=20, top_p=0.9, temperature=0.8),
    "min_p": replace(PLAIN, min_p=0.1),
    "min_p, top_k and top_p": replace(PLAIN, min_p=0.05, top_k=30, top_p=0.9),
    "min_p and top_p": replace(PLAIN, min_p=0.05, top_p=0.8),
    "presence": replace(PLAIN, presence_penalty=1.5),
    "frequency": replace(PLAIN, frequency_penalty=0.7, top_k=40),
    "repetition": replace(GREEDY, repetition_penalty=1.3),
    "bias": replace(PLAIN, logit_bias={3: 5.0, 7: -100.0}),
    "greedy with every penalty": replace(
        GREEDY, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={1: 2.0}
    ),
    "logprobs": replace(PLAIN, logprobs=5),
}


def random_logits(rows: int, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def row(params: SamplingParams, key: str = "a", seed: int = 0, prompt=(), output=(), blocked=()) -> SamplingRow:
    return SamplingRow(key, params, seed, tuple(prompt), tuple(output), frozenset(blocked))


def sample(logits: np.ndarray, rows: list[SamplingRow], sampler: Sampler | None = None) -> list[Sampled]:
    sampler = sampler or Sampler(logits.shape[-1])
    return sampler.collect(sampler.launch(mx.array(logits), rows))


def draws(logits: np.ndarray, params: SamplingParams, count: int, **tokens) -> np.ndarray:
    """`count` tokens from one row of logits, under different seeds, 256 rows a batch."""
    drawn: list[int] = []
    for first in range(0, count, 256):
        seeds = range(first, min(first + 256, count))
        rows = [row(params, key=str(seed), seed=seed, **tokens) for seed in seeds]
        drawn += [s.token for s in sample(np.tile(logits, (len(rows), 1)), rows)]
    return np.array(drawn)


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id():
    logits = random_logits(4)
    logits[1, [50, 200]] = 30.0
    logits[2] = 0.0
    tokens = [s.token for s in sample(logits, [row(GREEDY, str(n)) for n in range(4)])]
    assert tokens == [int(logits[0].argmax()), 50, 0, int(logits[3].argmax())]


def test_a_tiny_temperature_is_greedy_and_never_overflows():
    logits = random_logits(6, scale=20.0)
    temperatures = [1e-300, 1e-30, 1e-6, 9e-6, 1.1e-5, 1e-4]
    tokens = sample(logits, [row(replace(PLAIN, temperature=t), str(t)) for t in temperatures])
    assert [s.token for s in tokens] == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("name", [n for n, p in FEATURES.items() if p.temperature > 0])
def test_drawn_tokens_follow_the_reference_distribution(name: str):
    """Pearson's chi-square over 2,560 draws with fixed seeds, tokens expected fewer than 5 times lumped together."""
    logits, params, count = random_logits(1, seed=5, vocab=200)[0], FEATURES[name], 2560
    prompt, output = (1, 2, 3), (4, 4, 5, 9)
    expected = count * distribution(edited(logits, params, prompt, output), params)
    observed = np.bincount(draws(logits, params, count, prompt=prompt, output=output), minlength=200)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    observed = np.append(observed[common], observed[~common].sum())
    used = expected > 0
    degrees = used.sum() - 1
    chi2 = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    print(f"{name}: chi-square {chi2:.1f} over {degrees} degrees of freedom")
    assert chi2 < degrees + 3.5 * math.sqrt(2 * max(degrees, 1))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 50)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    temperature=st.floats(0.05, 3.0),
)
def test_only_tokens_of_the_reference_set_are_drawn(seed, top_k, top_p, min_p, temperature):
    params = replace(PLAIN, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = random_logits(1, seed=seed)[0]
    # A token within float32's rounding of a cut may fall on either side of it.
    loose = replace(params, top_p=min(top_p + 1e-5, 1.0), min_p=max(min_p - 1e-5, 0.0))
    allowed = distribution(edited(logits, loose), loose) > 0
    drawn = draws(logits, params, 64)
    assert allowed[drawn].all(), (params, drawn[~allowed[drawn]])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 12), top_p=st.floats(0.1, 1.0))
def test_every_token_of_a_small_reference_set_is_drawn(seed, top_k, top_p):
    params = replace(PLAIN, top_k=top_k, top_p=top_p, temperature=2.0)
    logits = random_logits(1, seed=seed, scale=0.3)[0]
    tight = replace(params, top_p=top_p - 1e-5 if top_p < 1.0 else 1.0)
    wanted = np.flatnonzero(distribution(edited(logits, tight), tight) > 0)
    assert set(wanted) <= set(draws(logits, params, 512).tolist())


def test_neutral_top_p_and_a_top_k_beyond_the_vocabulary_change_nothing():
    logits = random_logits(1)[0]
    plain = draws(logits, PLAIN, 64)
    for same in (replace(PLAIN, top_k=VOCAB), replace(PLAIN, top_k=10 * VOCAB), replace(PLAIN, top_p=1.0)):
        assert (draws(logits, same, 64) == plain).all()


def test_top_k_of_one_and_top_p_of_zero_are_greedy():
    logits = random_logits(8)
    for params in (replace(PLAIN, top_k=1), replace(PLAIN, top_p=0.0), replace(PLAIN, min_p=1.0)):
        tokens = sample(logits, [row(params, str(n), seed=n) for n in range(8)])
        assert [s.token for s in tokens] == logits.argmax(axis=-1).tolist()


def test_tokens_that_tie_at_the_cut_are_all_kept():
    logits = np.full(VOCAB, -5.0, dtype=np.float32)
    logits[[10, 20, 30]] = 1.0
    for params in (replace(PLAIN, top_k=2), replace(PLAIN, top_p=0.4)):
        assert set(draws(logits, params, 128).tolist()) == {10, 20, 30}


def test_logit_bias_of_a_hundred_forces_and_forbids():
    logits = random_logits(2)
    likeliest = int(logits[1].argmax())
    forced = row(replace(PLAIN, logit_bias={17: 100.0}), "forced")
    forbidden = row(replace(GREEDY, logit_bias={likeliest: -100.0}), "forbidden")
    tokens = [s.token for s in sample(logits, [forced, forbidden])]
    logits[1, likeliest] = -np.inf
    assert tokens == [17, int(logits[1].argmax())]


def test_bias_on_all_tokens_but_one_leaves_that_one():
    bias = {token: -1e30 for token in range(VOCAB) if token != 123}
    logits = random_logits(3)
    for params in (PLAIN, GREEDY, replace(PLAIN, top_p=0.9), replace(PLAIN, top_k=7)):
        tokens = sample(logits, [row(replace(params, logit_bias=bias), str(n), seed=n) for n in range(3)])
        assert [s.token for s in tokens] == [123] * 3


def test_ids_outside_the_vocabulary_can_be_biased_and_blocked_without_effect():
    logits = random_logits(1)
    odd = row(replace(GREEDY, logit_bias={-1: 100.0, VOCAB: 100.0}), blocked=(VOCAB + 5, -3))
    assert sample(logits, [odd])[0].token == int(logits[0].argmax())


@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_k=4), replace(PLAIN, logit_bias={8: 90.0})])
def test_blocked_ids_are_never_drawn_and_come_back_when_unblocked(params: SamplingParams):
    logits = random_logits(1)[0]
    logits[[8, 9]] = 25.0
    sampler = Sampler(VOCAB)
    blocked = sample(logits[None], [row(params, blocked=(8, 9))], sampler)[0].token
    free = sample(logits[None], [row(params)], sampler)[0].token
    assert blocked not in (8, 9)
    assert free in (8, 9)


def test_logprobs_are_of_the_raw_distribution_and_sorted():
    logits = random_logits(3)
    params = replace(PLAIN, temperature=0.5, top_k=3, logit_bias={4: 30.0}, presence_penalty=2.0)
    rows = [row(replace(params, logprobs=k), str(k), output=(4, 4), seed=k or 0) for k in (20, None, 0)]
    full, absent, bare = sample(logits, rows)
    reference = log_softmax(logits[0])
    assert absent.logprobs is None
    assert full.logprobs is not None
    assert bare.logprobs is not None
    assert bare.logprobs.top == ()
    ids, values = zip(*full.logprobs.top, strict=True)
    assert list(ids) == np.argsort(-reference)[:20].tolist()
    error = np.abs(np.array(values) - reference[list(ids)]).max()
    error = max(error, abs(full.logprobs.logprob - reference[full.token]))
    error = max(error, abs(bare.logprobs.logprob - log_softmax(logits[2])[bare.token]))
    print(f"largest logprob error {error:.1e}")
    assert error < 2e-6


def test_logprobs_of_equal_tokens_are_ordered_by_id_and_do_not_depend_on_the_batch():
    logits = mx.array(random_logits(2, scale=0.5)).astype(mx.bfloat16)  # bfloat16 makes many ties
    few, many = row(replace(GREEDY, logprobs=3), "few"), row(replace(GREEDY, logprobs=20), "many")
    sampler = Sampler(VOCAB)
    solo = sampler.collect(sampler.launch(logits[:1], [few]))[0]
    together = sampler.collect(sampler.launch(logits, [few, many]))
    assert together[0] == solo
    assert together[1].logprobs is not None
    top = together[1].logprobs.top
    assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))
    assert len(top) == 20


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: mx.Dtype):
    logits = mx.array(random_logits(2)).astype(dtype)
    rows = [row(replace(PLAIN, logprobs=1), "a", seed=3), row(replace(PLAIN, top_k=9, logprobs=1), "b", seed=4)]
    sampler = Sampler(VOCAB)
    half = sampler.collect(sampler.launch(logits, rows))
    assert half == sampler.collect(sampler.launch(logits.astype(mx.float32), rows))


@pytest.mark.parametrize("name", FEATURES)
def test_a_row_does_not_notice_its_batch_or_its_place_in_it(name: str):
    logits = random_logits(len(FEATURES))
    rows = [
        row(params, key, seed=100 + n, prompt=(n, 1, 2), output=(n, 5, 5, 6), blocked=(0,) if n % 3 else ())
        for n, (key, params) in enumerate(FEATURES.items())
    ]
    mine = list(FEATURES).index(name)
    solo = sample(logits[mine : mine + 1], [rows[mine]])[0]
    for order in (np.arange(len(rows)), np.arange(len(rows))[::-1], np.random.default_rng(1).permutation(len(rows))):
        batch = sample(logits[order], [rows[n] for n in order])
        assert batch[list(order).index(mine)] == solo
    twins = sample(np.tile(logits[mine], (3, 1)), [replace(rows[mine], key=str(n)) for n in range(3)])
    assert twins == [solo] * 3


def test_the_seed_and_the_position_decide_and_nothing_else():
    logits = random_logits(1)[0]
    rows = [row(PLAIN, "x", seed=9, prompt=(1,), output=(7, 7)), row(PLAIN, "y", seed=9, output=(1, 2))]
    first, second = sample(np.tile(logits, (2, 1)), rows)
    assert first == second
    by_position = sample(np.tile(logits, (40, 1)), [row(PLAIN, str(n), seed=9, output=(1,) * n) for n in range(40)])
    by_seed = sample(np.tile(logits, (40, 1)), [row(PLAIN, str(n), seed=n) for n in range(40)])
    assert len({s.token for s in by_position}) > 15
    assert len({s.token for s in by_seed}) > 15


def test_seeds_of_any_size_are_distinct_and_positions_do_not_repeat_across_seeds():
    seeds = [0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 2, 0x9E3779B97F4A7C15]
    words = {random_word(seed, position) for seed in seeds for position in range(500)}
    assert len(words) == len(seeds) * 500
    assert all(0 <= word < 2**64 for word in words)


def test_noise_is_gumbel():
    noise = np.array(gumbel(mx.array([[1, 2], [3, 4]], dtype=mx.uint32), (50_000,))).ravel().astype(np.float64)
    quantiles = np.linspace(0.01, 0.99, 25)
    expected = -np.log(-np.log(quantiles))
    error = np.abs(np.quantile(noise, quantiles) - expected).max()
    print(f"largest quantile error {error:.3f}")
    assert error < 0.05
    assert np.isfinite(noise).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_k=3, top_p=0.5)])
def test_a_row_that_is_not_finite_is_left_without_a_token_and_the_others_get_theirs(bad: float, params: SamplingParams):
    logits, rows = random_logits(3), [row(params, key) for key in ("first", "second", "third")]
    healthy = sample(logits, rows)
    logits[1, 77] = bad
    first, second, third = sample(logits, rows)
    assert [first, third] == [healthy[0], healthy[2]]
    assert isinstance(second, Unsampled)
    assert not math.isfinite(second.peak)


def test_a_row_of_nothing_but_minus_infinity_is_left_without_a_token():
    [only] = sample(np.full((1, VOCAB), -np.inf, dtype=np.float32), [row(PLAIN)])
    assert only == Unsampled(-math.inf)


def test_logits_of_another_shape_are_refused():
    sampler = Sampler(VOCAB)
    for shape in ((2, VOCAB), (1, VOCAB - 1)):
        with pytest.raises(InvariantViolated, match=f"{VOCAB}"):
            sampler.launch(mx.zeros(shape), [row(GREEDY)])


def test_a_step_that_samples_nothing_is_fine():
    assert sample(np.zeros((0, VOCAB), dtype=np.float32), []) == []


def test_the_logits_given_are_left_alone():
    logits = mx.array(random_logits(2))
    before = np.array(logits)
    rows = [row(FEATURES["greedy with every penalty"], "a", output=(1, 2)), row(FEATURES["top_k"], "b", blocked=(3,))]
    sampler = Sampler(VOCAB)
    sampler.collect(sampler.launch(logits, rows))
    assert (np.array(logits) == before).all()


def test_launch_only_builds_the_graph():
    vocab = 50_000
    sampler = Sampler(vocab)
    logits = mx.random.normal((4, vocab), key=mx.random.key(0))
    rows = [row(params, name, output=(3,)) for name, params in list(FEATURES.items())[-4:]]
    sampler.collect(sampler.launch(logits, rows))
    logits = logits + 1.0
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pending = sampler.launch(logits, [replace(r, output=(3, 4)) for r in rows])
    launched = mx.get_peak_memory() - before
    sampler.collect(pending)
    collected = mx.get_peak_memory() - before
    print(f"bytes: launched {launched}, collected {collected}")
    assert launched < logits.nbytes / 8
    assert collected >= logits.nbytes
