"""What research/verdicts.py counts, by hand."""

from __future__ import annotations

import pytest

from research.verdicts import bounds, counts, in_words, is_best, line


def row(action: str, yes: bool, refined: str = "", trained: bool = True):
    state = [
        {"role": "system", "content": "Find the number from 1 to 10, above 0."},
        {"role": "assistant", "content": "above 9"},
        {"role": "user", "content": "It is above 5. It is below 8."},
    ]
    reason = "yes_success" if yes else "refined"
    critique = {"optimal": yes}
    return {
        "env": "GuessNumber",
        "state": state,
        "action": action,
        "critique": critique,
        "trained": trained,
        "reason": reason,
        "refined": refined,
    }


def test_the_users_replies_alone_bound_the_number():
    assert bounds(row("6", True)["state"], 10) == (6, 7) and bounds([], 10) == (1, 10)


@pytest.mark.parametrize(("guess", "best"), [("5", True), ("6", True), ("4", False), ("7", False), ("none", False)])
def test_either_middle_of_an_even_count_is_best(guess, best):
    assert is_best({"env": "GuessNumber", "state": []}, guess, 10) is best


@pytest.mark.parametrize(
    ("question", "answer", "best"),
    [
        ("What is 6 + 7?", r"\boxed{13}", True),
        ("What is 6 - 7?", r"\boxed{-1}", True),
        ("What is 6 - 7?", r"\boxed{13}", False),
        ("What is 6 + 7?", "13", False),
    ],
)
def test_of_a_sum_its_result_is_best(question, answer, best):
    state = [{"role": "system", "content": "1 + 1"}, {"role": "user", "content": question}]
    assert is_best({"env": "MathReasoning", "state": state}, answer, 10) is best


def test_an_iteration_is_summed_up():
    rows = [row("6", True, "6"), row("4", True, "4"), row("9", False, "7"), row("2", False, "1", trained=False)]
    assert line(3, counts(rows, 10)) == "| 3 | 4 | 0.25 | 0.50 | 0.50 | 2 | 0.50 | 1 | 1.00 |"


def judged(text: str, optimal: bool, success: bool, reward: float):
    return {"critique": {"text": text, "optimal": optimal}, "futures": [{"success": success}], "reward": reward}


def test_verdicts_stand_to_their_reasons_and_to_what_was_read():
    rows = [
        judged("Reason: The best step is click(1), and click(1) was said.", False, False, 1.0),
        judged("Reason: The best step is click(2), and click(2) was said.", True, False, -1.0),
        judged("Reason: The best step is click(2), and click(1) was said.", True, True, -1.0),
        judged("Reason: It is above 5, so 7 is best, and 6 was said.", False, True, 0.0),
        judged("Reason: Who knows.", True, True, -1.0),
        {"critique": None, "futures": [], "reward": -1.0},
    ]
    assert in_words(rows) == (
        "Verdicts that agree with their reason: 0.50 of 4; with the outcome that was read: 0.50 of 4.\n"
        "Turns with a negative reward whose own action is named as the best: 0.50 of 2."
    )
    assert in_words([]).endswith("none.")
