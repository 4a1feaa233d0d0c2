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

from ling_serve.demo import data, phrases
from ling_serve.demo.data import Conversation, Turn
from ling_serve.demo.pool import LEARNED, TOKEN, Rows, encode, load_tokenizer, pad, padding_id

Predict = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.int32]]
"""[B, T] token ids to the likeliest next token after each, [B, T]."""


@dataclass(frozen=True)
class Task:
    """Rows of one kind of question."""

    name: str
    rows: Rows


def questions(samples: int, seed: int = 1_000_003) -> dict[str, list[Turn]]:
    """`samples` turns of every kind, by its name; the same ones every time."""
    result: dict[str, list[Turn]] = {}
    for name, make in _MAKERS.items():
        rng = random.Random(f"{name}:{seed}")
        result[name] = [make(rng) for _ in range(samples)]
    return result


def tasks(samples: int) -> list[Task]:
    """Rows of `questions`, each with thinking off and on, and of conversations of three turns."""
    result = [
        _task(f"{name}, thinking {'on' if thinking else 'off'}", [Conversation((turn,), thinking) for turn in turns])
        for name, turns in questions(samples).items()
        for thinking in (False, True)
    ]
    rng = random.Random(samples)
    several = [data.random_conversation(rng, thinking=False, turns=3) for _ in range(samples)]
    return [*result, _task("three turns, thinking off", several)]


def product_turns() -> list[Turn]:
    """Every product from 10 × 10 to 99 × 99, as `a * b`."""
    return [data.product_turn(a, b, "{a} * {b}") for a in range(10, 100) for b in range(10, 100)]


def all_products() -> Task:
    """`product_turns` with thinking off."""
    return _task("all 8,100 products, thinking off", [Conversation((turn,), False) for turn in product_turns()])


def _task(name: str, conversations: list[Conversation]) -> Task:
    tokenizer = load_tokenizer()
    ids = encode(tokenizer, conversations)
    length = -(-max(map(len, ids)) // 16) * 16
    return Task(name, pad(ids, padding_id(tokenizer), length))


def right_rows(predict: Predict, rows: Rows, batch: int = 256) -> npt.NDArray[np.bool_]:
    """[rows] whether greedy decoding gives exactly the wanted text."""
    right: list[npt.NDArray[np.bool_]] = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch].astype(np.int32)
        tokens = part & TOKEN
        same = predict(tokens)[:, :-1] == tokens[:, 1:]
        right.append((same | (part[:, 1:] < LEARNED)).all(axis=-1))
    return np.concatenate(right)


_MAKERS: dict[str, Callable[[random.Random], Turn]] = {
    "products": data.random_product,
    "products, wordings never trained": lambda rng: data.random_product(rng, phrases.PRODUCT_NEVER_TRAINED),
    "sums": data.random_sum,
    "sums never trained": lambda rng: data.random_sum(rng, held_out=True),
    "differences": data.random_difference,
    "differences never trained": lambda rng: data.random_difference(rng, held_out=True),
    "discounts": data.random_discount,
    "discounts never trained": lambda rng: data.random_discount(rng, held_out=True, new_item=True),
    "small talk": data.random_talk,
    "other questions": data.random_other,
}
