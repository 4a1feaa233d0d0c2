"""A small random fp32 checkpoint that both servers load, whose greedy answers are words and never end early."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from tests.checkpoints import write_checkpoint

FIRST_WORD = 320
"""Ids from here on are the words of prompts and answers; the ones below are bytes and special tokens."""

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 8192,
}


def write_random_checkpoint(folder: Path) -> Path:
    """Write the checkpoint in the official layout: 8 layers (2 MLA, 6 KDA), about 20 million parameters.

    The head's rows of bytes and special tokens are zero. Among thousands of spread-out logits they are never the
    likeliest, so greedy answers have exactly `max_tokens` tokens and each is a word.
    """
    write_checkpoint(folder, CONFIG, dtype="float32", shards=1)
    weights = folder / "model.safetensors"
    tensors = dict(mx.load(str(weights)))
    words = mx.arange(CONFIG["vocab_size"])[:, None] >= FIRST_WORD
    tensors["lm_head.weight"] = mx.where(words, tensors["lm_head.weight"], 0.0)
    mx.eval(tensors)
    mx.save_safetensors(str(weights), tensors, metadata={"format": "pt"})
    _add_words(folder / "tokenizer.json")
    return folder


def _add_words(file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(file))
    fillers = [f"<|unused{token}|>" for token in range(tokenizer.get_vocab_size(), FIRST_WORD)]
    words = [word(token) for token in range(FIRST_WORD, CONFIG["vocab_size"])]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in fillers + words])
    tokenizer.save(str(file))


def word(token: int) -> str:
    """The text of one word token."""
    return f"w{token:04d};"


def prompt_ids(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Random prompts that share no beginning, so that no server's prompt cache helps."""
    source = random.Random(seed)
    words = range(FIRST_WORD, CONFIG["vocab_size"])
    return [[first, *source.choices(words, k=tokens - 1)] for first in source.sample(words, count)]


def prompts(count: int, tokens: int, seed: int) -> Sequence[str]:
    """`prompt_ids` as texts, of exactly `tokens` tokens each."""
    return ["".join(map(word, ids)) for ids in prompt_ids(count, tokens, seed)]
