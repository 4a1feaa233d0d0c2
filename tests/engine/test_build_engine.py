"""From a checkpoint to an engine that answers, within the memory there is."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from ling_serve.config import EngineOptions, ModelOptions, ServeConfig
from ling_serve.engine import build as build_module
from ling_serve.engine import device_memory
from ling_serve.engine.build import LEAST_BUFFER_CACHE, build_engine
from ling_serve.engine.step_cost import StepCost, measure_step
from ling_serve.errors import CheckpointError, ConfigError
from ling_serve.model.loading import load_model
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_model import greedy, run, tokens_by_request

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return cached_checkpoint()


@pytest.fixture(autouse=True)
def _restore_the_buffer_cache() -> Iterator[None]:
    before = mx.set_cache_limit(LEAST_BUFFER_CACHE)
    yield
    mx.set_cache_limit(before)


def config(checkpoint: Path, **engine: object) -> ServeConfig:
    return ServeConfig(ModelOptions(str(checkpoint)), EngineOptions(**engine))  # pyright: ignore[reportArgumentType]


def test_a_built_engine_answers_and_has_reported_its_loading(checkpoint: Path) -> None:
    reported = list[tuple[int, int]]()
    engine = build_engine(config(checkpoint, max_num_seqs=2), lambda done, total: reported.append((done, total)))
    print("\n".join(f"{label}: {value}" for label, value in engine.info))
    assert dict(engine.info)["layers"] == "1 MLA / 3 KDA"
    assert engine.max_model_len == 2048
    assert engine.stats().steps == 0
    assert reported[-1][0] == reported[-1][1] > 0
    engine.add(greedy("a", range(10), max_tokens=4))
    assert len(tokens_by_request(run(engine))["a"]) == 4


def test_the_context_shrinks_to_the_memory_and_an_explicit_one_does_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = StepCost(bytes=8 * MIB, bytes_per_token=16_000)
    monkeypatch.setattr(build_module, "measure_step", lambda *args, **kwargs: cost)
    monkeypatch.setattr(build_module, "memory_limit_bytes", lambda: 24 * MIB)
    engine = build_engine(config(checkpoint))
    print(f"fits: {engine.max_model_len}")
    assert 32 <= engine.max_model_len < 2048
    with pytest.raises(ConfigError, match="--max-model-len is 2048, but only") as caught:
        build_engine(config(checkpoint, max_model_len=2048))
    assert "largest step (2,048 tokens)" in caught.value.message
    monkeypatch.setattr(build_module, "memory_limit_bytes", lambda: 8 * MIB)
    with pytest.raises(ConfigError, match="the caches do not fit"):
        build_engine(config(checkpoint))


@pytest.mark.parametrize("tokens", [64, 512, 2048])
def test_the_estimate_covers_a_real_step_at_the_end_of_the_context(checkpoint: Path, tokens: int) -> None:
    engine = build_engine(config(checkpoint, max_num_seqs=1, max_num_batched_tokens=tokens))
    loaded = load_model(checkpoint, dtype="float32")
    options = EngineOptions(max_num_seqs=1, max_num_batched_tokens=tokens)
    layout = loaded.config.cache_layout(loaded.dtype)
    cost = measure_step(loaded.model, layout, options, vocab_size=320, max_model_len=2048)
    engine.add(greedy("a", [number % 320 for number in range(2047)], max_tokens=1))
    rise = 0
    while engine.has_work:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.step()
        rise = max(rise, mx.get_peak_memory() - before)
    estimate = cost.bytes + cost.bytes_per_token * 2048
    print(f"{tokens} tokens a step: {cost}, estimated {estimate / MIB:.1f} MiB, took {rise / MIB:.1f} MiB")
    assert rise <= 1.1 * estimate
    assert estimate <= 4 * rise


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="/nowhere"):
        build_engine(ServeConfig(ModelOptions("/nowhere")))


def test_a_cpu_whose_free_memory_is_unknown_counts_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = device_memory.memory_limit_bytes()
    monkeypatch.setattr(device_memory, "free_memory_bytes", lambda: None)
    assert device_memory.memory_limit_bytes() > known > 0
