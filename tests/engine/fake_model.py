"""A model that computes with whole numbers, so that any stale or misplaced cache row changes the tokens for certain."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ling_serve.cache import CacheLayout, Caches, KdaState
from ling_serve.config import EngineOptions
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import AbortedEvent, Event, TokenEvent
from ling_serve.engine.request import Request, SamplingParams
from ling_serve.model.forward_batch import ForwardBatch

VOCAB = 97
TAPS = 3
LAYOUT = CacheLayout(
    mla_layers=(1,),
    kda_layers=(0,),
    latent_width=4,
    latent_dtype=mx.float32,
    conv_taps=TAPS,
    conv_width=2,
    conv_dtype=mx.float32,
    num_heads=1,
    key_dim=2,
    value_dim=3,
)


def next_token(tokens: Iterable[int]) -> int:
    """What the model answers to these tokens: all of them count, and their order does."""
    state, latents, history = 0, 0, [0] * TAPS
    for position, token in enumerate(tokens):
        state = _advance(state, token)
        latents += _latent(token, position)
        history = [*history[1:], token]
    return (state + latents + sum(history)) % VOCAB


def expected_output(prompt: Iterable[int], count: int) -> list[int]:
    """Greedy continuation, without an engine."""
    tokens, start = list(prompt), len(list(prompt))
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[start:]


class FakeModel:
    """`next_token` through real pools: a running state, the last inputs, and a sum over the pages."""

    def __init__(self) -> None:
        self.head_calls = 0
        self.batches: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch, caches: Caches) -> mx.array:
        self.batches.append(batch)
        tokens = [int(token) for token in batch.tokens.tolist()]
        positions = [int(position) for position in batch.positions.tolist()]
        caches.latents.write(
            1,
            batch.write_at,
            mx.array([[_latent(token, position)] * 4 for token, position in zip(tokens, positions, strict=True)]),
        )
        held = caches.latents.pages(1, batch.page_table)[:, :, 2].tolist()
        before = caches.states.read(0, batch.read_slots)
        states = [int(value) for value in before.recurrent[:, 0, 2, 1].tolist()]
        histories = [[int(value) for value in row] for row in before.conv[:, :, 1].tolist()]
        answers = list[int]()
        for piece in range(batch.num_pieces):
            for row in range(batch.cu_seqlens[piece], batch.cu_seqlens[piece + 1]):
                states[piece] = _advance(states[piece], tokens[row])
                histories[piece] = [*histories[piece][1:], tokens[row]]
                latents = sum(held[piece][: positions[row] + 1])
                answers.append(int(states[piece] + latents + sum(histories[piece])) % VOCAB)
        shape = (batch.num_pieces, 1, LAYOUT.value_dim, LAYOUT.key_dim)
        caches.states.write(
            0,
            batch.write_slots,
            KdaState(
                mx.broadcast_to(mx.array(histories, dtype=mx.float32)[:, :, None], (batch.num_pieces, TAPS, 2)),
                mx.broadcast_to(mx.array(states, dtype=mx.float32)[:, None, None, None], shape),
            ),
        )
        return mx.array(answers, dtype=mx.float32)[:, None]

    def logits(self, hidden: mx.array) -> mx.array:
        self.head_calls += 1
        return mx.where(mx.arange(VOCAB)[None] == hidden, 8.0, 0.0)


def fake_engine(
    *, num_blocks: int = 64, max_model_len: int = 256, model: FakeModel | None = None, **options: int
) -> Engine:
    made = EngineOptions(**({"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16} | options))
    caches = Caches.allocate(LAYOUT, num_blocks=num_blocks, block_size=made.block_size, num_slots=made.max_num_seqs)
    return Engine(
        model or FakeModel(), caches, made, vocab_size=VOCAB, max_model_len=min(max_model_len, num_blocks * 16)
    )


def greedy(request_id: str, prompt: Iterable[int], max_tokens: int = 8, **sampling: object) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling))


def tokens_by_request(events: Iterable[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in events:
        assert isinstance(event, TokenEvent | AbortedEvent), event
        if isinstance(event, TokenEvent):
            found.setdefault(event.request_id, []).append(event.token)
    return found


def run(engine: Engine, max_steps: int = 10_000) -> list[Event]:
    events = list[Event]()
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError(f"still working after {max_steps} steps")


def _advance(state: int, token: int) -> int:
    return (31 * state + token + 7) % VOCAB


def _latent(token: int, position: int) -> int:
    return (token + 3) * (position + 1) % VOCAB
