"""Builds the demo's tokenizer: byte-level BPE with Ling's special tokens, every digit a token of its own.

`python -m ling_serve.demo.tokenizer` writes tokenizer.json and tokenizer_config.json into the checkpoint folder. The
result depends on the training conversations alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ling_serve.demo import CHECKPOINT, data

VOCAB_SIZE = 512
END_OF_TURN = "<|role_end|>"
PADDING = "<|endoftext|>"
CONTROL_TOKENS = (PADDING, "<|startoftext|>", END_OF_TURN, "<role>", "</role>")
"""Tokens that are never part of a message's text."""
TEXT_TOKENS = (
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens that stay readable in decoded text, where the parsers look for them."""
_RESERVED = len(CONTROL_TOKENS) + len(TEXT_TOKENS)


def build_tokenizer(conversations: int = 20_000) -> Tokenizer:
    """Train on `conversations` generated ones. Ids: 0 to 255 the bytes, then the merges, the special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - _RESERVED,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TEXT_TOKENS])
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_max_length": max_length,
    }


def _texts(conversations: int) -> Iterator[str]:
    rng = random.Random(0)
    yield from ["SYSTEM", "HUMAN", "ASSISTANT", "OBSERVATION", "detailed thinking on", "detailed thinking off"] * 5000
    yield from [_COMMON_WORDS] * 100
    for _ in range(conversations):
        conversation = data.random_conversation(rng, thinking=True)
        yield conversation.system or ""
        for turn in conversation.turns:
            yield turn.question
            yield turn.reasoning
            yield turn.answer


_COMMON_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or one had by words but not "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after called just where most know "
    "name type description string number object properties required function parameters arguments "
    '{"type": "function", "function": {"name": "get"}}'
)


def write_tokenizer(folder: Path, max_length: int) -> None:
    build_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_length), indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tokenizer(CHECKPOINT, max_length=8192)
