"""Whatever is accepted is answered: the longest prompt too, whoever else runs, and however small a step is."""

from __future__ import annotations

import pytest

from ling_serve.errors import ContextLengthExceeded
from tests.engine.fake_model import expected_output, fake_engine, greedy, run, tokens_by_request


@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_longest_prompt_is_answered_in_the_fewest_blocks_that_can_hold_it(others: int) -> None:
    engine = fake_engine(num_blocks=8, max_model_len=128)
    longest = [number % 97 for number in range(127)]
    for number in range(others):
        engine.add(greedy(str(number), [number] * 20, max_tokens=40))
    engine.step()
    engine.add(greedy("longest", longest, max_tokens=9))
    found = tokens_by_request(run(engine, max_steps=500))
    assert found.pop("longest") == expected_output(longest, 1)  # 127 + 1 = the context
    assert found == {str(n): expected_output([n] * 20, 40) for n in range(others)}


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1145, 1146, 2046, 2047])
def test_a_prompt_of_many_steps_is_scheduled(length: int) -> None:
    """Around powers of two and around sizes at which a server was known to wait for ever."""
    engine = fake_engine(num_blocks=128, max_model_len=2048, max_num_batched_tokens=256)
    prompt = [number % 97 for number in range(length)]
    engine.add(greedy("a", prompt, max_tokens=1))
    assert tokens_by_request(run(engine, max_steps=9)) == {"a": expected_output(prompt, 1)}


def test_one_token_more_is_refused_at_once_with_the_numbers() -> None:
    engine = fake_engine(num_blocks=8, max_model_len=128)
    with pytest.raises(ContextLengthExceeded, match="has 128 tokens; this server's context holds 128"):
        engine.add(greedy("a", [1] * 128))
    assert not engine.has_work
