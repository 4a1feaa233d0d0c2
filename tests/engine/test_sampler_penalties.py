"""Penalties over many steps: counts stay on the device and always agree with the tokens on the host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import pytest

from ling_serve.engine.request import SamplingParams
from ling_serve.engine.sampler import Sampler, SamplingRow
from ling_serve.engine.token_counts import TokenCounts
from tests.engine.sampling_reference import edited

VOCAB = 40
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
ALL = replace(GREEDY, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2)


@dataclass
class Writer:
    """One sequence, its tokens on the host, and what numpy says it must write."""

    key: str
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    output: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def row(self) -> SamplingRow:
        return SamplingRow(self.key, self.params, 0, self.prompt, list(self.output), frozenset())

    def expect(self, logits: np.ndarray) -> None:
        self.expected.append(int(edited(logits, self.params, self.prompt, self.output).argmax()))


def step(sampler: Sampler, writers: list[Writer], logits: np.ndarray) -> None:
    """One step of `writers` on logits [R, V]."""
    for writer, row in zip(writers, logits, strict=True):
        writer.expect(row)
    samples = sampler.collect(sampler.launch(mx.array(logits), [writer.row() for writer in writers]))
    for writer, sampled in zip(writers, samples, strict=True):
        writer.output.append(sampled.token)


def logits_of(rows: int, seed: int) -> np.ndarray:
    """[R, V] the same few tokens always lead, so that penalties decide."""
    base = np.linspace(2.0, -2.0, VOCAB)
    return (base + 0.05 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, presence_penalty=0.7),
        replace(GREEDY, frequency_penalty=0.3),
        replace(GREEDY, frequency_penalty=-0.5),
        replace(GREEDY, repetition_penalty=1.5),
        replace(GREEDY, repetition_penalty=0.8),
        ALL,
        replace(ALL, logit_bias={0: 3.0, 39: 4.5}),
    ],
    ids=str,
)
def test_penalties_follow_every_token_written(params: SamplingParams):
    sampler, writer = Sampler(VOCAB), Writer("a", params)
    for number in range(30):
        step(sampler, [writer], logits_of(1, number))
    assert writer.output == writer.expected


def test_frequency_grows_and_presence_does_not():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :3] = [5.0, 4.45, 4.0]
    often, once = (
        Writer("f", replace(GREEDY, frequency_penalty=0.25)),
        Writer("p", replace(GREEDY, presence_penalty=0.6)),
    )
    sampler = Sampler(VOCAB)
    for _ in range(5):
        step(sampler, [often, once], np.tile(logits, (2, 1)))
    assert often.output == [0, 0, 0, 1, 0]
    assert once.output == [0, 1, 0, 0, 0]


def test_only_repetition_looks_at_the_prompt():
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[:, :2] = [2.0, 1.8]
    writers = [
        Writer("r", replace(GREEDY, repetition_penalty=1.5), prompt=(0,)),
        Writer("p", replace(GREEDY, presence_penalty=1.0), prompt=(0,)),
        Writer("f", replace(GREEDY, frequency_penalty=1.0), prompt=(0, 0)),
    ]
    step(Sampler(VOCAB), writers, logits)
    assert [writer.output for writer in writers] == [[1], [0], [0]]


def test_joins_leaves_reorderings_and_resumes_never_lose_count():
    sampler, rng = Sampler(VOCAB), np.random.default_rng(3)
    kinds = [ALL, GREEDY, replace(GREEDY, frequency_penalty=0.5), replace(GREEDY, repetition_penalty=1.4)]
    writers = [Writer(f"s{n}", kinds[n % 4], prompt=(n, n + 1)) for n in range(8)]
    for number in range(60):
        # A random part in random order: sequences join, sit out (as when preempted), and come back elsewhere.
        running = [writers[n] for n in rng.permutation(8)[: rng.integers(1, 9)]] if number % 3 else writers
        step(sampler, running, logits_of(len(running), number))
    assert [w.output for w in writers] == [w.expected for w in writers]
    assert min(len(w.output) for w in writers) > 20


def test_a_dropped_step_is_forgotten():
    sampler, writer, twin = Sampler(VOCAB), Writer("a", ALL), Writer("a", ALL)
    for number in range(4):
        step(sampler, [writer], logits_of(1, number))
    sampler.collect(sampler.launch(mx.array(logits_of(1, 99)), [writer.row()]))  # its token is never committed
    step(sampler, [writer], logits_of(1, 5))
    fresh = Sampler(VOCAB)
    for number in (0, 1, 2, 3, 5):
        step(fresh, [twin], logits_of(1, number))
    assert writer.output == twin.output == writer.expected


def test_a_step_launched_before_the_last_token_reached_the_host_counts_it():
    """Run-ahead: the host knows that there is another token, not which."""
    sampler, writer = Sampler(VOCAB), Writer("a", ALL)
    step(sampler, [writer], logits_of(1, 0))
    first = sampler.launch(mx.array(logits_of(1, 1)), [writer.row()])
    ahead = SamplingRow("a", ALL, 0, writer.prompt, [*writer.output, -1], frozenset())
    second = sampler.launch(mx.array(logits_of(1, 2)), [ahead])
    writer.expect(logits_of(1, 1)[0])
    writer.output.append(sampler.collect(first)[0].token)
    writer.expect(logits_of(1, 2)[0])
    writer.output.append(sampler.collect(second)[0].token)
    assert writer.output == writer.expected


def test_a_key_used_again_after_forget_starts_from_nothing():
    sampler = Sampler(VOCAB)
    old, new = Writer("same", ALL), Writer("same", ALL, prompt=(7,))
    step(sampler, [old], logits_of(1, 0))
    step(sampler, [old], logits_of(1, 1))
    sampler.forget("same")
    sampler.forget("never seen")
    new.output = [5, 6]  # as long as the old one's
    new.expected = [5, 6]
    step(sampler, [new], logits_of(1, 2))
    assert new.output == new.expected


def test_the_same_rows_again_keep_the_same_arrays_and_forgotten_ones_hold_none():
    counts = TokenCounts(VOCAB)
    a, b = Writer("a", ALL, output=[3, 3]), Writer("b", ALL, output=[4])
    first = counts.of([a.row(), b.row()])
    assert counts.of([a.row(), b.row()]) is first
    counts.add(mx.array([3, 5], dtype=mx.int32))
    a.output.append(3)
    b.output.append(5)
    after = counts.of([a.row(), b.row()])
    assert after.in_prompt is first.in_prompt
    assert after.counts[0, 3].item() == 3
    assert after.counts[1, [4, 5]].tolist() == [1, 1]
    assert counts.keys == {"a", "b"}
    counts.forget("a")
    assert counts.keys == {"b"}
    counts.forget("b")
    assert counts.keys == frozenset()
    assert counts.of([a.row(), b.row()]) is not after


def test_rows_without_penalties_are_not_counted():
    sampler = Sampler(VOCAB)
    pending = sampler.launch(mx.array(logits_of(2, 0)), [Writer("a", GREEDY).row(), Writer("b", GREEDY).row()])
    assert pending.counts is None
    mixed = sampler.launch(mx.array(logits_of(2, 0)), [Writer("a", GREEDY).row(), Writer("b", ALL).row()])
    assert mixed.counts is not None
    assert mixed.counts.shape == (1, VOCAB)
