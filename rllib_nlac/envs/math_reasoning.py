r"""Mathematics in one step: a problem, a solution that ends in ``\boxed{...}``, an exact grade."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv
from rllib_nlac.envs.math_problems import KINDS, Problem, generate, worked_out
from rllib_nlac.envs.rows import Row, id_field, read_rows, text_field
from rllib_nlac.rewards.grading import GRADERS, MAX_ANSWER, after_hashes, boxed
from rllib_nlac.rewards.math_verify_worker import UnreadableTruth

SYSTEM_PROMPT = r"Solve the problem step by step. End with the final answer in \boxed{}, as in \boxed{42}."
PROBLEMS_PER_LEVEL = 1_000_000  # seeds of the generator
MAX_DRAWS = 1000  # of the generator's problems, until one is of the split
MAX_SHORT_ANSWER = 100  # characters of an answer that stands alone
LEVEL = {"type": "integer", "minimum": min(KINDS), "maximum": max(KINDS)}
EVAL_SHARE = 0.1  # of the problems, where held_out does not say which


class MathReasoning(TextEnv[Problem]):
    r"""Mathematical problems, of a generator with five levels or from files; one an episode.

    The reward is 1 for the right answer in the last ``\boxed{}``, else 0.

    Args:
        level: A level, or several, that problems are drawn from; None takes all. 1 to 5 in the generator, whatever the
            rows say in a file.
        files: JSONL or parquet files in the manner of MATH (``problem``, ``solution`` or ``answer``, ``level``) or GSM8K
            (``question``, ``answer`` that ends in ``#### 42``), with ``id`` or ``unique_id`` where there is one; None takes
            the generator.
        held_out: Ids of a file's problems that are kept for evaluation: a list, or a text file with one a line. Without it,
            and in the generator, a tenth is, chosen by a hash of the problem's text.
        grader: "exact" compares numbers and normalised text; "math_verify" also asks math-verify.
        split: "train", or "eval" for held-out problems.
        max_turns: Tries; after a wrong answer there is another where it is above 1.

    Raises:
        ValueError: An argument is out of range, a row malformed (its line is named), or no problem is left.
    """

    out_of_turns = ""
    row_schema: ClassVar[dict[str, Any] | None] = {
        "level": {"anyOf": [LEVEL, {"type": "array", "maxItems": 100, "items": LEVEL}]},
        "grader": {"enum": list(GRADERS)},
        "split": SPLIT,
        "max_turns": MAX_TURNS,
    }

    def __init__(
        self,
        level: int | Sequence[int] | None = None,
        files: str | Sequence[str] | None = None,
        held_out: str | Sequence[str] | None = None,
        grader: str = "exact",
        split: str = "train",
        max_turns: int = 1,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if grader not in GRADERS:
            raise ValueError(f"grader is {grader!r}; MathReasoning knows {', '.join(map(repr, GRADERS))}")
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; MathReasoning knows 'train' and 'eval'")
        self.grader = grader
        self.levels = (level,) if isinstance(level, int) else tuple(level or ())
        self._problems: dict[str, Problem] | None = None
        if files is None:
            for given in self.levels:
                if given not in KINDS:
                    raise ValueError(f"level is {given!r}, and the generator has levels {', '.join(map(str, KINDS))}")
        else:
            names = (files,) if isinstance(files, str) else tuple(files)
            held = held_out if held_out is None or isinstance(held_out, str) else tuple(held_out)
            self._problems = load_problems(names, held, split, self.levels)
            self._names = list(self._problems)

    @property
    def system_prompt(self) -> str:
        return SYSTEM_PROMPT

    def sample_task(self, spec: str | None) -> TaskId[Problem]:
        if self._problems is not None:
            name = self._names[int(self.np_random.integers(len(self._names)))] if spec is None else spec
            if name not in self._problems:
                raise ValueError(f"no problem is called {name!r} in the split {self.split!r}")
            return _task(name, self._problems[name])
        if spec is None:
            levels = self.levels or tuple(KINDS)
            return self._draw(levels[int(self.np_random.integers(len(levels)))])
        match = re.fullmatch(r"level-(\d)-(\d{1,9})", spec)
        if not match:
            raise ValueError(f"no task is called {spec!r}; the generator's are called as in 'level-3-1234'")
        return _task(spec, generate(int(match[1]), int(match[2])))

    def _draw(self, level: int) -> TaskId[Problem]:
        for _ in range(MAX_DRAWS):
            seed = int(self.np_random.integers(PROBLEMS_PER_LEVEL))
            problem = generate(level, seed)
            if is_held_out(problem.text) == (self.split == "eval"):
                return _task(f"level-{level}-{seed}", problem)
        raise ValueError(f"none of {MAX_DRAWS} problems of level {level} was of the split {self.split!r}: choose another level")

    def begin(self, task: Problem) -> str:
        return task.text

    def reply(self, task: Problem, action: str) -> Reply:
        answer = boxed(action)
        try:
            right = answer is not None and GRADERS[self.grader](answer, task.answer)
        except UnreadableTruth as error:
            raise ValueError(f"{task.place}: {error}") from None
        if right:
            return Reply("Correct.", 1.0, success=True)
        text = "Wrong." if answer is not None else r"No \boxed{} in the answer."
        last = self._turn >= self.max_turns
        return Reply(text if last else f"{text} Try again.", 0.0, success=False if last else None)

    def expert_action(self) -> str:
        assert self._current is not None
        return rf"\boxed{{{self._current.task.answer}}}"

    def expert_judgement(self, action: str) -> tuple[bool, str]:
        """Works a sum or a difference out: an evaluator that only names the answer knows no more than the policy."""
        assert self._current is not None
        steps = worked_out(self._current.task.text)
        if steps is None:
            return super().expert_judgement(action)
        said = boxed(action) or " ".join(action.split())
        return said == self._current.task.answer, f"{steps}, and {said or 'nothing'} was said."


def _task(name: str, problem: Problem) -> TaskId[Problem]:
    return TaskId(name, problem, {"answer": problem.answer, "level": problem.level})


@lru_cache(maxsize=8)
def load_problems(
    files: tuple[str, ...], held_out: str | tuple[str, ...] | None, split: str, levels: tuple[int, ...]
) -> dict[str, Problem]:
    """Problems of a split by their ids; the slots of an EnvRunner share them.

    Raises:
        ValueError: A row is malformed, two have the same id, a held-out id does not exist, or nothing is left.
    """
    problems: dict[str, Problem] = {}
    for row in read_rows(files):
        problem = parse_problem(row)
        name = id_field(row, "id", "unique_id") or f"problem-{_digest(problem.text)}"
        if name in problems:
            raise ValueError(f"{row.place}: the id {name!r} was there before")
        problems[name] = problem
    if held_out is None:
        kept = {name for name, problem in problems.items() if is_held_out(problem.text)}
    else:
        kept = set(Path(held_out).expanduser().read_text("utf-8").split("\n") if isinstance(held_out, str) else held_out) - {""}
        for name in sorted(kept - set(problems)):
            raise ValueError(f"held_out has the id {name!r}, and no problem of {', '.join(files)} is called so")
    chosen = {
        name: problem
        for name, problem in problems.items()
        if (name in kept) == (split == "eval") and (not levels or problem.level in levels)
    }
    if not chosen:
        found = sorted({problem.level for problem in problems.values()})
        raise ValueError(
            f"{', '.join(files)}: of {len(problems)} problems none is left in the split {split!r} with level "
            f"{list(levels) or 'any'}; the levels there are {found}"
        )
    return chosen


def parse_problem(row: Row) -> Problem:
    """A row in the manner of MATH or GSM8K.

    Raises:
        ValueError: Something is missing or malformed; the row's place is named.
    """
    text = text_field(row, "problem", "question", "prompt")
    answer = final_answer(text_field(row, "answer", "ground_truth", "solution")) or boxed(str(row.fields.get("solution")))
    if not answer:
        raise ValueError(
            rf"{row.place}: the answer is neither short, nor in \boxed{{}}, nor after ####: {dict(row.fields)!r:.120}"
        )
    if len(answer) > MAX_ANSWER:
        raise ValueError(f"{row.place}: the answer has {len(answer)} characters, and may have {MAX_ANSWER}")
    return Problem(text, answer.strip(), _level(row), row.place)


def final_answer(text: str) -> str | None:
    """The answer at the end of a solution, or the text itself where it is short; None where there is neither."""
    short = text if len(text) <= MAX_SHORT_ANSWER and "\n" not in text.strip() else None
    return after_hashes(text) or boxed(text) or short


def _level(row: Row) -> int:
    value: Any = row.fields.get("level")
    if value is None:
        return 0
    match = re.fullmatch(r"(?:level\s*)?(\d{1,3})", f"{value!s:.20}".strip(), re.IGNORECASE)
    if match:
        return int(match[1])
    if str(value).strip().lower() == "level ?":  # MATH has a few of these
        return 0
    raise ValueError(f"{row.place}: level must be a number or as in 'Level 5', and it is {value!r:.80}")


def is_held_out(text: str) -> bool:
    """Whether a generated problem is kept for evaluation. By its text and not its seed: many seeds have the same problem."""
    return int(_digest(text), 16) % 1000 < 1000 * EVAL_SHARE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
