"""Pushes joined are the whole text, and none of them shows half a character."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ling_serve.text.detokenizer import Detokenizer
from ling_serve.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SAMPLES = st.sampled_from(
    [
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a family, joined by ZWJ
        "\U0001f44d\U0001f3fd",  # a thumb and its skin tone
        "\U0001f3f3\ufe0f\u200d\U0001f308",
        "你好、世界",
        "日本語 テスト",
        "e\u0301\u0323",
        "नमस्ते",
        "한국어",
        "𓀀𓂀",
        "  two  spaces ",
        "\r\n\t",
        "<think>",
        "\ufeff",
        "naïve né e",
        REPLACEMENT,
    ]
)
TEXTS = st.lists(SAMPLES | st.text(max_size=8), max_size=8).map("".join)
RAW = st.lists(
    st.sampled_from([b"\xe4", b"\xf0\x9f", b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80"]) | st.binary(max_size=4)
).map(b"".join)
EXAMPLES = settings(max_examples=150, deadline=None)


@st.composite
def chunked(draw: DrawFn, ids: Iterable[int]) -> list[list[int]]:
    chunks: list[list[int]] = [[]]
    for token_id in ids:
        if draw(st.booleans()):
            chunks.append([])
        chunks[-1].append(token_id)
    return chunks


def pushes(detokenizer: Detokenizer, chunks: Iterable[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


@EXAMPLES
@given(data=st.data(), text=TEXTS)
def test_any_split_of_any_text_comes_out_whole(bpe_tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    ids = bpe_tokenizer.encode(text)
    if data.draw(st.booleans(), label="one byte per token"):
        ids = byte_ids(bpe_tokenizer, text.encode())
    shown = pushes(Detokenizer(bpe_tokenizer), data.draw(chunked(ids)))
    assert "".join(shown) == text
    # A replacement character that the text doesn't hold would be half of another one.
    assert sum(piece.count(REPLACEMENT) for piece in shown) == text.count(REPLACEMENT)


@EXAMPLES
@given(data=st.data(), raw=RAW, skip=st.booleans())
def test_invalid_bytes_equal_the_whole_decode(
    byte_tokenizer: Tokenizer, data: st.DataObject, raw: bytes, skip: bool
) -> None:
    ids = data.draw(st.permutations([*range(256, 262)]), label="special")[:2]
    ids = [*raw[: len(raw) // 2], *ids, *raw[len(raw) // 2 :], 9999]
    shown = pushes(Detokenizer(byte_tokenizer, skip_special_tokens=skip), data.draw(chunked(ids)))
    backend = byte_tokenizer.pretrained.backend_tokenizer
    assert "".join(shown) == backend.decode(ids, skip_special_tokens=skip)
    assert "".join(shown) == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@EXAMPLES
@given(data=st.data(), continuing=st.booleans(), text=TEXTS)
def test_sentencepiece_spaces_survive(
    piece_tokenizer: Tokenizer, data: st.DataObject, continuing: bool, text: str
) -> None:
    words = st.lists(st.integers(258, piece_tokenizer.vocab_size - 1), min_size=1, max_size=4)
    ids = [*data.draw(words), *byte_ids(piece_tokenizer, text.encode()), *data.draw(words)]
    shown = "".join(pushes(Detokenizer(piece_tokenizer, continuing=continuing), data.draw(chunked(ids))))
    assert shown == piece_tokenizer.decode(ids, continuing=continuing)
    whole = piece_tokenizer.pretrained.backend_tokenizer.decode(ids, skip_special_tokens=False)
    starts_with_space = piece_tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert shown == (" " + whole if continuing and starts_with_space else whole)


def test_a_character_appears_with_its_last_byte_and_a_lone_byte_once_it_is_certain(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    assert [detokenizer.push([byte]) for byte in "你".encode()] == ["", "", "你"]
    assert [detokenizer.push([0xE4]), detokenizer.push([0x41])] == ["", REPLACEMENT + "A"]
    assert detokenizer.push([0x80]) == REPLACEMENT
    assert [detokenizer.push([0xF0, 0x9F]), detokenizer.finish()] == ["", REPLACEMENT]


def test_special_tokens_are_text_unless_skipped(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("<role>a<think>b<|role_end|>")
    assert "".join(pushes(Detokenizer(byte_tokenizer), [ids])) == "<role>a<think>b<|role_end|>"
    assert "".join(pushes(Detokenizer(byte_tokenizer, skip_special_tokens=True), [ids])) == "a<think>b"


def test_what_is_held_stays_bounded(byte_tokenizer: Tokenizer) -> None:
    """Runs of bytes that never complete a character neither pile up nor wait for the end."""
    detokenizer = Detokenizer(byte_tokenizer)
    shown = "".join(detokenizer.push([byte]) for byte in [0xF0, 0x9F] * 5000)
    assert len(shown) >= 4999
    assert set(shown) == {REPLACEMENT}


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token for each byte."""
    by_byte = {spelled[0]: i for i in range(tokenizer.vocab_size) if len(spelled := tokenizer.token_bytes(i)) == 1}
    return [by_byte[byte] for byte in raw]
