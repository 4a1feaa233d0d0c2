"""What a built engine has done before anyone hears that it is ready, and whether its table tells the truth."""

from __future__ import annotations

import re
import time
from typing import Any, NoReturn

import mlx.core as mx
import pytest

from ling_serve.cache import StateSlotPool
from ling_serve.config import EngineOptions, ModelOptions, ServeConfig
from ling_serve.engine.build import build_engine
from ling_serve.engine.engine import Engine
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.engine.runner import Runner
from ling_serve.engine.thread import EngineThread
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_model import run

WIDE_STATES = {"head_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 512}
"""A sequence's states weigh as much as the latents of 400 tokens."""
STATE_BYTES = 3 * 4 * (4 * 32 * 32 + 3 * 3 * 4 * 32)


def serve_config(**options: Any) -> ServeConfig:
    values = {"max_num_seqs": 3, "max_num_batched_tokens": 128} | options
    return ServeConfig(ModelOptions(str(cached_checkpoint(WIDE_STATES)), dtype="float32"), EngineOptions(**values))


def caches_of(engine: Engine) -> Any:
    return engine._runner._caches  # pyright: ignore[reportPrivateUsage]


def test_freed_buffers_are_bounded() -> None:
    """MLX keeps what it frees; without a limit that is most of the machine's memory."""
    unlimited = mx.set_cache_limit(1 << 50)
    try:
        engine = build_engine(serve_config())
        limit = mx.set_cache_limit(1 << 50)
        mx.set_cache_limit(limit)
        print(f"MLX may keep {limit / 2**20:.0f} MiB of freed buffers")
        assert 1 << 20 <= limit <= 1 << 28
        for number in range(6):
            engine.add(Request(str(number), (5,) * (400 + number), SamplingParams(4, temperature=0.0)))
        run(engine)
        assert mx.get_cache_memory() <= limit
    finally:
        mx.set_cache_limit(unlimited)


def test_an_engine_that_fails_at_its_first_step_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Runner, *args: object) -> NoReturn:
        raise RuntimeError("planted")

    monkeypatch.setattr(Runner, "launch", fail)
    states = list[str]()
    thread = EngineThread(lambda: build_engine(serve_config()), on_state_change=states.append)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.state == "loading":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert states == ["dead"]
    assert thread.engine_info is None
    assert thread.stop(10)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_have_the_size_that_was_asked_for(block_size: int) -> None:
    """However much larger a state is than the latents of a block."""
    engine = build_engine(serve_config(block_size=block_size))
    pools = caches_of(engine).latents.arrays()
    assert {pool.shape[1] for pool in pools} == {block_size}
    assert 4 * pools[0][0].nbytes < STATE_BYTES
    assert engine.stats().num_blocks == 3 * 512 // block_size


def test_the_table_says_what_there_is() -> None:
    engine = build_engine(serve_config(max_num_seqs=5))
    caches, table = caches_of(engine), dict(engine.info)
    print("\n".join(f"{label}: {value}" for label, value in engine.info))

    blocks, size = re.match(r"([\d,]+) blocks x (\d+) tokens", table["MLA latents (1 layers)"]).groups()  # type: ignore[union-attr]
    [latents] = caches.latents.arrays()
    assert latents.shape[:2] == (int(blocks) + 1, int(size))  # and the scratch block
    assert engine.stats().num_blocks == int(blocks)
    assert table["context that fits"] == "512 of 512 tokens"
    sequences = float(table["sequences at that length"])
    assert sequences == int(blocks) * int(size) / 512 == 5.0

    memory = engine._memory  # pyright: ignore[reportPrivateUsage]
    for number in range(5):
        assert memory.fits(str(number), 512)
        memory.hold(str(number), 512)
    assert (memory.num_free_blocks, memory.num_free_slots) == (0, 0)


def test_the_states_weigh_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(serve_config(max_num_seqs=5))
    pool: StateSlotPool = caches_of(engine).states
    slots = re.match(r"(\d+) \+ 2 slots x ([\d.]+) KiB", dict(engine.info)["KDA states (3 layers)"])
    assert slots is not None
    for number in range(5):
        engine.add(Request(str(number), (1 + number,) * 9, SamplingParams(8, temperature=0.0, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    held = sum(array.nbytes for array in pool.arrays())
    assert int(slots[1]) == pool.num_slots == 5
    assert held == 5 * STATE_BYTES
    assert held / 5 / 1024 == pytest.approx(float(slots[2]), abs=0.01)
    run(engine)
