"""Tokenizers of the two families that can be spelled token by token, made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ling_serve.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer

_CORPUS = (
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "你好、世界。人工智能改变世界。",
    "naïve café résumé; ещё раз; שלום; \U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd e\u0301",
    "def add(a, b):\n    return a + b\n",
)


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 0 to 255 are the bytes; special tokens follow. The folder is shared: never change it."""
    folder = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(byte_checkpoint)


@pytest.fixture(scope="session")
def bpe_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with merges, so that tokens end inside characters and hold several."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|role_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 2, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("né e", normalized=False)])
    return Tokenizer.from_checkpoint(save(backend, tmp_path_factory.mktemp("bpe"), eos_token="<|role_end|>"))


@pytest.fixture(scope="session")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece in the manner of Llama: a mark for the space, bytes for what the vocabulary lacks."""
    words = ["▁", "▁the", "▁dog", "dog", "s", "▁a", "你", "好", "é", "▁▁▁"]
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + at for at, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer.from_checkpoint(save(backend, tmp_path_factory.mktemp("pieces"), eos_token="</s>"))


def save(backend: Backend, folder: Path, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture
def checkpoint_with(byte_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the byte-level checkpoint with files replaced (text, or an object for JSON) or removed (None)."""

    def make(**files: Any) -> Path:
        for file in byte_checkpoint.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        for stem, content in files.items():
            path = tmp_path / stem.replace("__", ".")
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return make
