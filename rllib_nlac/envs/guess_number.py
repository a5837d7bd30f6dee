"""Guess a number that is above or below what was guessed: the smallest task on which a real model has something to learn."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv, check_number
from rllib_nlac.envs.tools import ToolEnv
from rllib_nlac.inputs.tool_calls import Call, ToolError, read_calls

ABOVE, BELOW, CORRECT, UNCLEAR = "It is above", "It is below", "Correct.", "Say a number."
NO_CALL = "Call guess or middle."
ROW_SCHEMA: dict[str, Any] = {
    "top": {"type": "integer", "minimum": 2, "maximum": 1_000_000},
    "max_turns": MAX_TURNS,
    "split": SPLIT,
}


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

    row_schema: ClassVar[dict[str, Any] | None] = ROW_SCHEMA

    def __init__(self, top: int = 20, max_turns: int = 5, split: str = "train") -> None:
        super().__init__(max_turns=max_turns, split=split)
        check_number("top", top, 2, whole=True)
        self.top = top

    @property
    def system_prompt(self) -> str:
        return f"Find the number from 1 to {self.top}. You have {self.max_turns} guesses. Say only a number."

    def sample_task(self, spec: str | None) -> TaskId[int]:
        return task_called(spec, self.top, self.np_random)

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


class GuessNumberTools(ToolEnv[int]):
    """The same game by tool calls: ``guess`` says where the number is, and ``middle`` computes the next guess.

    A guess that is computed first takes two turns. So halving wins every game if 2 ** (max_turns // 2) exceeds ``top``.

    Args:
        top: Largest number, at least 2.
        max_turns: Turns per episode. A turn has at most one guess.
        split: Recorded in ``info``; both splits draw from the same numbers.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = ROW_SCHEMA

    def __init__(self, top: int = 20, max_turns: int = 10, split: str = "train") -> None:
        super().__init__(max_turns=max_turns, split=split)
        check_number("top", top, 2, whole=True)
        self.top = top

    @property
    def system_prompt(self) -> str:
        return f"Find the number from 1 to {self.top}. You have {self.max_turns} turns. Each turn is one tool call."

    def sample_task(self, spec: str | None) -> TaskId[int]:
        return task_called(spec, self.top, self.np_random)

    def begin(self, task: int) -> str:
        self._above, self._below = 0, self.top + 1  # bounds that the guesses have told
        self._middle: int | None = None  # the middle of the bounds, once it was computed
        self._guess, self._guess_turn = 0, 0  # the last guess and its turn
        return f"Guess my number. {ABOVE} {self._above}. {BELOW} {self._below}."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        assert self._current is not None
        if self._guess_turn == self._turn:
            raise ToolError("you have one guess each turn")
        self._guess, self._guess_turn, self._middle, task = number, self._turn, None, self._current.task
        self._above = max(self._above, number) if number < task else self._above
        self._below = min(self._below, number) if number > task else self._below
        return CORRECT if number == task else f"{ABOVE if number < task else BELOW} {number}."

    def middle(self, above: int, below: int) -> int:
        """Computes the middle of two numbers.

        Args:
            above: The number is above this one.
            below: The number is below this one.
        """
        if below - above < 2:
            raise ToolError(f"there is no number above {above} and below {below}")
        middle = (above + below) // 2
        self._middle = middle if (above, below) == (self._above, self._below) else self._middle
        return middle

    def reply(self, task: int, action: str) -> Reply:
        answer = super().reply(task, action)
        return replace(answer, reward=1.0, success=True) if self._guess == task else answer

    def answer(self, task: int, action: str) -> Reply:
        return Reply(NO_CALL)

    def expert_action(self) -> str:
        """Halves the numbers that are left; it does not know the answer."""
        return str(self._best())

    def _best(self) -> Call:
        if self._middle is None:
            return Call("middle", {"above": self._above, "below": self._below})
        return Call("guess", {"number": self._middle})

    def expert_judgement(self, action: str) -> tuple[bool, str]:
        best, said, low = in_words(str(self._best())), in_words(action), (self._above + self._below) // 2
        guesses = f"guess {low}", f"guess {self._above + self._below - low}"  # without the tool, which saves a turn
        best = said if said in guesses else best
        return said == best, f"It is above {self._above} and below {self._below}, so {best} is best, and {said} was said."


def task_called(spec: str | None, top: int, rng: np.random.Generator) -> TaskId[int]:
    """The task of a name, as "number-7"; a random one for None.

    Raises:
        ValueError: No task has that name.
    """
    if spec is None:
        number = int(rng.integers(1, top + 1))
    elif re.fullmatch(r"number-\d{1,7}", spec) and 1 <= int(spec[7:]) <= top:
        number = int(spec[7:])
    else:
        raise ValueError(f"no task is called {spec!r:.80}; they are called number-1 to number-{top}")
    return TaskId(f"number-{number}", number, {"answer": str(number)})


def in_words(action: str) -> str:
    """The calls of an action as "middle 4 10", so that a small model can compare them."""
    calls = [call for call in read_calls(action)[1] if isinstance(call, Call)]
    words = [" ".join([call.name, *(str(value) for _, value in sorted(call.arguments.items()))]) for call in calls]
    return " and ".join(words)[:60] or "no call"


def guess_in(action: str) -> int | None:
    """The number that an action names; None unless it names exactly one."""
    found = re.findall(r"\d+", action[:200])
    return int(found[0]) if len(found) == 1 and len(found[0]) <= 7 else None
