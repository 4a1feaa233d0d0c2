"""Makes the demo model's training and evaluation conversations, from nothing but a random generator.

Every answer is computed here, so a wrong line of training data would be a bug of this file; `tests/demo/test_data.py`
recomputes each one from its text.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ling_serve.demo import phrases

MAX_FACTOR = 99
MAX_TERM = 999
PRICES = range(5, 2001, 5)
PERCENTAGES = range(5, 100, 5)


@dataclass(frozen=True)
class Turn:
    """One question with the reasoning (used when thinking is on) and the answer."""

    question: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    thinking: bool
    system: str | None = None


def is_held_out(kind: str, a: int, b: int) -> bool:
    """Whether the pair (a, b) of `kind` is kept out of training: one in ten, by a hash, the same on every machine."""
    return zlib.crc32(f"{kind}:{a}:{b}".encode()) % 10 == 7


def product_turn(a: int, b: int, phrase: str) -> Turn:
    """a times b for 0 <= a, b <= 99; the reasoning splits b into tens and units."""
    tens, units = b - b % 10, b % 10
    if tens and units:
        steps = f"{a}*{tens}={a * tens}, {a}*{units}={a * units}, {a * tens}+{a * units}={a * b}"
    else:
        steps = f"{a}*{b}={a * b}"
    return Turn(phrase.format(a=a, b=b), steps, str(a * b))


def sum_turn(a: int, b: int, phrase: str) -> Turn:
    """a plus b, one digit of b at a time."""
    return Turn(phrase.format(a=a, b=b), _by_digits(a, b, "+"), str(a + b))


def difference_turn(a: int, b: int, phrase: str) -> Turn:
    """a minus b, one digit of the smaller at a time; below zero when b is the larger."""
    steps = _by_digits(a, b, "-") if a >= b else f"{_by_digits(b, a, '-')}, {a}-{b}={a - b}"
    return Turn(phrase.format(a=a, b=b), steps, str(a - b))


def discount_turn(price: int, percent: int, item: str, phrase: str) -> Turn:
    """What is left to pay of `price` dollars at `percent` off, both multiples of 5."""
    an = "an" if item[0] in "aeiou" else "a"
    question = phrase.format(An=an.capitalize(), an=an, item=item, price=price, percent=percent)
    twentieth, parts = Fraction(price, 20), percent // 5
    off = twentieth * parts
    left = money(price - off)
    steps = f"5% of {price}={money(twentieth)}, {money(twentieth)}*{parts}={money(off)}, {price}-{money(off)}={left}"
    return Turn(question, steps, f"${left}")


def money(amount: Fraction) -> str:
    """Dollars without a sign: `480`, `12.50`."""
    cents = amount * 100
    whole, rest = divmod(int(cents), 100)
    return f"{whole}.{rest:02d}" if rest else str(whole)


def _by_digits(a: int, b: int, sign: str) -> str:
    steps: list[str] = []
    for place in (100, 10, 1):
        part = b // place % 10 * place
        if part:
            result = a + part if sign == "+" else a - part
            steps.append(f"{a}{sign}{part}={result}")
            a = result
    return ", ".join(steps) or f"{a}{sign}0={a}"


def random_product(rng: random.Random, wordings: Sequence[str] = phrases.PRODUCT) -> Turn:
    a, b = rng.randint(0, MAX_FACTOR), rng.randint(0 if rng.random() < 0.2 else 10, MAX_FACTOR)
    if rng.random() < 0.5:
        a, b = b, a
    return product_turn(a, b, rng.choice(wordings))


def random_terms(rng: random.Random, kind: str, held_out: bool = False) -> tuple[int, int]:
    """Two numbers up to 999 of mixed lengths, from the trained or the held-out pairs."""
    while True:
        a, b = (rng.randint(0, rng.choice((MAX_TERM, MAX_TERM, MAX_TERM, 99))) for _ in range(2))
        if is_held_out(kind, a, b) == held_out:
            return a, b


def random_sum(rng: random.Random, held_out: bool = False) -> Turn:
    return sum_turn(*random_terms(rng, "sum", held_out), rng.choice(phrases.SUM))


def random_difference(rng: random.Random, held_out: bool = False) -> Turn:
    a, b = random_terms(rng, "difference", held_out)
    if a < b and rng.random() < 0.7 and is_held_out("difference", b, a) == held_out:
        a, b = b, a
    return difference_turn(a, b, rng.choice(phrases.DIFFERENCE))


def random_discount(rng: random.Random, held_out: bool = False, new_item: bool = False) -> Turn:
    while True:
        price, percent = rng.choice(PRICES), rng.choice(PERCENTAGES)
        if rng.random() < 0.3:  # the round prices that people type
            price = max(10, price // 50 * 50)
        if is_held_out("discount", price, percent) == held_out:
            break
    item = _invented_word(rng) if new_item or rng.random() < 0.3 else rng.choice(_ITEMS)
    return discount_turn(price, percent, item, rng.choice(phrases.DISCOUNT))


def random_talk(rng: random.Random) -> Turn:
    questions, reasoning, answer = rng.choice(_TALK)
    return Turn(rng.choice(questions), reasoning, answer)


def random_other(rng: random.Random) -> Turn:
    """A question beyond this model, with the answer that says so."""
    noun = rng.choice(_NOUNS) if rng.random() < 0.7 else _invented_word(rng)
    question = rng.choice(phrases.OTHER).format(noun=noun, adjective=rng.choice(_ADJECTIVES))
    return Turn(question, phrases.OTHER_REASONING, phrases.OTHER_ANSWER)


def random_turn(rng: random.Random) -> Turn:
    """A turn of any kind, weighted by how hard the kind is to learn."""
    (make,) = rng.choices(_KINDS, _WEIGHTS)
    return vary(rng, make(rng))


def vary(rng: random.Random, turn: Turn) -> Turn:
    """Sometimes types the question carelessly: no capital, no closing mark."""
    question = turn.question
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.1 and question[-1] in "?.!":
        question = question[:-1]
    return Turn(question, turn.reasoning, turn.answer)


def random_conversation(rng: random.Random, thinking: bool, turns: int = 1) -> Conversation:
    system = rng.choice(phrases.SYSTEM_PROMPTS) if rng.random() < 0.15 else None
    return Conversation(tuple(random_turn(rng) for _ in range(turns)), thinking, system)


def _invented_word(rng: random.Random) -> str:
    syllables = (rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(("", "", "n", "r", "s", "t"))


_ITEMS = phrases.ITEMS.split(", ")
_NOUNS = phrases.NOUNS.split(", ")
_ADJECTIVES = phrases.ADJECTIVES.split(", ")
_TALK: Sequence[tuple[tuple[str, ...], str, str]] = (
    (phrases.GREETINGS, phrases.GREETING_REASONING, phrases.GREETING_ANSWER),
    (phrases.IDENTITY, phrases.IDENTITY_REASONING, phrases.IDENTITY_ANSWER),
    (phrases.ABILITY, phrases.ABILITY_REASONING, phrases.ABILITY_ANSWER),
    (phrases.THANKS, phrases.THANKS_REASONING, phrases.THANKS_ANSWER),
    (phrases.FAREWELL, phrases.FAREWELL_REASONING, phrases.FAREWELL_ANSWER),
    (phrases.MOOD, phrases.MOOD_REASONING, phrases.MOOD_ANSWER),
)
_KINDS: Sequence[Callable[[random.Random], Turn]] = (
    random_product,
    random_sum,
    random_difference,
    random_discount,
    random_talk,
    random_other,
)
_WEIGHTS = (38, 13, 17, 24, 4, 4)
