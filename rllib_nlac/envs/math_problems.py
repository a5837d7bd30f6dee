"""Problems with one exact answer, made by a seed: five levels from sums to systems of equations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import comb, gcd, lcm

import numpy as np


@dataclass(frozen=True)
class Problem:
    """A problem and its answer, as it would stand in a box; ``place`` says where it was read, if it was."""

    text: str
    answer: str
    level: int
    place: str = ""


def generate(level: int, seed: int) -> Problem:
    """The problem of a level that belongs to a seed; the same in every process.

    Raises:
        ValueError: There is no such level.
    """
    if level not in KINDS:
        raise ValueError(f"level is {level!r}, and there are levels {', '.join(map(str, KINDS))}")
    rng = np.random.default_rng((level, seed))
    kinds = KINDS[level]
    text, answer = kinds[int(rng.integers(len(kinds)))](lambda low, high: int(rng.integers(low, high + 1)))
    return Problem(text, latex(Fraction(answer)), level)


def latex(value: Fraction) -> str:
    r"""An integer as it is, anything else as ``\frac{a}{b}`` in lowest terms."""
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


Draw = Callable[[int, int], int]  # an integer between two bounds, both included
Made = tuple[str, int | Fraction]


def _sum(draw: Draw) -> Made:
    a, b = draw(2, 99), draw(2, 99)
    return f"What is {a} + {b}?", a + b


def _difference(draw: Draw) -> Made:
    a, b = draw(2, 99), draw(2, 99)
    return f"What is {a} - {b}?", a - b


def worked_out(text: str) -> str | None:
    """A sum or a difference of two numbers below 100, step by step; None for any other problem."""
    found = re.fullmatch(r"What is (\d{1,2}) ([+-]) (\d{1,2})\?", text)
    if found is None:
        return None
    a, sign, b = int(found[1]), found[2], int(found[3])
    swapped = sign == "-" and b > a
    low, high = (b, a) if swapped else (a, b)  # the answer of a swapped difference is negative
    tens = high // 10 * 10
    middle, last = (low + tens, low + high) if sign == "+" else (low - tens, low - high)
    steps = f"{low} {sign} {tens} = {middle}, {middle} {sign} {high % 10} = {last}"
    return f"{steps}, so -{last}" if swapped else steps


def _product(draw: Draw) -> Made:
    a, b = draw(3, 30), draw(3, 30)
    return f"What is {a} * {b}?", a * b


def _brackets(draw: Draw) -> Made:
    a, b, c, d = draw(2, 20), draw(2, 20), draw(2, 12), draw(2, 50)
    return f"What is ({a} + {b}) * {c} - {d}?", (a + b) * c - d


def _fraction_sum(draw: Draw) -> Made:
    a, b, c, d = draw(1, 9), draw(2, 12), draw(1, 9), draw(2, 12)
    return rf"What is \frac{{{a}}}{{{b}}} + \frac{{{c}}}{{{d}}}? Give the answer in lowest terms.", Fraction(a, b) + Fraction(
        c, d
    )


def _percentage(draw: Draw) -> Made:
    price, percent = 20 * draw(2, 30), 5 * draw(1, 15)
    text = f"A coat costs {price} dollars. Its price falls by {percent} per cent. What does it cost now, in dollars?"
    return text, price * Fraction(100 - percent, 100)


def _linear(draw: Draw) -> Made:
    a, b, c = draw(2, 9), draw(-20, 20), draw(-30, 30)
    return f"Solve for x: {a}x {_signed(b)} = {c}.", Fraction(c - b, a)


def _divisors(draw: Draw) -> Made:
    a, b = 6 * draw(2, 20), 4 * draw(2, 30)
    if draw(0, 1):
        return f"What is the greatest common divisor of {a} and {b}?", gcd(a, b)
    return f"What is the least common multiple of {a} and {b}?", lcm(a, b)


def _arithmetic_series(draw: Draw) -> Made:
    first, step, count = draw(1, 20), draw(2, 9), draw(8, 30)
    text = (
        f"An arithmetic sequence starts with {first} and grows by {step} each time. What is the sum of its first {count} terms?"
    )
    return text, count * (2 * first + (count - 1) * step) // 2


def _system(draw: Draw) -> Made:
    x, y, a, b, c, d = draw(-9, 9), draw(-9, 9), draw(1, 6), draw(1, 6), draw(1, 6), draw(1, 6)
    if a * d == b * c:
        d += 1  # else there is no one solution
    text = f"Given {a}x + {b}y = {a * x + b * y} and {c}x + {d}y = {c * x + d * y}, what is x - 2y?"
    return text, x - 2 * y


def _quadratic(draw: Draw) -> Made:
    p, q = draw(-9, 9), draw(-9, 9)
    text = f"Let r and s be the roots of x^2 {_signed(-(p + q))}x {_signed(p * q)} = 0. What is r^2 + s^2?"
    return text, p * p + q * q


def _modular(draw: Draw) -> Made:
    base, power, modulus = draw(2, 12), draw(15, 60), draw(7, 29)
    return f"What is the remainder when {base}^{{{power}}} is divided by {modulus}?", pow(base, power, modulus)


def _chance(draw: Draw) -> Made:
    red, blue = draw(3, 8), draw(3, 8)
    text = (
        f"A bag holds {red} red and {blue} blue balls. Two are drawn without putting the first back. What is the probability "
        "that both are red?"
    )
    return text, Fraction(comb(red, 2), comb(red + blue, 2))


def _signed(value: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value)}"


KINDS: dict[int, tuple[Callable[[Draw], Made], ...]] = {
    1: (_sum, _difference),
    2: (_product, _brackets),
    3: (_fraction_sum, _percentage),
    4: (_linear, _divisors, _arithmetic_series),
    5: (_system, _quadratic, _modular, _chance),
}
