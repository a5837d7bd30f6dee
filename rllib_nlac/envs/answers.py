"""What an environment may answer. One place checks it; what breaks it is an error of the environment, not of the run."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rllib_nlac.types import ANSWER, TOOLS

MAX_NAME = 64  # characters of what becomes the name of a metric: a stop reason, a subgoal
MAX_SUBGOALS = 64
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # so that none holds a control token
LARGEST_REWARD = float(np.finfo(np.float32).max)  # learners compute in this precision


class AnswerError(ValueError):
    """An answer of ``reset()`` or ``step()`` that breaks the contract; the text says which part and what it may be."""


def checked_reset(answer: Any) -> tuple[Any, dict[str, Any]]:
    """Observation, as it came, and info of ``reset()``.

    Raises:
        AnswerError: It is no such pair.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise AnswerError(f"reset() must return (observation, info), and it returned {_shown(answer)}")
    info = info_of(answer[1])
    check_tools(info.get(TOOLS))
    return answer[0], info


def checked_step(answer: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Observation, as it came, reward, terminated, truncated and info of ``step()``.

    Raises:
        AnswerError: They are not these five.
    """
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise AnswerError(
            f"step() must return (observation, reward, terminated, truncated, info), and it returned {_shown(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    ended = truth_of(terminated, "terminated"), truth_of(truncated, "truncated")
    return observation, reward_of(reward), *ended, info_of(info)


def reward_of(value: Any, name: str = "the reward") -> float:
    """A reward as a float.

    Args:
        value: A number of Python's or NumPy's; booleans count as 0 and 1.
        name: What to call it in the error.

    Raises:
        AnswerError: It is no number, not finite, or beyond what float32 holds.
    """
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise AnswerError(f"{name} must be a number, and it is {_shown(value)}: return a float")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= LARGEST_REWARD:
        raise AnswerError(f"{name} must be a finite number of at most {LARGEST_REWARD:.1e}, and it is {_shown(value)}")
    return reward


def truth_of(value: Any, name: str) -> bool:
    """A flag as a bool.

    Args:
        value: A boolean of Python's or NumPy's, or a number that is 0 or 1.
        name: What to call it in the error.

    Raises:
        AnswerError: It is anything else: NaN, "no", 0.5 and an array count as true in Python.
    """
    if not isinstance(value, (numbers.Real, np.bool_)) or value not in (0, 1):
        raise AnswerError(f"{name} must be true or false, and it is {_shown(value)}")
    return bool(value)


def info_of(value: Any) -> dict[str, Any]:
    """The info of ``reset()`` or ``step()``, with the keys that are read here checked, and made plain where they are not text:
    ``success`` and ``discard`` bools, a ``task_id`` that is a number an int, ``subgoals`` a dict of no other class.

    ``success`` (a flag, or None while the task is open), ``discard`` (a flag), ``system_prompt`` (text), ``stop_reason``
    and the names of ``subgoals`` (short names: they become metrics), the values of ``subgoals`` (flags or finite numbers),
    ``task_id`` (text or a whole number), ``privileged`` (a dict), ``new_messages`` (a list of dicts of ``role``, "tool" or
    "user", ``content``, and as may be ``name``, ``tool_call_id`` and ``error``). Each may be missing or None.

    Raises:
        AnswerError: It is no dict, or one of these keys holds something else.
    """
    if not isinstance(value, dict):
        raise AnswerError(f"info must be a dict, and it is {_shown(value)}: return {{}} where there is nothing to say")
    flags = {key: truth_of(value[key], f"info[{key!r}]") for key in ("success", "discard") if value.get(key) is not None}
    _check_type(value, "system_prompt", str, "a str")
    _check_type(value, "task_id", (str, numbers.Integral), "a str or an int")
    _check_type(value, ANSWER, (list, tuple), "a list of messages")
    _check_type(value, "privileged", dict, "a dict of what no prompt may show")
    _check_type(value, "subgoals", dict, "a dict of names and what is reached of each")
    if value.get("partner") is not None:
        _check_name(value["partner"], "info['partner']")
    if value.get("stop_reason") is not None:
        _check_name(value["stop_reason"], "info['stop_reason']")
    subgoals = value.get("subgoals") or {}
    if len(subgoals) > MAX_SUBGOALS:
        raise AnswerError(f"info['subgoals'] has {len(subgoals)} names, and each becomes a metric: give {MAX_SUBGOALS} at most")
    for name, reached in subgoals.items():
        _check_name(name, "a name in info['subgoals']")
        reward_of(reached, f"info['subgoals'][{name!r}]")
    for message in value.get(ANSWER) or ():
        _check_message(message)
    plain: dict[str, Any] = {"subgoals": dict(subgoals)} if value.get("subgoals") is not None else {}
    if isinstance(value.get("task_id"), numbers.Integral):
        plain["task_id"] = int(value["task_id"])  # JSON takes none of NumPy's
    return {**value, **flags, **plain}


def _check_message(message: Any) -> None:
    said = message if isinstance(message, Mapping) else {}
    names = [said.get(key) or "_" for key in ("name", "tool_call_id")]
    known = said.get("role") in ("tool", "user") and isinstance(said.get("content"), str)
    if not (known and all(isinstance(name, str) and TOOL_NAME.fullmatch(name) for name in names)):
        raise AnswerError(
            f"a message of info[{ANSWER!r}] must have a role of tool or user and a str as content; name and tool_call_id may "
            f"have letters, digits, '_', '-', '.' and ':'. It is {_shown(message)}"
        )


def check_tools(tools: Any) -> None:
    """Holds schemas of tools against what every chat template can show.

    Raises:
        AnswerError: They are something else.
    """
    try:
        functions = [tool["function"] for tool in tools or ()]
        json.dumps(functions)
        wrong = next((f for f in functions if not TOOL_NAME.fullmatch(f["name"])), None)
    except (TypeError, KeyError, ValueError, RecursionError):
        wrong = tools
    if wrong is not None:
        raise AnswerError(
            'info["tools"] must be a list of schemas as in {"type": "function", "function": {"name": "add", "description": '
            """"...", "parameters": {...}}}, with names of letters, digits, '_', '-', '.' and ':', and it has """
            f"{_shown(wrong)}"
        )


class MetricNames:
    """Names of an environment as metrics can have them.

    MLflow ends a run at a name with another character than letters, digits, "_", "-", ".", ":" and spaces, so others become
    "_". Names beyond the limit are counted together, as "other".

    Args:
        limit: Names that get a metric of their own.
    """

    def __init__(self, limit: int = MAX_SUBGOALS) -> None:
        self._limit, self._known = limit, set[str]()

    def __call__(self, name: str) -> str:
        name = re.sub(r"[^\w.\- :]", "_", name)
        if name not in self._known and len(self._known) >= self._limit:
            return "other"
        self._known.add(name)
        return name


def _check_type(info: dict[str, Any], key: str, kind: Any, wanted: str) -> None:
    value = info.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise AnswerError(f"info[{key!r}] must be {wanted}, and it is {_shown(value)}")


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME or "/" in name or not name.isprintable():
        raise AnswerError(
            f"{what} becomes the name of a metric and must be a str of at most {MAX_NAME} printable characters without '/', "
            f"and it is {_shown(name)}"
        )


def _shown(value: Any) -> str:
    """Type and value, however large or odd it is."""
    kind = type(value).__name__
    try:
        return f"{kind} {value!r:.80}" if value is not None else "None"
    except Exception:  # its own repr raises, or it is an int too long to print
        return f"{kind} that cannot be printed"
