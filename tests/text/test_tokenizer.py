"""Loading a tokenizer, and using it from many threads."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ling_serve.errors import CheckpointError
from ling_serve.text.tokenizer import Tokenizer
from tests.byte_tokenizer import END_OF_TEXT, ROLE_END, SPECIAL_TOKENS

MakeCheckpoint = Callable[..., Path]


def test_special_tokens_in_text_are_parsed_unless_told_otherwise(byte_tokenizer: Tokenizer) -> None:
    text = "hi<|role_end|><think>"
    parsed = byte_tokenizer.encode(text)
    plain = byte_tokenizer.encode(text, parse_special=False)
    assert parsed[:3] == [*b"hi", ROLE_END]
    assert plain == list(text.encode())
    assert byte_tokenizer.decode(parsed) == byte_tokenizer.decode(plain) == text
    assert byte_tokenizer.decode(parsed, skip_special_tokens=True) == "hi<think>"


def test_facts_about_the_vocabulary(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.eos_ids == {ROLE_END}
    assert byte_tokenizer.special_ids == set(range(END_OF_TEXT, END_OF_TEXT + len(SPECIAL_TOKENS)))
    assert byte_tokenizer.vocab_size == 273
    assert byte_tokenizer.encode("") == []


def test_one_token_as_bytes_and_text(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    first_byte = "é".encode()[0]
    assert byte_tokenizer.token_bytes(first_byte) == bytes([first_byte])
    assert byte_tokenizer.token_text(first_byte) == "\N{REPLACEMENT CHARACTER}"
    assert byte_tokenizer.token_bytes(ROLE_END) == b"<|role_end|>"
    assert piece_tokenizer.token_bytes(2 + 0xE4) == b"\xe4"
    (dog,) = (i for i in range(piece_tokenizer.vocab_size) if piece_tokenizer.token_bytes(i) == b" dog")
    assert piece_tokenizer.token_text(dog) == " dog"


@pytest.mark.parametrize("token_id", [273, 319, 157_183, 2**31, 2**70, -1])
def test_ids_outside_the_vocabulary_have_no_text(byte_tokenizer: Tokenizer, token_id: int) -> None:
    assert byte_tokenizer.token_bytes(token_id) == b""
    assert byte_tokenizer.decode([*b"a", token_id, *b"b"]) == "ab"


def test_half_a_surrogate_pair_is_replaced(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode("a\ud83db")) == "a\N{REPLACEMENT CHARACTER}b"
    assert byte_tokenizer.decode(byte_tokenizer.encode("\ud83d\ude00")) == "\U0001f600"


def test_other_threads_go_on_while_a_long_text_is_encoded(byte_tokenizer: Tokenizer) -> None:
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(byte_tokenizer.encode, "long " * 200_000)
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
    print(f"{turns} turns")
    assert len(encoding.result()) == 1_000_000
    assert turns > 15


def test_long_texts_are_not_truncated(checkpoint_with: MakeCheckpoint, byte_checkpoint: Path) -> None:
    backend = Backend.from_file(str(byte_checkpoint / "tokenizer.json"))
    backend.enable_truncation(16)
    backend.enable_padding(length=32)
    path = checkpoint_with(tokenizer__json=backend.to_str())
    assert [len(Tokenizer.from_checkpoint(path).encode("x" * n)) for n in (1, 500)] == [1, 500]


def test_threads_share_one_tokenizer(bpe_tokenizer: Tokenizer) -> None:
    """Both ways to encode, and decoding, at the same time."""
    texts = [f"the dog {n} 你好 <|role_end|> {'fox ' * n}" for n in range(40)]
    expected = [(bpe_tokenizer.encode(t), bpe_tokenizer.encode(t, parse_special=False)) for t in texts]

    def work(_: int) -> list[tuple[list[int], list[int]]]:
        pairs = [(bpe_tokenizer.encode(t), bpe_tokenizer.encode(t, parse_special=False)) for t in texts]
        assert [bpe_tokenizer.decode(ids) for ids, _ in pairs] == texts
        return pairs

    with ThreadPoolExecutor(8) as pool:
        assert all(pairs == expected for pairs in pool.map(work, range(16)))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer__json": None}, "holds no tokenizer.json"),
        ({"tokenizer__json": ""}, "tokenizer.json cannot be loaded"),
        ({"tokenizer__json": "{"}, "tokenizer.json cannot be loaded"),
        ({"tokenizer__json": "[]"}, "tokenizer.json cannot be loaded"),
        ({"tokenizer__json": {"model": {"type": "BPE"}}}, "tokenizer.json cannot be loaded"),
        ({"tokenizer__json": {"model": {"type": "Unheard", "vocab": {}}}}, "tokenizer.json cannot be loaded"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not readable JSON"),
        ({"tokenizer_config__json": "[" * 100_000 + "]" * 100_000}, "tokenizer_config.json is not readable JSON"),
        ({"tokenizer_config__json": []}, "tokenizer_config.json holds a list"),
        ({"tokenizer_config__json": {"chat_template": 3}}, "chat_template is '3'"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default"}]}}, "`name` and `template`"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"x": 1}}}, "cannot be loaded as a tokenizer"),
        ({"tokenizer_config__json": {"eos_token": 3}}, "cannot be loaded as a tokenizer"),
    ],
)
def test_broken_files_are_named(checkpoint_with: MakeCheckpoint, files: dict[str, Any], said: str) -> None:
    path = checkpoint_with(**files)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_checkpoint(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Tokenizer.from_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_a_decoder_that_needs_neighbours_is_refused(
    checkpoint_with: MakeCheckpoint, decoder: decoders.Decoder | None
) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match=f"decoder is {type(decoder).__name__ if decoder else 'missing'}"):
        Tokenizer.from_checkpoint(checkpoint_with(tokenizer__json=backend.to_str()))


def test_code_in_a_checkpoint_is_never_run(checkpoint_with: MakeCheckpoint) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    path = checkpoint_with(
        tokenizer_config__json={"tokenizer_class": "X", "auto_map": auto_map, "eos_token": "<|role_end|>"},
        tokenization_x__py="raise SystemExit('code of the checkpoint ran')",
    )
    assert Tokenizer.from_checkpoint(path).eos_ids == {ROLE_END}
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be loaded"):
        Tokenizer.from_checkpoint(path)


def test_loading_says_nothing(byte_checkpoint: Path) -> None:
    """A fresh process, since transformers gives its advice when it is first imported."""
    code = (
        "import sys; from ling_serve.text.tokenizer import Tokenizer; from pathlib import Path\n"
        "assert 'transformers' not in sys.modules, 'importing is not quick'\n"
        f"tokenizer = Tokenizer.from_checkpoint(Path({str(byte_checkpoint)!r}))\n"
        "heavy = {'torch', 'tensorflow', 'mlx', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(tokenizer.encode('hi'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[104, 105]\n", "")


def test_loading_leaves_the_logging_of_transformers_as_it_was(byte_checkpoint: Path) -> None:
    Tokenizer.from_checkpoint(byte_checkpoint)
    logger = logging.getLogger("transformers")
    assert logger.filters == []
    assert all(handler.filters == [] for handler in logger.handlers)
