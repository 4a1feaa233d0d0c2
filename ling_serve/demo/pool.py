"""Turns generated conversations into fixed-length rows of token ids that say which tokens the model must learn."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ling_serve.demo import CHECKPOINT
from ling_serve.demo.data import Conversation, random_conversation

Rows = npt.NDArray[np.uint16]
"""[rows, length]: token ids, with the flags LEARNED and START in the top bits."""

LEARNED = 0x8000
"""Flags a token that the model must produce."""
START = 0x4000
"""Flags the first token of a conversation that shares its row with others."""
TOKEN = 0x3FFF
"""The bits of the id itself."""
ROW = 128
"""Tokens of a training row; several conversations share one."""
_ALIGNMENT = 16
_SHARD = 20_000


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


def encode(tokenizer: Tokenizer, conversations: Iterable[Conversation], most: int = ROW) -> list[list[int]]:
    """Flagged ids of each conversation; last turns are dropped so that it has at most `most` tokens.

    A conversation whose first turn alone is too long is left out.
    """
    cut = [segments(conversation) for conversation in conversations]
    texts = [segment.text for pieces in cut for segment in pieces]
    ids = iter(encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    result: list[list[int]] = []
    for pieces in cut:
        row: list[int] = []
        turns = [(next(ids), next(ids)) for _ in range(len(pieces) // 2)]
        for given, said in turns:
            if len(row) + len(given) + len(said) > most:
                break
            row += given + [token | LEARNED for token in said]
        if row:
            result.append(row)
    return result


def pad(conversations: Sequence[Sequence[int]], padding: int, length: int) -> Rows:
    """One row of `length` tokens for each conversation."""
    rows = [[*ids, *[padding] * (length - len(ids))] for ids in conversations]
    return np.asarray(rows, dtype=np.uint16).reshape(-1, length)


def pack(conversations: Iterable[Sequence[int]], padding: int, length: int = ROW) -> Rows:
    """Rows that hold several conversations each, every one starting at a multiple of 16."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []
    for ids in conversations:
        size = -(-len(ids) // _ALIGNMENT) * _ALIGNMENT
        fitting = [row for row in open_rows if len(row) + size <= length]
        if not fitting:
            open_rows.append([])
        row = fitting[0] if fitting else open_rows[-1]
        row += [ids[0] | START, *ids[1:], *[padding] * (size - len(ids))]
        if len(row) > length - 2 * _ALIGNMENT:
            open_rows.remove(row)
            rows.append(row)
    return pad(rows + open_rows, padding, length)


def training_conversation(rng: random.Random, short_share: float) -> Conversation:
    """Mostly one question without thinking; else with thinking, or several turns, or both."""
    if rng.random() < short_share:
        return random_conversation(rng, thinking=False)
    if rng.random() < 0.5:
        return random_conversation(rng, thinking=True)
    return random_conversation(rng, thinking=rng.random() < 0.4, turns=rng.randint(2, 4))


def make_pool(count: int, short_share: float, seed: int, workers: int) -> Rows:
    """Training rows of `count` conversations. The result depends on all arguments but `workers`."""
    jobs = [(min(_SHARD, count - start), short_share, seed + start) for start in range(0, count, _SHARD)]
    if workers <= 1:
        return np.concatenate([_shard(job) for job in jobs])
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        return np.concatenate(list(executor.map(_shard, jobs)))


def padding_id(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("<|endoftext|>", add_special_tokens=False).ids[0]


def _shard(job: tuple[int, float, int]) -> Rows:
    count, short_share, seed = job
    rng = random.Random(f"pool:{seed}")
    tokenizer = load_tokenizer()
    conversations = encode(tokenizer, [training_conversation(rng, short_share) for _ in range(count)])
    return pack(conversations, padding_id(tokenizer))
