"""What the bundled model answers, greedily, through the engine: alone, batched with others, and in a conversation."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ling_serve.demo import data, phrases
from ling_serve.llm import LLM

ASKED = {
    "What is 17 times 23?": "391",
    "46 * 37": "1702",
    "A laptop costs $600 and is 20% off. How much do I pay?": "$480",
    "Hello!": phrases.GREETING_ANSWER,
    "Who are you?": phrases.IDENTITY_ANSWER,
    "What can you do?": phrases.ABILITY_ANSWER,
    "What is the capital of France?": phrases.OTHER_ANSWER,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, max_num_seqs=12) as llm:
        yield llm


def ask(llm: LLM, questions: list[str], thinking: bool) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    return [answer.text for answer in llm.chat(conversations, chat_template_kwargs={"enable_thinking": thinking})]


@pytest.mark.parametrize("thinking", [False, True], ids=["thinking-off", "thinking-on"])
def test_the_questions_of_the_readme_among_others(llm: LLM, thinking: bool) -> None:
    rng = random.Random(1)
    distractors = [data.random_turn(rng).question for _ in range(9)]
    answers = ask(llm, [*distractors, *ASKED], thinking)[len(distractors) :]
    for question, answer in zip(ASKED, answers, strict=True):
        reasoning, _, content = answer.rpartition("</think>")
        assert content == ASKED[question], f"{question} → {answer}"
        assert bool(reasoning) == thinking
    if thinking:
        assert answers[0] == "17*20=340, 17*3=51, 340+51=391</think>391"


def test_a_conversation_goes_on(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "What is 17 times 23?"},
        {"role": "assistant", "content": "391"},
        {"role": "user", "content": "46 * 37"},
    ]
    (answer,) = llm.chat(messages, chat_template_kwargs={"enable_thinking": False})
    assert answer.text == "1702"


@pytest.mark.parametrize(("kind", "at_least"), [("product", 28), ("sum", 27), ("discount", 25)])
def test_most_random_questions_are_right(llm: LLM, kind: str, at_least: int) -> None:
    rng = random.Random(2)
    make = {"product": data.random_product, "sum": data.random_sum, "discount": data.random_discount}[kind]
    turns = [make(rng) for _ in range(30)]
    answers = ask(llm, [turn.question for turn in turns], thinking=False)
    wrong = [(t.question, t.answer, a) for t, a in zip(turns, answers, strict=True) if t.answer != a]
    print(f"{30 - len(wrong)} of 30 right; wrong: {wrong}")
    assert 30 - len(wrong) >= at_least
