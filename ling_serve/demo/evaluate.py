"""Exact match of greedy answers on generated questions: the table of docs/demo-model.md.

A row is right when the model's first choice is the wanted token at every position it must produce, which is the case
exactly when greedy decoding writes the wanted text, end of turn included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ling_serve.demo import data
from ling_serve.demo.data import Conversation, Turn
from ling_serve.demo.pool import LEARNED, LONG_ROW, SHORT_ROW, Rows, encode, load_tokenizer

Predict = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.int32]]
"""[B, T] token ids to the likeliest next token after each, [B, T]."""


@dataclass(frozen=True)
class Task:
    """Rows of one kind of question."""

    name: str
    rows: Rows


def tasks(samples: int, seed: int = 1_000_003) -> list[Task]:
    """`samples` questions of every kind, each with thinking off and on."""
    tokenizer = load_tokenizer()
    result: list[Task] = []
    for name, make in _MAKERS.items():
        rng = random.Random(f"{name}:{seed}")
        turns = [make(rng) for _ in range(samples)]
        for thinking in (False, True):
            conversations = [Conversation((turn,), thinking) for turn in turns]
            rows = encode(tokenizer, conversations, LONG_ROW if thinking else SHORT_ROW)
            result.append(Task(f"{name}, thinking {'on' if thinking else 'off'}", rows))
    rng = random.Random(seed)
    several = [data.random_conversation(rng, thinking=False, turns=3) for _ in range(samples)]
    return [*result, Task("three turns, thinking off", encode(tokenizer, several, LONG_ROW))]


def all_products() -> Task:
    """Every product from 10 × 10 to 99 × 99 as `a * b`, thinking off."""
    turns = [data.product_turn(a, b, "{a} * {b}") for a in range(10, 100) for b in range(10, 100)]
    return Task(
        "all 8,100 products, thinking off", encode(load_tokenizer(), [Conversation((t,), False) for t in turns], 64)
    )


def right_rows(predict: Predict, rows: Rows, batch: int = 256) -> npt.NDArray[np.bool_]:
    """[rows] whether greedy decoding gives exactly the wanted text."""
    right: list[npt.NDArray[np.bool_]] = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch].astype(np.int32)
        tokens = part & (LEARNED - 1)
        same = predict(tokens)[:, :-1] == tokens[:, 1:]
        right.append((same | (part[:, 1:] < LEARNED)).all(axis=-1))
    return np.concatenate(right)


_MAKERS: dict[str, Callable[[random.Random], Turn]] = {
    "products": data.random_product,
    "sums": data.random_sum,
    "sums never trained": lambda rng: data.random_sum(rng, held_out=True),
    "differences": data.random_difference,
    "differences never trained": lambda rng: data.random_difference(rng, held_out=True),
    "discounts": data.random_discount,
    "discounts never trained": lambda rng: data.random_discount(rng, held_out=True, new_item=True),
    "small talk": data.random_talk,
    "other questions": data.random_other,
}
