"""The environment contract: a plain ``gymnasium.Env[str, str]`` whose observations are only the *new* text.

The transcript is rebuilt from the episode, so an environment never repeats what was said. ``TextEnv`` keeps the turn
count, the dialogue, the info dict and the flags, and leaves three methods to an environment: ``sample_task``, ``begin``
and ``reply``.
"""

from __future__ import annotations

import abc
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import gymnasium as gym

from rllib_nlac.envs.partners import Partners
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.inputs.endpoint import EndpointError
from rllib_nlac.types import ANSWER

Task = TypeVar("Task")
# Schemas that many environments use in row_schema.
MAX_TURNS = {"type": "integer", "minimum": 1, "maximum": 1000}
SPLIT = {"enum": ["train", "eval"]}


@dataclass(frozen=True)
class Reply:
    """What the environment answers to one action.

    Attributes:
        text: The new observation; empty where ``messages`` say it all.
        reward: The reward of this step.
        success: True or False once the task is decided, None while it is open.
        truncated: Whether a limit other than ``max_turns`` ends the episode.
        stop_reason: Why it ends, in a word of the environment's own.
        messages: What stands for the observation in the dialogue, such as results of tools: ``info["new_messages"]``.
    """

    text: str
    reward: float = 0.0
    success: bool | None = None
    truncated: bool = False
    stop_reason: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class TaskId(Generic[Task]):
    """A task together with the name it is asked for by ``reset(options={"task_id": ...})``."""

    id: str
    task: Task
    privileged: dict[str, Any] = field(default_factory=dict)


def check_number(key: str, value: Any, low: float, high: float = math.inf, whole: bool = False) -> None:
    """Checks a number that ``env_config`` sets.

    Args:
        key: Its key.
        value: What stands there.
        low: The least that it may be.
        high: The largest.
        whole: Whether it must be a whole number.

    Raises:
        ValueError: It is a text, a flag, NaN, infinite or out of range; key, value and what is needed are named.
    """
    number = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if not (number and low <= value <= high and value < math.inf):
        kind = "whole number" if whole else "finite number"
        bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"env_config.{key} is {value!r:.80} and must be a {kind} {bounds}")


def variables_for(given: Any, where: str) -> dict[str, str]:
    """Environment variables of a process that an environment starts, as a configuration gives them.

    Args:
        given: Values by name. None as a value takes that of this process, so that secrets stand in no file.
        where: Place in the configuration, for the error.

    Raises:
        ValueError: It is no mapping, a value is neither a text nor a number, or this process lacks a variable.
    """
    if not isinstance(given or {}, Mapping):
        raise ValueError(f"{where} must be a mapping of names to values, and it is {given!r:.80}")
    found = {}
    for name, value in (given or {}).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"{where}.{name} is {value!r:.40} and must be a text, a number, or null for this process's value")
        if value is None and name not in os.environ:
            raise ValueError(
                f"{where}.{name} is null, and this process has no environment variable of that name. So {name} has no value: "
                "set it"
            )
        found[name] = os.environ[name] if value is None else str(value)
    return found


class EpisodeLost(Exception):
    """An episode that ends through no fault of the agent, and is left out and counted: ``begin`` or ``reply`` raises it.

    Args:
        reason: What becomes ``info["stop_reason"]``, and so the name of a metric.
        cause: What happened, in words.
    """

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(cause)
        self.reason, self.cause = reason, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.cause)


class TextEnv(gym.Env[str, str], Generic[Task]):
    """Base class of the environments shipped here. Using it is a convenience: any ``gym.Env[str, str]`` will do.

    ``info`` holds ``task_id, split, system_prompt, tools, turn, success, stop_reason`` and, under ``privileged``, what
    no prompt may show. ``terminated`` means that the task is decided; ``truncated`` that the turns ran out, that somebody
    behind an endpoint, such as a simulated user, could not be reached, or that ``reply`` raised ``EpisodeLost``. The latter two
    are no fault of the agent: such an episode has ``info["discard"]`` set and is left out of replay, of training and of every
    mean. Where it happens in ``begin``, ``reset`` raises ``EpisodeLost``.

    Args:
        max_turns: Actions per episode, at least 1.
        split: Which tasks are drawn, "train" or "eval".

    Raises:
        ValueError: ``max_turns`` is no whole number, or below 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    out_of_turns = "No turns left."
    # What a row of a task file may set, each key with its JSON schema: plain values with bounds, and never what names a file,
    # an address, a key or code. None keeps the environment out of rows that are not trusted.
    row_schema: ClassVar[dict[str, Any] | None] = None
    partners: Partners[Any] | None = None  # who else takes part, where a configuration can say

    def __init__(self, max_turns: int, split: str = "train") -> None:
        check_number("max_turns", max_turns, 1, whole=True)
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self.max_turns = max_turns
        self.split = split
        self._current: TaskId[Task] | None = None
        self._turn = 0
        self._success: bool | None = None
        self._stop_reason: str | None = None
        self.dialogue: list[tuple[str, str]] = []  # (action, reply) of the steps so far

    @abc.abstractmethod
    def sample_task(self, spec: str | None) -> TaskId[Task]:
        """The task called ``spec``, or one drawn with ``self.np_random`` where it is None.

        Raises:
            ValueError: No task has that name.
        """

    @abc.abstractmethod
    def begin(self, task: Task) -> str:
        """The first observation of an episode of ``task``."""

    @abc.abstractmethod
    def reply(self, task: Task, action: str) -> Reply:
        """The answer to one action."""

    @property
    @abc.abstractmethod
    def system_prompt(self) -> str:
        """What the agent is told before the first observation."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that an action may call, as OpenAI's API has them; none by default."""
        return []

    def expert_action(self) -> str:
        """What a scripted policy, which may know what is hidden, does next; followed from the start it gets the largest return.

        Raises:
            NotImplementedError: This environment has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted expert")

    def expert_judgement(self, action: str) -> tuple[bool, str]:
        """What a scripted critic says of an action before it is played: whether it is the best one, and why in one sentence."""
        best, said = " ".join(self.expert_action().split()), " ".join(action.split())
        # Both steps side by side, so that a small model can copy and compare.
        return said == best, f"The best step is {best}, and {said or 'nothing'} was said."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        unknown = set(options) - {"task_id"}
        if unknown:
            raise ValueError(f"unknown reset option {sorted(unknown)[0]!r}; known is 'task_id'")
        self._current = self.sample_task(options.get("task_id"))
        if self.partners is not None:
            self.partners.draw(self.np_random)
        self._turn, self._success, self._stop_reason, self.dialogue = 0, None, None, []
        try:
            return self.begin(self._current.task), self._info()
        except EndpointError as error:
            raise EpisodeLost("endpoint_failure", str(error)) from None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._current is None:
            raise RuntimeError("step() was called before reset()")
        if self._stop_reason is not None:
            raise RuntimeError(f"step() was called after the end of the episode ({self._stop_reason}): call reset()")
        self._turn += 1
        try:
            answer = self.reply(self._current.task, action)
        except (EndpointError, EpisodeLost) as error:
            self._stop_reason = error.reason if isinstance(error, EpisodeLost) else "endpoint_failure"
            return f"{error}", 0.0, False, True, {**self._info(), "discard": True}
        text = answer.text or "\n".join(message["content"] for message in answer.messages)
        terminated = answer.success is not None and not answer.truncated
        truncated = not terminated and (answer.truncated or self._turn >= self.max_turns)
        if terminated or truncated:
            self._success = bool(answer.success)
            usual = "turn_limit" if truncated else "success" if answer.success else "failure"
            self._stop_reason = answer.stop_reason or usual
        if truncated and not answer.truncated:
            text = f"{text} {self.out_of_turns}".strip()
        self.dialogue.append((action, text))
        info = self._info()
        if answer.messages:
            info[ANSWER] = [dict(message) for message in answer.messages]
        return text, answer.reward, terminated, truncated, info

    def _info(self) -> dict[str, Any]:
        assert self._current is not None
        return {
            "task_id": self._current.id,
            "split": self.split,
            "system_prompt": self.system_prompt,
            "tools": self.tools,
            "turn": self._turn,
            "success": self._success,
            "stop_reason": self._stop_reason,
            "privileged": dict(self._current.privileged),
            **({"partner": self.partners.name} if self.partners is not None and self.partners.name else {}),
        }
