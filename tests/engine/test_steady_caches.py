"""Caches are made once: no request, step or call makes another, and a step reads and writes states for all at once."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from ling_serve.cache import Caches, LatentPool, StateSlotPool
from ling_serve.config import EngineOptions
from ling_serve.engine.engine import Engine
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.model.config import ModelConfig
from tests.engine.fake_model import run
from tests.parity.random_model import random_model, small_config

VALUES = small_config()
CONFIG = ModelConfig.from_dict(VALUES)
NUM_KDA = 3


def make_engine(num_blocks: int = 20) -> Engine:
    options = EngineOptions(block_size=16, max_num_seqs=8, max_num_batched_tokens=48)
    caches = Caches.allocate(CONFIG.cache_layout(mx.float32), num_blocks=num_blocks, block_size=16, num_slots=8)
    return Engine(random_model(VALUES), caches, options, vocab_size=CONFIG.vocab_size, max_model_len=128)


def add(engine: Engine, number: int, prompt_len: int, max_tokens: int) -> None:
    prompt = tuple((7 * number + t) % CONFIG.vocab_size for t in range(prompt_len))
    engine.add(Request(str(number), prompt, SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)))


def test_no_request_and_no_step_makes_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = make_engine(num_blocks=9), list[str]()

    def noting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if owner is not mx or caller.startswith(("ling_serve.cache", "ling_serve.model")):
                made.append(f"{name} by {caller}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for pool in (LatentPool, StateSlotPool):
        noting(pool, "__init__")
    for name in ("zeros", "full", "ones"):
        noting(mx, name)
    for number in range(24):
        add(engine, number, prompt_len=1 + 3 * number, max_tokens=4 + number)
        engine.step()
    run(engine)
    stats = engine.stats()
    print(stats)
    assert not made
    assert stats.preemptions >= 1
    assert stats.mixed_steps >= 1


def test_memory_ends_where_it_began() -> None:
    engine = make_engine()
    engine.warm_up()
    before = mx.get_active_memory()
    for number in range(40):
        add(engine, number, prompt_len=1 + 2 * number, max_tokens=3)
    run(engine)
    rise = mx.get_active_memory() - before
    print(f"active memory rose by {rise} bytes in 40 requests")
    assert rise < CONFIG.cache_layout(mx.float32).bytes_per_slot // 2


@pytest.mark.parametrize("decoding", [1, 7])
def test_states_are_read_and_written_once_for_all_decoding_and_once_for_all_prefilling(
    decoding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop over requests around a layer's work, whether or not a prompt is in the step."""
    engine, counts = make_engine(), Counter[str]()
    for name in ("read", "write"):
        real = getattr(StateSlotPool, name)

        def counted(self: StateSlotPool, *args: Any, name: str = name, real: Any = real) -> Any:
            counts[name] += 1
            return real(self, *args)

        monkeypatch.setattr(StateSlotPool, name, counted)
    for number in range(decoding):
        add(engine, number, prompt_len=2, max_tokens=20)
    engine.step()
    counts.clear()
    engine.step()
    assert counts == {"read": NUM_KDA, "write": NUM_KDA}
    add(engine, 99, prompt_len=30, max_tokens=5)
    counts.clear()
    engine.step()
    assert engine.stats().mixed_steps == 1
    assert counts == {"read": 2 * NUM_KDA, "write": 2 * NUM_KDA}
