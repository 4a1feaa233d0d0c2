"""One choice's text: its parts joined are the cut text, and the log-probabilities keep up with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ling_serve.choice_text import ChoiceText, Part, StopPlan, merged
from ling_serve.engine.events import TokenEvent, TokenLogprobs
from ling_serve.engine.request import FinishReason
from ling_serve.server.bridge import Bridge
from ling_serve.text.text_side import TextSide
from ling_serve.text.tokenizer import Tokenizer


def parts_of(tokenizer: Tokenizer, ids: Sequence[int], plan: StopPlan) -> list[Part]:
    """Feed the tokens until a part says that the text has ended."""
    choice = ChoiceText(0, tokenizer, plan)
    parts: list[Part] = []
    for at, token in enumerate(ids):
        finish = FinishReason.LENGTH if at == len(ids) - 1 else None
        parts.append(choice.push(TokenEvent("r", token, TokenLogprobs(-1.0 - at, ()), finish)))
        if parts[-1].finish is not None:
            break
    return parts


def first_end(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first; of several at once the longest."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return None if not ends else (min(ends)[1], min(ends)[0])


@given(
    st.lists(st.sampled_from(list(b"ab\xc3\xa9\xff")), min_size=1, max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_parts_joined_are_the_cut_text(text: TextSide, ids: list[int], stops: list[str], include: bool) -> None:
    parts = parts_of(text.tokenizer, ids, StopPlan(strings=tuple(stops), include=include))
    joined = "".join(part.text for part in parts)
    whole = text.tokenizer.decode(ids)
    ended = first_end(whole, stops)
    if ended is None:
        assert joined == whole
        assert parts[-1].finish is FinishReason.LENGTH
        assert [token.id for part in parts for token in part.tokens] == ids
    else:
        assert joined == whole[: ended[1] if include else ended[0]]
        assert parts[-1].finish is FinishReason.STOP
        assert all(token.text_offset < len(joined) for part in parts for token in part.tokens)
    sent = 0
    for part in parts:
        sent += len(part.text)
        assert part.finish is not None or all(token.text_offset < sent for token in part.tokens)


def test_parts_that_pile_up_become_one_for_each_choice() -> None:
    a, b, c = Part(0, "a", (), None), Part(1, "b", (), None), Part(0, "c", (), FinishReason.STOP)
    assert merged([a, b, c]) == [Part(0, "ac", (), FinishReason.STOP), b]
    assert merged([]) == []


def test_the_bridge_keeps_every_item_and_its_order() -> None:
    async def cross() -> list[list[int]]:
        bridge = Bridge()
        queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(3)]

        def feed(put: object) -> None:
            for number in range(2000):
                put(number)  # type: ignore[operator]

        threads = [threading.Thread(target=feed, args=(bridge.into(queue),)) for queue in queues]
        for thread in threads:
            thread.start()
        return [[await queue.get() for _ in range(2000)] for queue in queues]

    assert asyncio.run(cross()) == [list(range(2000))] * 3
