"""On a CPU no step copies a pool, and nobody's blocks and slots keep their values."""

import random

import mlx.core as mx
import pytest

from ling_serve.cache import CacheLayout, Caches, KdaState, LatentPool
from ling_serve.config import EngineOptions
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import Event
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.model.loading import LoadedModel, load_model
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_model import run

POISON = 1e30
BLOCK_SIZE = 16
OWNED_BLOCKS = 40
NUM_BLOCKS = 6_000
NUM_SLOTS = 16
MAX_NUM_SEQS = 12

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="a GPU's pools are its kernels' matter"
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """With states that weigh more than the activations of a small step."""
    return load_model(cached_checkpoint({"head_dim": 64, "num_attention_heads": 4}), dtype="float32")


def poison(caches: Caches, layout: CacheLayout, blocks: list[int], slots: list[int]) -> None:
    rows = mx.array([block * BLOCK_SIZE + row for block in blocks for row in range(BLOCK_SIZE)], dtype=mx.int32)
    for layer in layout.mla_layers:
        caches.latents.write(layer, rows, mx.full((rows.size, layout.latent_width), POISON))
    count = len(slots)
    for layer in layout.kda_layers:
        conv = mx.full((count, layout.conv_taps, layout.conv_width), POISON)
        recurrent = mx.full((count, layout.num_heads, layout.value_dim, layout.key_dim), POISON)
        caches.states.write(layer, slots, KdaState(conv, recurrent))
    mx.eval(caches.arrays())


def is_poison(array: mx.array) -> bool:
    return mx.array_equal(array, mx.full(array.shape, POISON, dtype=array.dtype)).item() is True


def check_poison(caches: Caches, layout: CacheLayout, blocks: list[int], slots: list[int]) -> None:
    for layer in layout.mla_layers:
        assert is_poison(caches.latents.pages(layer, mx.array([blocks], dtype=mx.int32)))
    for layer in layout.kda_layers:
        state = caches.states.read(layer, slots)
        assert is_poison(state.conv)
        assert is_poison(state.recurrent)


def test_two_hundred_steps_copy_no_pool_and_touch_no_stranger(loaded: LoadedModel) -> None:
    layout = loaded.config.cache_layout(loaded.dtype)
    mx.clear_cache()
    without_caches = mx.get_active_memory()
    caches = Caches.allocate(layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS)
    options = EngineOptions(block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=24)
    engine = Engine(loaded.model, caches, options, vocab_size=loaded.config.vocab_size, max_model_len=160)
    allocator = engine._memory._blocks  # pyright: ignore[reportPrivateUsage]
    kept_out = allocator.allocate(NUM_BLOCKS - OWNED_BLOCKS)
    strangers = list(range(MAX_NUM_SEQS, NUM_SLOTS))
    poison(caches, layout, kept_out, strangers)
    latent_bytes, state_bytes = caches.latents.arrays()[0].nbytes, NUM_SLOTS * layout.bytes_per_slot
    cache_bytes = latent_bytes * len(layout.mla_layers) + state_bytes
    draw, events = random.Random(2), list[Event]()

    def add(number: int) -> None:
        prompt = tuple(draw.randrange(320) for _ in range(draw.randint(1, 50)))
        engine.add(Request(str(number), prompt, SamplingParams(draw.randint(20, 90), temperature=0.0, ignore_eos=True)))

    for number in range(MAX_NUM_SEQS):
        add(number)
    for _ in range(20):
        engine.step()
    mx.clear_cache()
    before = mx.get_active_memory()
    # A second copy that stays would hide in a baseline taken after the first steps.
    assert before - without_caches < cache_bytes + min(latent_bytes, state_bytes)
    mx.reset_peak_memory()
    while engine.stats().steps < 240 or engine.stats().preemptions < 1:
        if engine.stats().steps % 7 == 0 or not engine.has_work:
            add(engine.stats().steps + 1000)
        events += engine.step()
    rise = mx.get_peak_memory() - before
    stats = engine.stats()
    print(f"\n{stats}\npeak rose by {rise} bytes; a layer's latents are {latent_bytes}, the states {state_bytes}")
    assert stats.preemptions >= 1
    assert sum(stats.finished.values()) >= 4
    assert rise < min(latent_bytes, state_bytes)
    check_poison(caches, layout, kept_out, strangers)
    allocator.free(kept_out)
    run(engine)


def test_the_measurement_sees_a_copy(loaded: LoadedModel) -> None:
    """Someone else holds the array, so MLX cannot write into it."""
    layout = loaded.config.cache_layout(loaded.dtype)
    pool = LatentPool(layout, NUM_BLOCKS, BLOCK_SIZE)
    held = pool.pages(layout.mla_layers[0], mx.array([[0]], dtype=mx.int32))  # reads before the write, evaluated after
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.write(layout.mla_layers[0], mx.array([5], dtype=mx.int32), mx.ones((1, layout.latent_width)))
    mx.eval(pool.arrays())
    mx.eval(held)
    rise = mx.get_peak_memory() - before
    pool_bytes = pool.arrays()[0].nbytes
    print(f"peak rose by {rise / pool_bytes:.3f} of a pool")
    assert rise >= pool_bytes
