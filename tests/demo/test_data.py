"""The generated conversations: the same every time, and right, by recomputing each answer from its question."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from ling_serve.demo import data, evaluate, phrases
from ling_serve.demo.data import Turn

STEP = re.compile(r"^(-?[\d.]+)([*+-])([\d.]+)=(-?[\d.]+)$")


def numbers(text: str) -> list[Fraction]:
    return [Fraction(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def check_steps(turn: Turn) -> None:
    """Every step of the reasoning holds, and the last one gives the answer."""
    for step in turn.reasoning.split(", "):
        if step.startswith("5% of "):
            price, result = numbers(step)[1:]
            assert result == price / 20, step
            continue
        match = STEP.match(step)
        assert match, step
        a, sign, b, result = match.groups()
        value = {"*": Fraction(a) * Fraction(b), "+": Fraction(a) + Fraction(b), "-": Fraction(a) - Fraction(b)}[sign]
        assert value == Fraction(result), step
    assert turn.reasoning.split("=")[-1] == turn.answer.removeprefix("$")


@pytest.mark.parametrize("seed", range(6))
def test_arithmetic_is_right(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        check_one_of_each(rng)


def check_one_of_each(rng: random.Random) -> None:
    a, b = numbers((product := data.random_product(rng)).question)
    assert product.answer == str(a * b)
    total = data.random_sum(rng)
    assert total.answer == str(sum(numbers(total.question)))
    difference = data.random_difference(rng)
    x, y = numbers(difference.question)
    swapped = difference.question.startswith(("Subtract", "Take"))
    assert difference.answer == str(y - x if swapped else x - y)
    discount = data.random_discount(rng)
    values = numbers(discount.question)
    price, percent = values if discount.question.find("$") < discount.question.find("%") else values[::-1]
    assert Fraction(discount.answer.removeprefix("$")) == price * (100 - percent) / 100
    for turn in (product, total, difference, discount):
        check_steps(turn)


def test_every_phrasing_names_its_numbers() -> None:
    for phrase in phrases.PRODUCT + phrases.SUM + phrases.DIFFERENCE:
        assert sorted(re.findall(r"\{(\w+)\}", phrase)) == ["a", "b"], phrase
    for phrase in phrases.DISCOUNT:
        assert {"price", "percent"} <= set(re.findall(r"\{(\w+)\}", phrase)), phrase


def test_the_same_seed_gives_the_same_conversations() -> None:
    first, second, other = (
        [data.random_conversation(random.Random(seed), thinking=True, turns=2) for _ in range(50)]
        for seed in ("a", "a", "b")
    )
    assert first == second
    assert first != other


def test_held_out_pairs_are_never_trained() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        for turn in (data.random_sum(rng), data.random_difference(rng), data.random_discount(rng)):
            kind = "sum" if "+" in turn.reasoning else "discount" if "%" in turn.question else "difference"
            a, b = (int(number) for number in numbers(turn.question))
            if kind == "discount" and turn.question.find("%") < turn.question.find("$"):
                a, b = b, a
            if turn.question.startswith(("Subtract", "Take", "Add {b}")):
                a, b = b, a
            if kind == "sum" and turn.question.lower().startswith("add") and " to " in turn.question:
                a, b = b, a
            assert not data.is_held_out(kind, a, b), turn
    held = sum(data.is_held_out("sum", a, b) for a in range(100) for b in range(100))
    print(f"{held / 100:.1f} % of the pairs are held out")
    assert 800 < held < 1200
    assert not data.is_held_out("discount", 600, 20)


def test_money() -> None:
    assert [data.money(Fraction(x)) for x in ("480", "12.5", "4.75", "0.05", "1000")] == [
        "480",
        "12.50",
        "4.75",
        "0.05",
        "1000",
    ]


def test_negative_differences_and_zeros() -> None:
    assert data.difference_turn(5, 9, "{a} - {b}") == Turn("5 - 9", "9-5=4, 5-9=-4", "-4")
    assert data.difference_turn(7, 0, "{a}-{b}") == Turn("7-0", "7-0=7", "7")
    assert data.sum_turn(348, 205, "{a}+{b}") == Turn("348+205", "348+200=548, 548+5=553", "553")
    assert data.product_turn(17, 20, "{a}*{b}") == Turn("17*20", "17*20=340", "340")


def test_evaluation_rows_do_not_depend_on_the_run() -> None:
    first, second = evaluate.tasks(4), evaluate.tasks(4)
    assert [task.name for task in first] == [task.name for task in second]
    assert all((a.rows == b.rows).all() for a, b in zip(first, second, strict=True))
