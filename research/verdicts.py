"""How right the evaluator is in a run of guess-the-number: ``python -m research.verdicts TRIAL``.

Reads the transitions that a run has recorded. The best guess of each state is known: the middle of the numbers that the replies
allow. Prints, for each iteration, the share of stored guesses that are best; how many verdicts are yes, and how many of those
are right; and how many of the guesses that the policy learns are best, apart for accepted and for refined ones.
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

COLUMNS = ("iteration", "turns", "best", "yes", "yes that is right", "accepted", "of these best", "refined", "of these best")


def bounds(state: Sequence[Mapping[str, Any]], top: int) -> tuple[int, int]:
    """Smallest and largest number that the replies of a dialogue allow."""
    low, high = 1, top
    for message in state:
        for side, number in re.findall(r"\b(above|below) (\d+)", message["content"]) if message["role"] == "user" else ():
            low, high = (max(low, int(number) + 1), high) if side == "above" else (low, min(high, int(number) - 1))
    return low, high


def is_best(guess: int | None, low: int, high: int) -> bool:
    """Whether a guess is the middle; of an even count, either of both."""
    return guess in ((low + high) // 2, (low + high + 1) // 2)


def counts(transitions: Iterable[Mapping[str, Any]], top: int) -> Counter[str]:
    """What the recorded transitions of an iteration come to."""
    found: Counter[str] = Counter()
    for row in transitions:
        low, high = bounds(row["state"], top)
        best, accepted = is_best(guess_in(row["action"]), low, high), bool(row["critique"] and row["critique"]["optimal"])
        found.update({"turns": 1, "best": best, "yes": accepted, "yes right": accepted and best})
        if row["trained"]:
            kind = "accepted" if row["reason"] == "yes_success" else "refined"
            found.update({kind: 1, f"{kind} best": is_best(guess_in(row["refined"]), low, high)})
    return found


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
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    for file in files:
        rows = [json.loads(text) for text in file.read_text("utf-8").splitlines()]
        print(line(int(file.stem[-8:]), counts((row for row in rows if row["kind"] == "transition"), arguments.top)))


if __name__ == "__main__":
    main()
