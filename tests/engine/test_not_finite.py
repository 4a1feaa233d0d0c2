"""A model whose numbers leave their range: the request that did it fails, and nobody else notices."""

import math
import time
from collections.abc import Iterable

import mlx.core as mx
import pytest

from ling_serve.cache import Caches
from ling_serve.config import EngineOptions
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import ErrorEvent, Event, TokenEvent
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.engine.thread import EngineThread
from ling_serve.errors import CheckpointError, NotFinite
from ling_serve.model.loading import LoadedModel, load_model
from tests.checkpoints import cached_checkpoint

BAD = 200
"""The token whose embedding is not a number."""
MAX_LEN = 128


@pytest.fixture
def loaded() -> LoadedModel:
    loaded = load_model(cached_checkpoint(seed=3), dtype="float32")
    loaded.model.model.word_embeddings.weight[BAD] = math.nan
    return loaded


def make_engine(loaded: LoadedModel, num_blocks: int = 32, **options: int) -> Engine:
    made = EngineOptions(**({"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16} | options))
    layout = loaded.config.cache_layout(loaded.dtype)
    caches = Caches.allocate(layout, num_blocks=num_blocks, block_size=16, num_slots=made.max_num_seqs)
    return Engine(loaded.model, caches, made, vocab_size=loaded.config.vocab_size, max_model_len=MAX_LEN)


def greedy(name: str, prompt: Iterable[int], max_tokens: int = 6) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, logit_bias={BAD: -100}))


def finish(engine: Engine) -> list[Event]:
    events = list[Event]()
    while engine.has_work:
        events += engine.step()
    return events


def tokens(events: Iterable[Event], name: str) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent) and event.request_id == name]


def failures(events: Iterable[Event]) -> dict[str, BaseException]:
    return {event.request_id: event.error for event in events if isinstance(event, ErrorEvent)}


def alone(loaded: LoadedModel, request: Request) -> list[int]:
    engine = make_engine(loaded)
    engine.add(request)
    return tokens(finish(engine), request.id)


def test_only_the_request_whose_logits_are_not_finite_fails(loaded: LoadedModel) -> None:
    good = [greedy("before", range(30)), greedy("beside", [7]), greedy("after", range(40, 60))]
    engine = make_engine(loaded)
    events = list[Event]()
    for request in (good[0], greedy("bad", [1, BAD, 2]), greedy("long and bad", [BAD, *range(50)]), *good[1:]):
        engine.add(request)
        events += engine.step()
    events += finish(engine)
    failed, stats = failures(events), engine.stats()
    print(failed, stats)
    assert set(failed) == {"bad", "long and bad"}
    assert all(isinstance(error, NotFinite) and error.status == 500 for error in failed.values())
    assert "after 3 tokens" in str(failed["bad"])
    for request in good:
        assert tokens(events, request.id) == alone(loaded, request)
    assert (stats.failed, stats.running, stats.waiting, stats.free_blocks) == (2, 0, 0, stats.num_blocks)
    assert sum(stats.finished.values()) == 3


def test_every_request_of_a_step_may_fail(loaded: LoadedModel) -> None:
    engine = make_engine(loaded)
    for number in range(3):
        engine.add(greedy(str(number), [BAD]))
    assert set(failures(finish(engine))) == {"0", "1", "2"}
    engine.add(greedy("good", [5]))
    assert len(tokens(finish(engine), "good")) == 6


def test_blocks_that_held_garbage_pass_on_none_of_it(loaded: LoadedModel) -> None:
    """The next owner fills a part of each block, and attention weighs the rest by 0: 0 · NaN would be NaN."""
    request = greedy("next", range(3))
    for end in ("failure", "abort while prefilling"):
        engine = make_engine(loaded, num_blocks=8)
        engine.add(greedy("bad", [BAD] * 100))
        if end == "failure":
            assert set(failures(finish(engine))) == {"bad"}
        else:
            engine.step()
            engine.step()
            engine.abort("bad")
        engine.add(request)
        assert tokens(finish(engine), "next") == alone(loaded, request), end


def test_a_preempted_prompt_leaves_no_garbage_either(loaded: LoadedModel) -> None:
    """The bad one is the newest and only partly computed when the older one needs its block."""
    engine = make_engine(loaded, num_blocks=8, max_num_batched_tokens=4)
    old = greedy("old", range(15), max_tokens=80)
    engine.add(old)
    for _ in range(4):
        engine.step()
    engine.add(greedy("bad", [BAD] * 90))
    events = finish(engine)
    print(engine.stats())
    assert engine.stats().preemptions >= 1
    assert set(failures(events)) == {"bad"}
    assert tokens(events, "old") == alone(loaded, old)[-len(tokens(events, "old")) :]
    assert len(tokens(events, "old")) > 70


def test_an_engine_that_cannot_answer_its_first_prompt_does_not_start(loaded: LoadedModel) -> None:
    loaded.model.model.word_embeddings.weight[0] = math.nan
    with pytest.raises(CheckpointError, match=r"first prompt.*not finite"):
        make_engine(loaded).warm_up()


def test_the_thread_goes_on_after_a_failure() -> None:
    def build() -> Engine:
        loaded = load_model(cached_checkpoint(seed=3), dtype="float32")
        loaded.model.model.word_embeddings.weight[BAD] = mx.array(math.nan)
        return make_engine(loaded)

    thread, events = EngineThread(build), list[Event]()
    thread.start()
    while thread.state == "loading":
        time.sleep(0.01)
    for name, prompt in (("bad", [BAD]), ("good", [5])):
        thread.submit(greedy(name, prompt), events.append)
    while len(tokens(events, "good")) < 6 and thread.state == "ready":
        time.sleep(0.01)
    assert thread.state == "ready"
    assert set(failures(events)) == {"bad"}
    assert thread.stop(10)
