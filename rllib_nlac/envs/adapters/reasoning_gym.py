"""Data sets of reasoning-gym (PyPI: reasoning-gym): questions from a generator, each with a scorer of its own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from rllib_nlac.envs.adapters import reasoning_gym_child as child
from rllib_nlac.envs.base import SPLIT, EpisodeLost, Reply, TaskId, TextEnv, check_number
from rllib_nlac.envs.math_reasoning import MAX_DRAWS, is_held_out
from rllib_nlac.rewards.worker import Worker

INSTALL = "pip install 'rllib_nlac[reasoning-gym]'"
SUCCESS = 0.99  # wrong answers can score a little
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SYSTEM_PROMPT = (
    "Solve the problem step by step. End with the final answer alone between <answer> and </answer>, as in <answer>42</answer>."
    " Where the problem shows a form for the answer, keep to it."
)


class Question(NamedTuple):
    """A question of a data set; ``answer`` is the reference."""

    number: int
    text: str
    answer: str


class ReasoningGym(TextEnv[Question]):
    """Questions of one of reasoning-gym's data sets, one an episode.

    An answer is the text in the last ``<answer>...</answer>`` of a turn. The reward is the score of the last answer, from 0
    to 1, and comes at the end of the episode. A score of 0.99 or more is a success and ends it.

    Some data sets evaluate answers as Python or sympy, so that questions are made and scored in a process of its own with few
    rights. An answer that takes it longer than 5 s scores 0.

    Args:
        dataset: Name of the data set, as in "chain_sum".
        dataset_config: Settings of the data set, as ``{max_terms: 4}``.
        attempts: Answers that may be given; after a wrong one that is not the last, the agent is asked to try again.
        split: "train", or "eval" for the tenth of the questions, chosen by a hash of the text, that is never trained on.

    Raises:
        ValueError: reasoning-gym is not installed, it refuses the name or the settings, or the data set's own reference answer
            does not score 1.
    """

    out_of_turns = ""
    row_schema: ClassVar[dict[str, Any] | None] = {
        "dataset": {"type": "string", "pattern": r"^[a-z0-9_]{1,80}$"},
        "attempts": {"type": "integer", "minimum": 1, "maximum": 100},
        "split": SPLIT,
    }

    def __init__(
        self,
        dataset: str = "chain_sum",
        dataset_config: Mapping[str, Any] | None = None,
        attempts: int = 1,
        split: str = "train",
    ) -> None:
        check_number("attempts", attempts, 1, whole=True)
        super().__init__(max_turns=attempts, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; ReasoningGym knows 'train' and 'eval'")
        if find_spec("reasoning_gym") is None:
            raise ValueError(f"the environment ReasoningGym needs the package reasoning-gym: {INSTALL}")
        for key in ("seed", "size"):
            if key in (dataset_config or {}):
                raise ValueError(f"env_config.dataset_config has {key!r}, which the environment sets itself: leave it out")
        self.dataset = dataset
        try:
            self._settings = json.dumps(dataset_config or {}, sort_keys=True)
        except TypeError as error:
            raise ValueError(f"env_config.dataset_config must hold plain values: {error}") from None
        _questions(dataset, self._settings)

    @property
    def system_prompt(self) -> str:
        return SYSTEM_PROMPT

    def sample_task(self, spec: str | None) -> TaskId[Question]:
        if spec is not None:
            match = re.fullmatch(rf"{re.escape(self.dataset)}/(\d{{1,9}})", spec)
            if not match or int(match[1]) >= child.NUM_QUESTIONS:
                last = f"{self.dataset}/{child.NUM_QUESTIONS - 1}"
                raise ValueError(f"no task is called {spec!r:.80}; they are {self.dataset}/0 to {last}")
            return self._task(_questions(self.dataset, self._settings).question(int(match[1])))
        for _ in range(MAX_DRAWS):
            index = int(self.np_random.integers(child.NUM_QUESTIONS))
            question = _questions(self.dataset, self._settings).question(index)
            if is_held_out(question.text) == (self.split == "eval"):
                return self._task(question)
        raise ValueError(f"none of {MAX_DRAWS} questions of {self.dataset!r} was of the split {self.split!r}: it has too few")

    def _task(self, question: Question) -> TaskId[Question]:
        return TaskId(f"{self.dataset}/{question.number}", question, {"answer": question.answer})

    def begin(self, task: Question) -> str:
        return task.text

    def reply(self, task: Question, action: str) -> Reply:
        answers = ANSWER.findall(action)
        score = _questions(self.dataset, self._settings).score(task.number, answers[-1].strip()) if answers else 0.0
        if score >= SUCCESS:
            return Reply("Correct.", score, success=True)
        text = "Not correct." if answers else "There is no <answer> in it."
        if self._turn < self.max_turns:
            return Reply(f"{text} Try again.")
        return Reply(text, score, success=False)

    def expert_action(self) -> str:
        assert self._current is not None
        return f"<answer>{self._current.task.answer}</answer>"


class _Questions(Worker):
    """A data set in its process."""

    def __init__(self, dataset: str, settings: str) -> None:
        super().__init__(child.__file__, dataset, settings)
        self._dataset = dataset
        said = self._ask(child.QUESTION_S, 0)
        answer = said[1] if isinstance(said, list) else None
        score = self.score(0, answer) if answer is not None else None
        if score is None or score < SUCCESS:
            self.stop()
            found = "gives no reference answer" if score is None else f"gives its own reference answer the score {score:g}"
            raise ValueError(
                f"env_config.dataset {dataset!r}: reasoning-gym {found}, so no success could be told: choose another"
            )

    def question(self, index: int) -> Question:
        """The question of this number.

        Raises:
            EpisodeLost: The data set fails at it.
        """
        said = self._ask(child.QUESTION_S, index)
        if not isinstance(said, list) or said[1] is None:
            raise EpisodeLost("question_failed", f"{self._dataset}/{index}: {said or 'no question in time'}")
        return Question(index, *said)

    def score(self, index: int, text: str) -> float:
        """What the data set gives for an answer: from 0 to 1, and 0 where it cannot tell in time."""
        said = self._ask(child.SCORE_S, index, text)
        return float(said) if isinstance(said, (int, float)) and 0 <= said <= 1 else 0.0

    def _ask(self, timeout_s: float, *question: Any) -> Any:
        with self._lock:
            if not self._send(json.dumps(question)):
                return None
            try:
                return json.loads(self._line(time.monotonic() + timeout_s))
            except ValueError:
                self.stop()
                return None

    def _why_not(self, said: str) -> str:
        return f"env_config.dataset {self._dataset!r}: reasoning-gym says {said or 'nothing'}"


@cache
def _questions(dataset: str, settings: str) -> _Questions:
    """All environments of a process with the same data set share one; environments stay picklable."""
    return _Questions(dataset, settings)
