"""The engine over real pools, with a model whose every token depends on every cache row of its sequence."""

import random

import mlx.core as mx
import pytest

from ling_serve.engine.batch import Batch
from ling_serve.engine.batching import in_forward_order
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import AbortedEvent, Event, TokenEvent
from ling_serve.engine.request import FinishReason, Request, SamplingParams
from ling_serve.engine.sequence import Status
from ling_serve.errors import ContextLengthExceeded, InvariantViolated, QueueFull, RequestError
from tests.engine.fake_model import VOCAB, FakeModel, expected_output, fake_engine, greedy, run, tokens_by_request


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 8, 9, 15, 16, 17, 33])
def test_one_request(length: int) -> None:
    engine = fake_engine()
    [prompt] = prompts(1, 1, seed=length)
    prompt = [*prompt, *range(length - 1)]
    engine.add(greedy("a", prompt, max_tokens=20))
    events = run(engine)
    assert tokens_by_request(events) == {"a": expected_output(prompt, 20)}
    assert [event.finish for event in events if isinstance(event, TokenEvent)] == [None] * 19 + [FinishReason.LENGTH]


def test_many_requests_through_joins_leaves_and_preemptions_answer_as_if_alone() -> None:
    engine = fake_engine(num_blocks=9, max_num_seqs=4, max_num_batched_tokens=12)
    asked = prompts(40, 60)
    events = list[Event]()
    for number, prompt in enumerate(asked):
        engine.add(greedy(str(number), prompt, max_tokens=5 + number))
        events += engine.step()
    events += run(engine)
    stats = engine.stats()
    print(stats)
    assert tokens_by_request(events) == {str(n): expected_output(p, 5 + n) for n, p in enumerate(asked)}
    assert stats.preemptions >= 5
    assert stats.resumes == stats.preemptions
    assert stats.mixed_steps >= 5
    assert stats.prompt_tokens == sum(map(len, asked))
    assert stats.generated_tokens == sum(5 + number for number in range(40))
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.num_blocks, 0, 0)


def test_requests_reordered_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(max_num_seqs=6, max_num_batched_tokens=24)
    draw, schedule = random.Random(1), engine._scheduler.schedule  # pyright: ignore[reportPrivateUsage]

    def shuffled() -> Batch | None:
        batch = schedule()
        return batch and Batch(tuple(draw.sample(batch.pieces, len(batch.pieces))))

    monkeypatch.setattr(engine._scheduler, "schedule", shuffled)  # pyright: ignore[reportPrivateUsage]
    asked = prompts(12, 40)
    for number, prompt in enumerate(asked):
        engine.add(greedy(str(number), prompt, max_tokens=30))
    assert tokens_by_request(run(engine)) == {str(n): expected_output(p, 30) for n, p in enumerate(asked)}


def test_a_slot_passed_on_with_its_old_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the bug: sequences start from what their slot's last owner left behind."""
    from ling_serve.engine import runner

    pack = runner.pack

    def reads_own_slot(*args: object) -> object:
        batch = pack(*args)  # pyright: ignore[reportArgumentType]
        object.__setattr__(batch, "read_slots", batch.write_slots)
        return batch

    def engine_output(engine: Engine) -> dict[str, list[int]]:
        for number in range(12):
            engine.add(greedy(str(number), [number] * 20, max_tokens=30))
        return tokens_by_request(run(engine))

    expected = {str(n): expected_output([n] * 20, 30) for n in range(12)}
    assert engine_output(fake_engine(num_blocks=8)) == expected
    monkeypatch.setattr(runner, "pack", reads_own_slot)
    assert engine_output(fake_engine(num_blocks=8)) == expected  # the reset alone is enough
    monkeypatch.setattr("ling_serve.cache.state_slots.StateSlotPool.reset", lambda self, slot: None)
    assert engine_output(fake_engine(num_blocks=8)) != expected


def test_pieces_are_packed_in_the_order_of_the_forward_batch() -> None:
    model = FakeModel()
    engine = fake_engine(model=model, max_num_seqs=4, max_num_batched_tokens=32)
    for name, length in (("a", 1), ("b", 20), ("c", 5)):
        engine.add(greedy(name, range(length)))
    engine.step()
    engine.add(greedy("d", range(40)))
    engine.step()
    first, second = model.batches
    assert first.cu_seqlens == (0, 1, 6, 26)
    assert first.num_short == 2
    assert first.num_single == 1
    assert first.logit_rows.tolist() == [0, 5, 25]
    assert first.read_slots == (4, 4, 4)  # the zero slot
    assert len(set(first.write_slots)) == 3
    assert first.context_lens == (1, 5, 20)
    assert first.page_table.shape == (3, 2)
    assert first.page_table[:2, 1].tolist() == [64, 64]  # the scratch block
    assert second.cu_seqlens == (0, 1, 2, 3, 32)
    assert second.positions.tolist() == [1, 20, 5, *range(29)]
    assert second.logit_rows.tolist() == [0, 1, 2]
    assert sorted(second.read_slots[:3]) == sorted(first.write_slots)


def test_the_head_runs_once_a_step_and_not_at_all_for_prefill_alone() -> None:
    model = FakeModel()
    engine = fake_engine(model=model)
    engine.add(greedy("a", range(40), max_tokens=2))
    engine.step()
    engine.step()
    assert model.head_calls == 0
    engine.step()
    assert model.head_calls == 1
    engine.add(greedy("b", range(3), max_tokens=2))
    engine.step()
    assert model.head_calls == 2
    assert len(model.batches) == 4


@pytest.mark.parametrize("status", [Status.QUEUED, Status.PREFILL, Status.DECODE, Status.PREEMPTED])
def test_an_abort_frees_everything_and_disturbs_nobody(status: Status) -> None:
    engine = fake_engine(num_blocks=9, max_model_len=120, max_num_seqs=4)
    kept = [[number] * 12 for number in range(3)]
    for number, prompt in enumerate(kept):
        engine.add(greedy(str(number), prompt, max_tokens=60))
    engine.add(greedy("victim", range(18), max_tokens=60))
    sequence, events = engine._scheduler.sequences["victim"], list[Event]()  # pyright: ignore[reportPrivateUsage]
    while sequence.status is not status:
        assert engine.has_work
        events += engine.step()
    assert engine.abort("victim") == AbortedEvent("victim")
    assert engine.abort("victim") is None
    events += run(engine)
    found = tokens_by_request(events)
    found.pop("victim", None)
    assert found == {str(n): expected_output(p, 60) for n, p in enumerate(kept)}
    stats = engine.stats()
    assert stats.aborts == {status: 1}
    assert stats.free_blocks == stats.num_blocks


def test_aborting_the_last_request_leaves_an_idle_engine() -> None:
    engine = fake_engine()
    engine.add(greedy("a", range(5)))
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    assert engine.step() == []


def test_an_idle_engine_with_a_leak_stops() -> None:
    engine = fake_engine()
    engine.add(greedy("a", range(5), max_tokens=2))
    engine.step()
    engine._memory._blocks.allocate(1)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(InvariantViolated, match="63 free"):
        run(engine)


def test_work_that_cannot_start_is_an_error_and_no_endless_loop() -> None:
    engine = fake_engine()
    engine._memory._slots.allocate(4)  # pyright: ignore[reportPrivateUsage]
    engine.add(greedy("a", range(5)))
    with pytest.raises(InvariantViolated, match="1 requests wait and none can start with 64 of 64 blocks and 0 slots"):
        engine.step()


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (greedy("x", range(256 % VOCAB), 1), None, ""),
        (greedy("x", []), RequestError, "the prompt is empty"),
        (greedy("x", [1] * 256), ContextLengthExceeded, "has 256 tokens; this server's context holds 256"),
        (greedy("x", [1, 97]), RequestError, "token id 97; the vocabulary has ids 0 to 96"),
        (greedy("x", [-1]), RequestError, "token id -1"),
        (greedy("x", [1], max_tokens=0), RequestError, "max_tokens is 0; expected at least 1"),
        (greedy("x", [1], top_p=0.0), RequestError, "top_p is 0.0"),
        (greedy("x", [1], top_k=-1), RequestError, "top_k is -1"),
        (greedy("x", [1], min_p=1.5), RequestError, "min_p is 1.5"),
        (greedy("x", [1], repetition_penalty=0.0), RequestError, "repetition_penalty is 0.0"),
        (greedy("x", [1], presence_penalty=float("nan")), RequestError, "presence_penalty is nan"),
        (greedy("x", [1], logit_bias={3: float("inf")}), RequestError, "logit_bias of token 3 is inf"),
        (greedy("x", [1], logprobs=21), RequestError, "logprobs is 21; expected 0 to 20"),
        (greedy("x", [1], max_tokens=2, min_tokens=3), RequestError, "min_tokens is 3"),
        (Request("x", (1,), SamplingParams(1, temperature=float("nan"))), RequestError, "temperature is nan"),
        (greedy("live", [1]), RequestError, "id 'live' is running already"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_nothing_has_happened(
    request_: Request, error: type[RequestError] | None, message: str
) -> None:
    engine = fake_engine()
    engine.add(greedy("live", [4, 5], max_tokens=4))
    if error is None:
        engine.add(request_)
    else:
        with pytest.raises(error, match=message):
            engine.add(request_)
    assert tokens_by_request(run(engine))["live"] == expected_output([4, 5], 4)
    assert engine.stats().aborts == {}


def test_a_full_queue_is_an_answer() -> None:
    engine = fake_engine(max_queue_len=1)
    engine.add(greedy("a", [1]))
    with pytest.raises(QueueFull):
        engine.add(greedy("b", [1]))
    run(engine)


def test_a_completion_ends_at_the_context() -> None:
    engine = fake_engine(max_model_len=32)
    engine.add(greedy("a", range(20), max_tokens=1000))
    events = run(engine)
    assert len(events) == 12
    assert isinstance(events[-1], TokenEvent)
    assert events[-1].finish is FinishReason.LENGTH


def test_requests_without_a_seed_draw_from_the_engines() -> None:
    def sampled(seed: int, request_seed: int | None = None) -> list[list[int]]:
        engine = fake_engine(seed=seed)
        for name in "ab":
            sampling = SamplingParams(max_tokens=24, temperature=50.0, seed=request_seed)
            engine.add(Request(name, (1, 2), sampling))
        return list(tokens_by_request(run(engine)).values())

    first = sampled(0)
    assert first[0] != first[1]
    assert first == sampled(0)
    assert first != sampled(1)
    own = sampled(0, request_seed=5)
    assert own[0] == own[1]
    assert own == sampled(1, request_seed=5)


def test_warming_up_leaves_no_trace() -> None:
    plain, warm = fake_engine(), fake_engine()
    warm.warm_up()
    assert warm.stats() == plain.stats()
    for engine in (plain, warm):
        engine.add(Request("a", (1, 2), SamplingParams(max_tokens=24, temperature=50.0)))
    assert tokens_by_request(run(plain)) == tokens_by_request(run(warm))


def test_forward_order_is_stable() -> None:
    from ling_serve.engine.batch import Piece

    pieces = tuple(Piece(str(n), 0, length, False) for n, length in enumerate([9, 1, 2, 8, 1, 100, 3]))
    assert [piece.length for piece in in_forward_order(Batch(pieces))] == [1, 1, 2, 8, 3, 9, 100]


def test_a_step_evaluates_every_cache_array() -> None:
    """Also a step that samples nothing: otherwise its last writes would hang on the next one's graph."""
    engine = fake_engine()
    engine.add(greedy("a", range(40)))
    engine.step()
    caches = engine._runner._caches  # pyright: ignore[reportPrivateUsage]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(caches.arrays())
    assert mx.get_peak_memory() <= before
