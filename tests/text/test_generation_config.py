"""Sampling defaults and end-of-sequence ids of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from ling_serve.errors import CheckpointError
from ling_serve.text.generation_config import GenerationDefaults
from ling_serve.text.tokenizer import Tokenizer
from tests.byte_tokenizer import END_OF_TEXT, ROLE_END


def folder_with(path: Path, generation: object = None, model: object = None) -> Path:
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 5, "pad_token_id": 4}, {"top_p": None}])
def test_ling_values_hold_where_the_file_says_nothing(tmp_path: Path, generation: object) -> None:
    read = GenerationDefaults.from_checkpoint(folder_with(tmp_path, generation))
    assert (read.temperature, read.top_p, read.top_k, read.min_p, read.repetition_penalty) == (1.0, 0.95, 20, 0.0, 1.0)


def test_the_file_wins_and_what_it_leaves_out_is_neutral(tmp_path: Path) -> None:
    content = {"temperature": 0, "top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 7}
    read = GenerationDefaults.from_checkpoint(folder_with(tmp_path, content))
    assert read == GenerationDefaults(0.0, 1.0, 0, 0.05, 1.1, 7)


def test_no_sampling_is_greedy(tmp_path: Path) -> None:
    content = {"do_sample": False, "temperature": 0.6}
    assert GenerationDefaults.from_checkpoint(folder_with(tmp_path, content)).temperature == 0.0


def test_source_none_leaves_the_file_unread(tmp_path: Path) -> None:
    folder_with(tmp_path, "{ not JSON", {"eos_token_id": 3})
    assert GenerationDefaults.from_checkpoint(tmp_path, "none") == GenerationDefaults(eos_token_ids=frozenset({3}))


def test_every_source_of_end_ids_counts(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    folder_with(tmp_path, {"eos_token_id": [5, END_OF_TEXT]}, {"eos_token_id": 6})
    read = GenerationDefaults.from_checkpoint(tmp_path, tokenizer=byte_tokenizer)
    assert read.eos_token_ids == {5, 6, END_OF_TEXT, ROLE_END}
    assert read.implicit_stop_strings == ("<|endoftext|>", "<|role_end|>"), "5 and 6 are ordinary tokens"
    assert GenerationDefaults.from_checkpoint(tmp_path).implicit_stop_strings == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
        ("eos_token_id", "<|role_end|>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", -1),
        ("eos_token_id", [True]),
    ],
)
def test_a_malformed_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        GenerationDefaults.from_checkpoint(folder_with(tmp_path, {field: value}))
    assert caught.value.message.startswith(f"generation_config.json: {field} is ")
    assert caught.value.param == field


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, ""])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.from_checkpoint(folder_with(tmp_path, content))
    with pytest.raises(CheckpointError, match=r"/config\.json"):
        GenerationDefaults.from_checkpoint(folder_with(tmp_path, {}, content))
