"""The engine's thread: who gets an answer, when, and what happens when something breaks."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from ling_serve.engine.engine import Engine
from ling_serve.engine.events import AbortedEvent, ErrorEvent, Event, TokenEvent
from ling_serve.engine.request import FinishReason, Request
from ling_serve.engine.thread import EngineThread
from ling_serve.errors import CheckpointError, EngineDead, NotReady, QueueFull, RequestError, ShuttingDown
from tests.engine.fake_model import FakeModel, expected_output, fake_engine, greedy


class Answer:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert not self._ended.is_set(), f"{event} after the last event"
        self.events.append(event)
        if not isinstance(event, TokenEvent) or event.finish is not None:
            self._ended.set()

    def wait(self) -> Event:
        assert self._ended.wait(20), f"no end after {self.events}"
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenEvent)]


@contextmanager
def running(build: Callable[[], Engine] = fake_engine) -> Iterator[EngineThread]:
    thread = EngineThread(build)
    thread.start()
    _until(lambda: thread.state != "loading")
    yield thread
    assert thread.stop(timeout=20)


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ask(thread: EngineThread, request: Request) -> Answer:
    answer = Answer()
    thread.submit(request, answer)
    return answer


def test_each_request_is_answered_to_its_own_sink() -> None:
    with running() as thread:
        answers = [ask(thread, greedy(str(n), [n] * 9, max_tokens=6 + n)) for n in range(10)]
        for number, answer in enumerate(answers):
            last = answer.wait()
            assert isinstance(last, TokenEvent)
            assert last.finish is FinishReason.LENGTH
            assert answer.tokens == expected_output([number] * 9, 6 + number)
        assert thread.engine_info is not None
        assert thread.engine_info.max_model_len == 256


def test_requests_before_it_is_ready_are_refused_and_the_states_are_told() -> None:
    gate, states = threading.Event(), SimpleQueue[str]()

    def build() -> Engine:
        gate.wait(20)
        return fake_engine()

    thread = EngineThread(build, on_state_change=states.put)
    thread.start()
    assert thread.state == "loading"
    assert thread.engine_info is None
    with pytest.raises(NotReady):
        ask(thread, greedy("a", [1]))
    thread.abort("a")
    gate.set()
    assert states.get(timeout=20) == "ready"
    assert isinstance(ask(thread, greedy("a", [1])).wait(), TokenEvent)
    assert thread.stop(20)
    assert states.get(timeout=20) == "stopped"
    with pytest.raises(ShuttingDown):
        ask(thread, greedy("a", [1]))


def test_it_sleeps_when_it_has_nothing_to_do() -> None:
    with running() as thread:
        ask(thread, greedy("a", [1])).wait()
        before = time.process_time()
        time.sleep(0.3)
        spent = time.process_time() - before
        print(f"{spent:.4f} s of processor time in 0.3 s of idling")
        assert spent < 0.1


def test_an_abort_is_answered_and_everything_is_free_again() -> None:
    with running() as thread:
        answer = ask(thread, greedy("a", [1, 2], max_tokens=200))
        _until(lambda: len(answer.events) > 3)
        thread.abort("a")
        thread.abort("a")
        thread.abort("nobody")
        assert answer.wait() == AbortedEvent("a")
        _until(lambda: thread.stats is not None and thread.stats.running == 0)
        again = ask(thread, greedy("a", [1, 2], max_tokens=3))
        again.wait()
        assert again.tokens == expected_output([1, 2], 3)


def test_refusals_arrive_at_the_sink_of_the_refused() -> None:
    with running(lambda: fake_engine(max_queue_len=1, max_num_seqs=1)) as thread:
        first = ask(thread, greedy("a", [1], max_tokens=200))
        duplicate = ask(thread, greedy("a", [2]))
        empty = ask(thread, greedy("b", []))
        refused = duplicate.wait()
        assert isinstance(refused, ErrorEvent)
        assert isinstance(refused.error, RequestError)
        refused = empty.wait()
        assert isinstance(refused, ErrorEvent)
        assert refused.error.param == "prompt"
        _until(lambda: len(first.events) > 0)
        crowd = [ask(thread, greedy(f"c{n}", [1], max_tokens=1)) for n in range(20)]
        ends = [answer.wait() for answer in crowd if isinstance(answer.wait(), ErrorEvent)]
        assert all(isinstance(end, ErrorEvent) and isinstance(end.error, QueueFull) for end in ends)
        first.wait()
        assert first.tokens == expected_output([1], 200)


def test_a_sink_that_fails_loses_its_request_and_no_other() -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("Event loop is closed")

    with running() as thread:
        thread.submit(greedy("broken", [1], max_tokens=200), broken)
        assert ask(thread, greedy("a", [3], max_tokens=40)).wait()
        _until(lambda: thread.stats is not None and thread.stats.running == 0)
        assert thread.stats is not None
        assert thread.stats.generated_tokens < 60
        assert thread.state == "ready"


class BreaksLater(FakeModel):
    def logits(self, hidden):
        if self.head_calls == 5:
            raise RuntimeError("out of memory")
        return super().logits(hidden)


def test_a_step_that_raises_ends_every_request_with_an_error() -> None:
    states = list[str]()
    thread = EngineThread(lambda: fake_engine(model=BreaksLater()), on_state_change=states.append)
    thread.start()
    _until(lambda: thread.state == "ready")
    answers = [ask(thread, greedy(str(n), [n] * 3, max_tokens=200)) for n in range(6)]
    for answer in answers:
        last = answer.wait()
        assert isinstance(last, ErrorEvent)
        assert isinstance(last.error, EngineDead)
        assert "RuntimeError" in last.error.message
    assert states == ["ready", "dead"]
    assert isinstance(thread.error, RuntimeError)
    with pytest.raises(EngineDead):
        ask(thread, greedy("late", [1]))
    thread.abort("late")
    assert thread.stop(20)
    assert thread.state == "dead"


def test_a_build_that_fails_is_a_dead_engine_with_the_reason() -> None:
    def build() -> Engine:
        raise CheckpointError("no such folder")

    with running(build) as thread:
        assert thread.state == "dead"
        assert isinstance(thread.error, CheckpointError)
        with pytest.raises(EngineDead):
            ask(thread, greedy("a", [1]))


def test_stopping_tells_those_who_wait() -> None:
    with running(lambda: fake_engine(max_num_seqs=1)) as thread:
        answers = [ask(thread, greedy(str(n), [n], max_tokens=200)) for n in range(3)]
    for answer in answers:
        last = answer.wait()
        assert isinstance(last, TokenEvent | ErrorEvent)
        if isinstance(last, ErrorEvent):
            assert isinstance(last.error, ShuttingDown)
    assert thread.state == "stopped"


def test_stopping_a_thread_that_never_started() -> None:
    thread = EngineThread(fake_engine)
    assert thread.stop(1)
    assert thread.state == "stopped"


@pytest.mark.parametrize("death", ["stop", "crash"])
def test_racing_submits_aborts_and_the_end_leave_nobody_without_an_answer(death: str) -> None:
    class Crashes(FakeModel):
        armed = False

        def __call__(self, batch, caches):
            if self.armed:
                raise RuntimeError("planted")
            return super().__call__(batch, caches)

    model = Crashes()
    thread = EngineThread(lambda: fake_engine(model=model, num_blocks=20))
    thread.start()
    _until(lambda: thread.state == "ready")
    answers, refused = list[Answer](), list[Exception]()

    def client(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(5000):
            request_id = f"{seed}-{number % 4}"  # duplicates among live ones, on purpose
            answer = Answer()
            try:
                thread.submit(
                    greedy(request_id, [seed + 1] * draw.randint(1, 30), max_tokens=draw.randint(1, 9)), answer
                )
            except (EngineDead, ShuttingDown) as error:
                refused.append(error)
                return
            answers.append(answer)
            if draw.random() < 0.4:
                thread.abort(f"{seed}-{draw.randrange(5)}")
            time.sleep(draw.random() * 0.002)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for one in clients:
        one.start()
    _until(lambda: len(answers) >= 80)
    if death == "stop":
        assert thread.stop(20)
    else:
        model.armed = True
    for one in clients:
        one.join(20)
    if death == "crash":
        _until(lambda: thread.state == "dead")
    kinds = [type(answer.wait()).__name__ for answer in answers]
    print(death, {kind: kinds.count(kind) for kind in sorted(set(kinds))}, "refused", len(refused))
    assert len(refused) == 4
    assert thread.stop(20)
