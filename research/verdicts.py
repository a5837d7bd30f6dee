"""How right the evaluator is in a run with the warmed-up small model: ``python -m research.verdicts TRIAL``.

Reads the transitions that a run has recorded. In guess-the-number and in sums the best action of each state is known: the
middle of the numbers that the replies allow, or the sum. Prints, for each iteration, the share of stored actions that are best;
how many verdicts are yes, and how many of those are right; and how many of the actions that the policy learns are best, apart
for accepted and refined ones. In any environment it then prints how often verdicts agree with the best action that their reason
names, in the expert's words ("The best step is A, and B was said"), and with the outcomes that the evaluator read.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_nlac.envs.guess_number import guess_in
from rllib_nlac.rewards.grading import boxed

KNOWN = ("GuessNumber", "MathReasoning")  # of whose states the best action is known
NAMED = re.compile(r"(?:best step is (?P<step>.*?)|so (?P<guess>.*?) is best), and (?P<said>.*) was said")
COLUMNS = ("iteration", "turns", "best", "yes", "yes that is right", "accepted", "of these best", "refined", "of these best")


def bounds(state: Sequence[Mapping[str, Any]], top: int) -> tuple[int, int]:
    """Smallest and largest number that the replies of a dialogue allow."""
    low, high = 1, top
    for message in state:
        for side, number in re.findall(r"\b(above|below) (\d+)", message["content"]) if message["role"] == "user" else ():
            low, high = (max(low, int(number) + 1), high) if side == "above" else (low, min(high, int(number) - 1))
    return low, high


def is_best(row: Mapping[str, Any], action: str, top: int) -> bool:
    """Whether an action is the sum that was asked for, or a guess in the middle; of an even count, either of both."""
    if row["env"] == "MathReasoning":
        one, sign, other = re.findall(r"(\d+) ([+-]) (\d+)", row["state"][1]["content"])[0]
        return boxed(action) == str(int(one) + int(f"{sign}{other}"))
    low, high = bounds(row["state"], top)
    return guess_in(action) in ((low + high) // 2, (low + high + 1) // 2)


def counts(transitions: Iterable[Mapping[str, Any]], top: int) -> Counter[str]:
    """What the recorded transitions of an iteration come to."""
    found: Counter[str] = Counter()
    for row in transitions:
        best, accepted = is_best(row, row["action"], top), bool(row["critique"] and row["critique"]["optimal"])
        found.update({"turns": 1, "best": best, "yes": accepted, "yes right": accepted and best})
        if row["trained"]:
            kind = "accepted" if row["reason"] == "yes_success" else "refined"
            found.update({kind: 1, f"{kind} best": is_best(row, row["refined"], top)})
    return found


def in_words(transitions: Iterable[Mapping[str, Any]]) -> str:
    """How the verdicts stand to their own reasons and to the futures that they judge."""
    found: Counter[str] = Counter()
    for row in transitions:
        critique = row["critique"]
        if not critique or (named := NAMED.search(critique["text"])) is None:
            continue
        same = (named["step"] or named["guess"]) == named["said"]
        hopeful = 2 * sum(future["success"] for future in row["futures"]) >= len(row["futures"])
        found.update({"all": 1, "as named": same == critique["optimal"], "as read": hopeful == critique["optimal"]})
        if row["reward"] < 0:
            found.update({"lost": 1, "lost, own": same})

    def share(part: str, whole: str) -> str:
        return f"{found[part] / found[whole]:.2f} of {found[whole]}" if found[whole] else "none"

    return (
        f"Verdicts that agree with their reason: {share('as named', 'all')}; "
        f"with the outcome that was read: {share('as read', 'all')}.\n"
        f"Turns with a negative reward whose own action is named as the best: {share('lost, own', 'lost')}."
    )


def line(iteration: int, found: Counter[str]) -> str:
    def share(part: str, whole: str) -> str:
        return f"{found[part] / found[whole]:.2f}" if found[whole] else "-"

    fields = [iteration, found["turns"], share("best", "turns"), share("yes", "turns"), share("yes right", "yes")]
    fields += [found["accepted"], share("accepted best", "accepted"), found["refined"], share("refined best", "refined")]
    return f"| {' | '.join(map(str, fields))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", type=Path, help="folder of a trial, with transitions/ in it")
    parser.add_argument("--top", type=int, default=10, help="largest number of the game")
    arguments = parser.parse_args()
    files = sorted((arguments.trial / "transitions").glob("iteration_*.jsonl"))
    if not files:
        parser.error(f"{arguments.trial} holds no transitions/iteration_*.jsonl")
    played = {}
    for file in files:
        rows = [json.loads(text) for text in file.read_text("utf-8").splitlines()]
        played[int(file.stem[-8:])] = [row for row in rows if row["kind"] == "transition"]
    every = [row for rows in played.values() for row in rows]
    if all(row["env"] in KNOWN for row in every):
        print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
        for iteration, rows in played.items():
            print(line(iteration, counts(rows, arguments.top)))
    print(in_words(every))


if __name__ == "__main__":
    main()
