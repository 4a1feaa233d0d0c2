"""The policy, with plain ids and no model."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_serve.cache import SequenceMemory
from ling_serve.config import EngineOptions
from ling_serve.engine.batch import Batch, Piece
from ling_serve.engine.events import TokenEvent
from ling_serve.engine.request import FinishReason, Request, SamplingParams
from ling_serve.engine.sampler import Sampled
from ling_serve.engine.scheduler import Scheduler
from ling_serve.engine.sequence import Status
from ling_serve.errors import InvariantViolated, QueueFull


def scheduler(num_blocks: int = 64, max_model_len: int = 256, **options: int) -> Scheduler:
    made = EngineOptions(**({"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16} | options))
    memory = SequenceMemory(num_blocks, made.block_size, made.max_num_seqs)
    return Scheduler(made, memory, min(max_model_len, num_blocks * 16))


def add(target: Scheduler, seq_id: str, prompt_len: int, max_tokens: int = 100, **sampling: object) -> None:
    target.add(Request(seq_id, (1,) * prompt_len, SamplingParams(max_tokens=max_tokens, **sampling)), seed=0)


def commit(target: Scheduler, batch: Batch, token: int = 5) -> list[TokenEvent]:
    return target.commit(batch, {piece.seq_id: Sampled(token, None) for piece in batch.pieces if piece.samples})


def step(target: Scheduler, token: int = 5) -> list[Piece]:
    batch = target.schedule()
    if batch is None:
        return []
    commit(target, batch, token)
    return list(batch.pieces)


def drain(target: Scheduler, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not target.has_work:
            target.audit()
            return
        step(target)
    raise AssertionError(f"{list(target.sequences)} did not end in {max_steps} steps")


def test_a_prompt_is_prefilled_in_slices_and_then_decoded() -> None:
    target = scheduler()
    add(target, "a", 40)
    assert step(target) == [Piece("a", 0, 16, False)]
    assert step(target) == [Piece("a", 16, 16, False)]
    assert step(target) == [Piece("a", 32, 8, True)]
    assert step(target) == [Piece("a", 40, 1, True)]
    assert step(target) == [Piece("a", 41, 1, True)]


def test_decoding_comes_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    target = scheduler()
    for name in "ab":
        add(target, name, 4)
    step(target)
    add(target, "long", 100)
    assert step(target) == [Piece("a", 4, 1, True), Piece("b", 4, 1, True), Piece("long", 0, 14, False)]
    assert step(target) == [Piece("a", 5, 1, True), Piece("b", 5, 1, True), Piece("long", 14, 14, False)]
    assert target.counters.mixed_steps == 2


def test_the_shortest_prompt_goes_first() -> None:
    target = scheduler()
    add(target, "long", 200)
    step(target)
    add(target, "short", 5)
    assert step(target) == [Piece("short", 0, 5, True), Piece("long", 16, 11, False)]


def test_a_long_prompt_does_not_starve_under_a_stream_of_short_ones() -> None:
    """Fresh prompts arrive faster than they can be prefilled."""
    target = scheduler(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=16)
    add(target, "long", 200, max_tokens=1)
    steps = 0
    while "long" in target.sequences:
        for number in range(3):
            add(target, f"{steps}-{number}", 8, max_tokens=1)
        step(target)
        steps += 1
        assert steps < 300
    print(f"the long prompt ended after {steps} steps; alone it takes 13")
    assert steps > 14  # the short ones did go first for a while


def test_no_more_sequences_run_than_there_are_slots() -> None:
    target = scheduler(max_num_seqs=2)
    for name in "abc":
        add(target, name, 4, max_tokens=3)
    step(target)
    assert (target.num_running, target.num_waiting) == (2, 1)
    drain(target)
    assert target.counters.finished == {FinishReason.LENGTH: 3}


def test_the_newest_gives_way_when_blocks_run_out_and_comes_back_first() -> None:
    target = scheduler(num_blocks=4, max_model_len=64)
    add(target, "old", 15)
    step(target)
    add(target, "new", 15, max_tokens=40)
    add(target, "later", 17)
    for _ in range(40):
        step(target)
        if target.counters.preemptions:
            break
    assert target.sequences["new"].status is Status.PREEMPTED
    assert target.sequences["new"].computed == 0
    assert target.sequences["old"].status is Status.DECODE
    kept = list(target.sequences["new"].output)
    assert kept
    while target.sequences["new"].status is Status.PREEMPTED:
        assert target.sequences["later"].status is Status.QUEUED  # nobody overtakes it
        step(target)
    assert target.sequences["new"].output[: len(kept)] == kept
    drain(target)
    assert target.counters.resumes == target.counters.preemptions >= 1


def test_blocks_running_out_never_stops_everything() -> None:
    target = scheduler(num_blocks=5, max_model_len=80, max_num_seqs=4)
    for number in range(24):
        add(target, str(number), 3 + 2 * number, max_tokens=70)
    drain(target)
    print(target.counters)
    assert target.counters.preemptions >= 5
    assert target.counters.finished == {FinishReason.LENGTH: 24}


def test_a_prefilling_sequence_goes_on_while_a_more_urgent_one_waits_for_room() -> None:
    target = scheduler(num_blocks=6, max_model_len=96)
    add(target, "first", 80)
    step(target)
    add(target, "second", 33)  # shorter, so more urgent, but there is no room for it
    assert [piece.seq_id for piece in step(target)] == ["first"]
    drain(target)


def test_a_full_queue_refuses() -> None:
    target = scheduler(max_queue_len=2)
    add(target, "a", 4)
    add(target, "b", 4)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        add(target, "c", 4)
    step(target)
    add(target, "c", 4)
    drain(target)


def test_finish_reasons() -> None:
    target = scheduler(max_model_len=32)
    eos = frozenset({9})
    target.add(Request("eos", (1,) * 4, SamplingParams(max_tokens=5), eos), seed=0)
    target.add(Request("ignores", (1,) * 4, SamplingParams(max_tokens=2, ignore_eos=True), eos), seed=0)
    add(target, "stop-id", 4, stop_token_ids=frozenset({9}), ignore_eos=True)
    add(target, "context", 30)
    events = list[TokenEvent]()
    while target.has_work:
        batch = target.schedule()
        assert batch is not None
        events += commit(target, batch, token=9)
    ends = {event.request_id: (event.finish, event.is_stop_token) for event in events if event.finish}
    assert ends == {
        "eos": (FinishReason.STOP, True),
        "stop-id": (FinishReason.STOP, True),
        "ignores": (FinishReason.LENGTH, False),
        "context": (FinishReason.LENGTH, False),
    }
    assert sum(event.request_id == "context" for event in events) == 2  # 30 + 2 = max_model_len
    assert sum(event.request_id == "ignores" for event in events) == 2


def test_min_tokens_blocks_the_ids_that_would_end_it() -> None:
    target = scheduler()
    sampling = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=frozenset({7}))
    target.add(Request("a", (1,) * 4, sampling, frozenset({9})), seed=0)
    sequence = target.sequences["a"]
    blocked = []
    for _ in range(3):
        blocked.append(sequence.blocked_ids)
        step(target)
    assert blocked == [{7, 9}, {7, 9}, frozenset()]


def _queued(target: Scheduler) -> None:
    for number in range(4):
        add(target, f"other-{number}", 4)
    step(target)
    add(target, "a", 20)
    step(target)


def _prefilling(target: Scheduler) -> None:
    add(target, "a", 40)
    step(target)


def _decoding(target: Scheduler) -> None:
    add(target, "a", 4)
    step(target)
    step(target)


def _preempted(target: Scheduler) -> None:
    add(target, "other", 200, max_tokens=56)
    for _ in range(14):
        step(target)
    add(target, "a", 30)
    while target.sequences["a"].status is not Status.PREEMPTED:
        step(target)


@pytest.mark.parametrize(
    ("reach", "status", "num_blocks"),
    [
        (_queued, Status.QUEUED, 64),
        (_prefilling, Status.PREFILL, 64),
        (_decoding, Status.DECODE, 64),
        (_preempted, Status.PREEMPTED, 16),
    ],
)
@pytest.mark.parametrize("launched", [False, True])
def test_abort_in_every_state(
    reach: Callable[[Scheduler], None], status: Status, num_blocks: int, launched: bool
) -> None:
    target = scheduler(num_blocks)
    reach(target)
    assert target.sequences["a"].status is status
    batch = target.schedule() if launched else None
    status_at_abort = target.sequences["a"].status
    assert target.abort("a")
    assert "a" not in target.sequences
    assert not target.abort("a")
    if batch is not None:
        assert "a" not in {event.request_id for event in commit(target, batch)}
    assert target.counters.aborts == {status_at_abort: 1}
    for other in list(target.sequences):
        target.abort(other)
    target.audit()


def test_a_request_that_reuses_the_id_of_an_aborted_one_does_not_get_its_token() -> None:
    target = scheduler()
    add(target, "a", 4)
    batch = target.schedule()
    assert batch is not None
    target.abort("a")
    add(target, "a", 6)
    assert commit(target, batch) == []
    assert target.sequences["a"].output == []
    assert step(target) == [Piece("a", 0, 6, True)]


def test_blocks_and_slot_of_an_aborted_sequence_wait_for_the_launched_step() -> None:
    target = scheduler(num_blocks=2, max_model_len=32, max_num_seqs=1)
    add(target, "a", 17)
    step(target)
    batch = target.schedule()
    assert batch is not None
    target.abort("a")
    add(target, "b", 17)
    assert target.schedule() is None
    commit(target, batch)
    assert step(target) == [Piece("b", 0, 16, False)]


def test_too_few_blocks_for_one_sequence_are_refused_at_once() -> None:
    with pytest.raises(InvariantViolated, match="2 blocks of 16 tokens cannot hold max_model_len 33"):
        Scheduler(EngineOptions(block_size=16), SequenceMemory(2, 16, 4), max_model_len=33)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 6), st.integers(0, 25)),
        min_size=1,
        max_size=14,
    ),
    st.integers(5, 12),
    st.integers(1, 4),
)
def test_whatever_comes_everything_ends(
    requests: list[tuple[int, int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    """(prompt, max_tokens, steps before the next request, abort after so many more steps; 25 = never)."""
    target = scheduler(num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=8)
    aborts: dict[int, list[str]] = {}
    clock = 0
    for number, (prompt_len, max_tokens, gap, abort_after) in enumerate(requests):
        add(target, str(number), min(prompt_len, target.max_model_len - 1), max_tokens)
        if abort_after < 25:
            aborts.setdefault(clock + abort_after, []).append(str(number))
        for _ in range(gap):
            clock = _checked_step(target, clock, aborts)
    for _ in range(4000):
        if not target.has_work:
            break
        clock = _checked_step(target, clock, aborts)
    assert not target.has_work
    target.audit()
    counters = target.counters
    assert counters.finished.total() + counters.aborts.total() == len(requests)


def _checked_step(target: Scheduler, clock: int, aborts: dict[int, list[str]]) -> int:
    batch = target.schedule()
    for seq_id in aborts.get(clock, []):
        target.abort(seq_id)
    if batch is not None:
        assert sum(piece.length for piece in batch.pieces) <= 8
        assert len({piece.seq_id for piece in batch.pieces}) == len(batch.pieces)
        commit(target, batch)
    for sequence in target.sequences.values():
        assert 0 <= sequence.computed < len(sequence.tokens) <= target.max_model_len
    return clock + 1
