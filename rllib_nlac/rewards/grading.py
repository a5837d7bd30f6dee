r"""Reads the final answer out of a solution and compares it exactly: numbers and fractions as numbers, the rest as text.

Only what is certainly equal counts. For sets, intervals and algebra there is ``math_equal``, which asks math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rllib_nlac.rewards.math_verify_worker import MathVerify

_DROPPED = re.compile(r"\\(?:left|right|[Bb]igg?[lmr]?|displaystyle)(?![a-zA-Z])|\\[,;!:]|\\?\$|\^\\circ|\^{\\circ}|\\%|%|~")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*{([^{}]*)}")
_FRACTION = re.compile(r"\\frac\s*(?:{([^{}]+)}|(\d))\s*(?:{([^{}]+)}|(\d))")
_NUMBER = re.compile(r"[-+]?((\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d*)?|\.\d+)")  # 1,234 but not 0,100
_LISTED = re.compile(r"[\s~$],|(?<!\\),(?:[\s~$]|\\[,;:\s$])")  # a comma with space beside it: 1, 234 are two numbers
_AND = "\N{INVISIBLE PLUS}"  # of a mixed number: -1 1/2 is not -1+1/2
MAX_ANSWER = 2000  # characters; a longer "answer" is none
MAX_DIGITS = 400
_MATH_VERIFY = MathVerify()


def boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, with balanced braces; None where there is none."""
    start = text.rfind(r"\boxed")
    if start < 0:
        return None
    rest = text[start + len(r"\boxed") :].lstrip()
    if not rest.startswith("{"):
        return rest.split(maxsplit=1)[0].rstrip(".,$") if rest else None
    depth = 0
    for index, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[1:index].strip()
    return None


def after_hashes(text: str) -> str | None:
    """What follows the last ``####``, as solutions of GSM8K end; None where there is none."""
    _, marker, answer = text.rpartition("####")
    lines = answer.strip().splitlines()
    return lines[0].strip() if marker and lines else None


def normal_form(answer: str) -> str:
    """An answer without what does not matter: LaTeX spacing, units' degrees and per cents, dollar signs, final points."""
    text = _TEXT.sub(r"\1", re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", answer))
    text = _DROPPED.sub("", re.sub(r"\\\s", " ", text)).replace("{,}", ",")
    text = re.sub(r"(?<=\d)\s+(?=\d+\s*/\s*\d)", _AND, text.strip())  # a mixed number, 2 3/4
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).rstrip(".").lower()  # 1 2 are two numbers


def as_number(answer: str) -> Fraction | None:
    r"""The exact value of an integer, decimal, ``a/b``, ``\frac{a}{b}`` or mixed number; None for anything else."""
    text = normal_form(answer)
    if not text or len(text) > MAX_DIGITS or _LISTED.search(answer):
        return None
    sign = -1 if text.startswith("-") else 1
    unsigned = text.lstrip("+-")
    mixed = re.fullmatch(rf"(\d+)(?:[{_AND}{'+' if sign > 0 else ''}](?=\d+/)|(?=\\frac))(.+)", unsigned)
    if mixed and (part := as_number(mixed[2])) is not None and 0 <= part < 1:
        return sign * (int(mixed[1]) + part)
    fraction = _FRACTION.fullmatch(unsigned)
    parts = [fraction[1] or fraction[2], fraction[3] or fraction[4]] if fraction else unsigned.split("/")
    if len(parts) > 2 or not all(_NUMBER.fullmatch(part) for part in parts) or len(text) - len(unsigned) > 1:
        return None
    numbers = [Fraction(part.replace(",", "")) for part in parts]
    if len(numbers) == 2:
        return sign * numbers[0] / numbers[1] if numbers[1] else None
    return sign * numbers[0]


def exact_equal(answer: str, truth: str) -> bool:
    """Whether two answers are the same number, or else the same text in normal form."""
    if len(answer) > MAX_ANSWER:
        return False
    numbers = as_number(answer), as_number(truth)
    if numbers != (None, None):
        return numbers[0] == numbers[1]
    return normal_form(answer) == normal_form(truth)


def math_equal(answer: str, truth: str) -> bool:
    """As ``exact_equal``, and else what math-verify says: sets, intervals, equations, algebra.

    Raises:
        ValueError: math-verify is not installed.
    """
    if len(answer) > MAX_ANSWER:
        return False
    return exact_equal(answer, truth) or _MATH_VERIFY.equal(answer, truth)


GRADERS = {"exact": exact_equal, "math_verify": math_equal}
