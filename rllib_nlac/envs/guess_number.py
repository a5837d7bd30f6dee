"""Guess a number that is above or below what was guessed: the smallest task on which a real model has something to learn."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv, check_number

ABOVE, BELOW, CORRECT, UNCLEAR = "It is above", "It is below", "Correct.", "Say a number."


class GuessNumber(TextEnv[int]):
    """Finding a number from 1 to ``top`` within ``max_turns`` guesses; the reply to a wrong one says where the number is.

    The number is drawn uniformly. Halving the rest at each turn wins every game if 2 ** max_turns exceeds ``top``.

    Args:
        top: Largest number, at least 2.
        max_turns: Guesses per episode.
        split: Recorded in ``info``; both splits draw from the same numbers.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "top": {"type": "integer", "minimum": 2, "maximum": 1_000_000},
        "max_turns": MAX_TURNS,
        "split": SPLIT,
    }

    def __init__(self, top: int = 20, max_turns: int = 5, split: str = "train") -> None:
        super().__init__(max_turns=max_turns, split=split)
        check_number("top", top, 2, whole=True)
        self.top = top

    @property
    def system_prompt(self) -> str:
        return f"Find the number from 1 to {self.top}. You have {self.max_turns} guesses. Say only a number."

    def sample_task(self, spec: str | None) -> TaskId[int]:
        if spec is None:
            number = int(self.np_random.integers(1, self.top + 1))
        elif re.fullmatch(r"number-\d{1,7}", spec) and 1 <= int(spec[7:]) <= self.top:
            number = int(spec[7:])
        else:
            raise ValueError(f"no task is called {spec!r:.80}; they are called number-1 to number-{self.top}")
        return TaskId(f"number-{number}", number, {"answer": str(number)})

    def begin(self, task: int) -> str:
        return "Guess my number."

    def reply(self, task: int, action: str) -> Reply:
        guess = guess_in(action)
        if guess is None:
            return Reply(UNCLEAR)
        if guess == task:
            return Reply(CORRECT, 1.0, success=True)
        return Reply(f"{ABOVE if guess < task else BELOW} {guess}.")

    def expert_action(self) -> str:
        """Halves the numbers that are left; it does not know the answer."""
        low, high = self.left()
        return str((low + high) // 2)

    def expert_judgement(self, action: str) -> tuple[bool, str]:
        (low, high), guess = self.left(), guess_in(action)
        middle = (low + high) // 2
        # The bounds as the replies have them, and both guesses side by side, so that a small model can copy and compare.
        said = "no number" if guess is None else str(guess)
        known = f"It is above {low - 1} and below {high + 1}, so {middle} is best, and {said} was said."
        return guess in (middle, -((low + high) // -2)), known

    def left(self) -> tuple[int, int]:
        """Smallest and largest number that the replies so far allow."""
        low, high = 1, self.top
        for action, reply in self.dialogue:
            if (guess := guess_in(action)) is not None:
                low = max(low, guess + 1) if reply.startswith(ABOVE) else low
                high = min(high, guess - 1) if reply.startswith(BELOW) else high
        return low, high


def guess_in(action: str) -> int | None:
    """The number that an action names; None unless it names exactly one."""
    found = re.findall(r"\d+", action[:200])
    return int(found[0]) if len(found) == 1 and len(found[0]) <= 7 else None
