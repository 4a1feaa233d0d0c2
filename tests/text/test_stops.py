"""Stop strings are found however the text is cut, and nothing of them is ever shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_serve.text.stops import StopMatcher, StopResult

EXAMPLES = settings(max_examples=300, deadline=None)
# Two letters make overlapping stop strings and near misses likely.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=6)
TEXT = st.text("abc", max_size=24)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(where the text ends, which stop): the first complete one; of several at once, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@EXAMPLES
@given(data=st.data(), stops=STOPS, text=TEXT, include=st.booleans())
def test_any_chunking_gives_the_same(data: st.DataObject, stops: list[str], text: str, include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, rest = "", text
    expected = first_stop(text, stops)
    limit = len(text) if expected is None else expected[0] + (len(expected[1]) if include else 0)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.push(rest[:size]).text
        rest = rest[size:]
        assert text[:limit].startswith(shown), "part of a stop string was shown"
        if matcher.matched is None:
            # Nothing is kept back that could not still become a stop string.
            assert not matcher.held or any(stop.startswith(matcher.held) for stop in stops)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (text[:limit], None if expected is None else expected[1])


def test_a_stop_across_pieces() -> None:
    matcher = StopMatcher(["<|role_end|>", "\n\n"])
    assert [matcher.push(piece).text for piece in ["Hi <", "b", "> <|ro", "le"]] == ["Hi ", "<b", "> ", ""]
    assert matcher.push("_end|> unseen") == StopResult("", "<|role_end|>")
    assert matcher.push("more") == StopResult("", "<|role_end|>")
    assert matcher.flush() == ""


def test_an_unfinished_stop_is_text_after_all() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STO") == StopResult("a ", None)
    assert (matcher.flush(), matcher.flush(), matcher.matched) == ("STO", "", None)


def test_the_first_complete_stop_wins_and_the_longest_of_those() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == StopResult("xa", "bc")
    assert StopMatcher(["bc", "abc"]).push("xabc") == StopResult("x", "abc")
    assert StopMatcher(["ab", "abc"]).push("xabc") == StopResult("x", "ab")
    assert StopMatcher(["ab", "abc"], include=True).push("xabc") == StopResult("xab", "ab")


def test_thousands_of_stops() -> None:
    stops = [f"stop number {n}." for n in range(5000)]
    assert StopMatcher(stops).push("a stop number 4999. b") == StopResult("a ", "stop number 4999.")


def test_no_stops_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("text"), matcher.flush()) == (StopResult("text", None), "")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
