"""Training rows: what the template renders, with the right tokens marked, packed without loss."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ling_serve.demo import CHECKPOINT, data, pool
from ling_serve.demo.data import Conversation


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pool.load_tokenizer()


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    if conversation.system:
        result.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        reasoning = turn.reasoning if conversation.thinking else ""
        result.append({"role": "user", "content": turn.question})
        result.append({"role": "assistant", "content": turn.answer, "reasoning_content": reasoning})
    return result


@pytest.mark.parametrize("thinking", [False, True])
def test_segments_are_what_the_template_renders(thinking: bool) -> None:
    chat: Any = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    rng = random.Random(3)
    for _ in range(40):
        conversation = data.random_conversation(rng, thinking, turns=rng.randint(1, 3))
        rendered = chat.apply_chat_template(messages(conversation), tokenize=False, enable_thinking=thinking)
        pieces = pool.segments(conversation)
        assert "".join(piece.text for piece in pieces) == rendered
        prompt = chat.apply_chat_template(
            messages(conversation)[:-1], tokenize=False, enable_thinking=thinking, add_generation_prompt=True
        )
        assert "".join(piece.text for piece in pieces[:-1]) == prompt


def test_encoding_in_pieces_gives_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(60):
        conversation = data.random_conversation(rng, thinking=rng.random() < 0.5)
        (ids,) = pool.encode(tokenizer, [conversation])
        pieces = pool.segments(conversation)
        whole = "".join(piece.text for piece in pieces)
        assert [token & pool.TOKEN for token in ids] == tokenizer.encode(whole, add_special_tokens=False).ids
        learned = [token & pool.TOKEN for token in ids if token & pool.LEARNED]
        assert tokenizer.decode(learned, skip_special_tokens=False) == pieces[1].text


def test_long_conversations_lose_whole_turns(tokenizer: Tokenizer) -> None:
    conversation = data.random_conversation(random.Random(5), thinking=True, turns=6)
    (ids,) = pool.encode(tokenizer, [conversation], most=128)
    assert len(ids) <= 128
    assert tokenizer.decode([ids[-1] & pool.TOKEN], skip_special_tokens=False) == "<|role_end|>"
    assert pool.encode(tokenizer, [conversation], most=20) == []


def test_packing_keeps_every_conversation_and_aligns_it(tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    padding = pool.padding_id(tokenizer)
    conversations = pool.encode(tokenizer, [pool.training_conversation(rng, 0.7) for _ in range(200)])
    rows = pool.pack(conversations, padding)
    found: list[list[int]] = []
    for row in rows:
        starts = np.flatnonzero(row & pool.START)
        assert starts[0] == 0
        assert not (starts % 16).any()
        for start, end in zip(starts, [*starts[1:], len(row)], strict=True):
            ids = [int(token) & ~pool.START for token in row[start:end]]
            while ids[-1] == padding:
                ids.pop()
            found.append(ids)
    print(f"{len(found)} conversations in {len(rows)} rows, {np.mean((rows & pool.TOKEN) != padding):.0%} filled")
    assert sorted(found) == sorted(conversations)


def test_the_pool_follows_from_its_seed() -> None:
    assert (pool.make_pool(300, 0.7, 1, 1) == pool.make_pool(300, 0.7, 1, 1)).all()
    assert not np.array_equal(pool.make_pool(300, 0.7, 1, 1), pool.make_pool(300, 0.7, 2, 1))
