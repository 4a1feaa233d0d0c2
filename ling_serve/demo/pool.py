"""Turns generated conversations into fixed-length rows of token ids that say which tokens the model must learn."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ling_serve.demo import CHECKPOINT
from ling_serve.demo.data import Conversation, random_conversation

Rows = npt.NDArray[np.uint16]
"""[rows, length]: the token id in the low 15 bits; the top bit marks tokens the model must produce."""

LEARNED = 0x8000
SHORT_ROW = 64
"""Tokens of a row that holds one question, answered without thinking."""
LONG_ROW = 128
"""Tokens of a row with thinking, or with several turns."""
_SHARD = 10_000


@dataclass(frozen=True)
class Segment:
    """Consecutive text that is either given to the model or produced by it."""

    text: str
    learned: bool


def segments(conversation: Conversation) -> list[Segment]:
    """What the chat template renders for `conversation`, cut at the borders of what the model says."""
    flag = "detailed thinking " + ("on" if conversation.thinking else "off")
    system = f"{conversation.system}\n{flag}" if conversation.system else flag
    given = f"<role>SYSTEM</role>{system}<|role_end|>"
    result: list[Segment] = []
    for turn in conversation.turns:
        given += f"<role>HUMAN</role>{turn.question}<|role_end|><role>ASSISTANT</role>\n<think>"
        if conversation.thinking:
            said = f"{turn.reasoning}</think>{turn.answer}<|role_end|>"
        else:
            given += "</think>"
            said = f"{turn.answer}<|role_end|>"
        result += [Segment(given, False), Segment(said, True)]
        given = ""
    return result


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def encode(tokenizer: Tokenizer, conversations: Iterable[Conversation], length: int) -> Rows:
    """One row for each conversation that fits `length` tokens, after its last turns are dropped if need be.

    A conversation whose first turn alone is too long gives no row.
    """
    pad: int = tokenizer.encode("<|endoftext|>", add_special_tokens=False).ids[0]
    cut = [segments(conversation) for conversation in conversations]
    texts = [segment.text for pieces in cut for segment in pieces]
    ids = iter(encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    rows: list[list[int]] = []
    for pieces in cut:
        row: list[int] = []
        turns = [(next(ids), next(ids)) for _ in range(len(pieces) // 2)]
        for given, said in turns:
            if len(row) + len(given) + len(said) > length:
                break
            row += given + [token | LEARNED for token in said]
        if row:
            rows.append(row + [pad] * (length - len(row)))
    return np.asarray(rows, dtype=np.uint16).reshape(-1, length)


def short_conversation(rng: random.Random) -> Conversation:
    """One question, thinking off."""
    return random_conversation(rng, thinking=False)


def long_conversation(rng: random.Random) -> Conversation:
    """Thinking on, or several turns, or both."""
    if rng.random() < 0.5:
        return random_conversation(rng, thinking=True)
    return random_conversation(rng, thinking=rng.random() < 0.4, turns=rng.randint(2, 4))


def make_pool(short: int, long: int, seed: int, workers: int) -> tuple[Rows, int]:
    """Training rows of LONG_ROW tokens, and how many of the first ones are pairs of short rows.

    `short` and `long` count conversations. The result depends on them and on `seed`, not on `workers`.
    """
    jobs = [
        (kind, min(_SHARD, count - start), seed + start)
        for kind, count in (("short", short), ("long", long))
        for start in range(0, count, _SHARD)
    ]
    if workers <= 1:
        shards = [_shard(job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
            shards = list(executor.map(_shard, jobs))
    shorts = np.concatenate([rows for rows in shards if rows.shape[1] == SHORT_ROW])
    pairs = shorts[: len(shorts) // 2 * 2].reshape(-1, 2 * SHORT_ROW)
    return np.concatenate([pairs, *(rows for rows in shards if rows.shape[1] == LONG_ROW)]), len(pairs)


def _shard(job: tuple[str, int, int]) -> Rows:
    kind, count, seed = job
    make, length = _KINDS[kind]
    rng = random.Random(f"{kind}:{seed}")
    return encode(load_tokenizer(), [make(rng) for _ in range(count)], length)


def learned_texts(tokenizer: Tokenizer, row: Sequence[int]) -> list[str]:
    """The stretches of a row that the model must produce, for tests and reports."""
    texts: list[str] = []
    run: list[int] = []
    for token in [*row, 0]:
        if token & LEARNED:
            run.append(token & ~LEARNED)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


_KINDS: dict[str, tuple[Callable[[random.Random], Conversation], int]] = {
    "short": (short_conversation, SHORT_ROW),
    "long": (long_conversation, LONG_ROW),
}
