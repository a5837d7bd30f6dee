"""The interface of NLAC's own environments: ``make_env("Prefix@{json}")``, ``step(action) -> (success, output)``, ``reward``.

Classes of that kind are registered here by their prefix, and every environment of the registry is served as one, so that
strings like ``TwentyQuestions@{"max_turns": 6, "task_id": "dog"}`` name tasks in either world.
"""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, Self, TypeVar

import gymnasium as gym

from rllib_nlac.envs import registry
from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.rows import MAX_ID_LENGTH
from rllib_nlac.inputs import plain_json
from rllib_nlac.names import unknown_key
from rllib_nlac.rewards.row_rewards import check_values
from rllib_nlac.rewards.styles import STYLES

# What a row may set of every environment of the registry, beside what that declares.
_OF_THE_RESET = {
    "task_id": {"type": "string", "maxLength": MAX_ID_LENGTH},
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}


class BaseEnvironment(abc.ABC):
    """One task, from its string to its end.

    Attributes:
        env_str_prefix: What stands before the ``@``.
        prompt: The first thing that the agent reads.
        system_prompt: What it is told before that; may be empty.
        row_schema: What a row of a task file may set, each key with its JSON schema: plain values with bounds. None keeps the
            class out of rows that are not trusted.
    """

    env_str_prefix: ClassVar[str]
    row_schema: ClassVar[Mapping[str, Any] | None] = None
    prompt: str = ""
    system_prompt: str = ""

    @classmethod
    def from_env_str(cls, env_str: str) -> Self:
        """Builds the task that ``Prefix@{json}`` names; the JSON's keys are the constructor's arguments.

        Raises:
            ValueError: The prefix is another one, the JSON is no object, or a key is unknown.
        """
        prefix, arguments = parse_env_str(env_str)
        if prefix != cls.env_str_prefix:
            raise ValueError(f"{env_str!r:.80}: the prefix of {cls.__name__} is {cls.env_str_prefix!r}, not {prefix!r}")
        known = inspect.signature(cls).parameters
        for key in arguments:
            if key not in known:
                raise ValueError(f"{env_str!r:.80}: {unknown_key(key, known)}")
        return cls(**arguments)

    @abc.abstractmethod
    def step(self, action: str, timeout: float | None = None) -> tuple[bool, str]:
        """Acts.

        Args:
            action: The agent's text.
            timeout: Seconds that the environment may take, where it can tell.

        Returns:
            Whether the action could be carried out, and what the agent reads next.
        """

    @property
    @abc.abstractmethod
    def reward(self) -> float:
        """The reward so far."""

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """Whether the episode is over."""

    @property
    def success(self) -> bool:
        """Whether an episode that is over was a success: by default where its reward is 1 or more."""
        return self.reward >= 1.0

    def close(self) -> None:  # noqa: B027
        """Gives back what the task holds; by default nothing."""


Environment = TypeVar("Environment", bound=type[BaseEnvironment])
PREFIXES: dict[str, type[BaseEnvironment]] = {}


def register_env(cls: Environment) -> Environment:
    """Makes a class known by its prefix; usable as a decorator.

    Raises:
        ValueError: It has no prefix, or one with an ``@``, or another class has it, or it lacks a part of the interface.
    """
    parts = (name for name in dir(BaseEnvironment) if not name.startswith("_"))
    if missing := sorted(name for name in parts if not hasattr(cls, name) and name != "env_str_prefix"):
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}: inherit from rllib_nlac.envs.official.BaseEnvironment")
    prefix = getattr(cls, "env_str_prefix", "")
    if not prefix or "@" in prefix:
        raise ValueError(f"{cls.__name__} needs an env_str_prefix without '@', and has {prefix!r}")
    other = PREFIXES.get(prefix)
    if other is not None and other.__qualname__ != cls.__qualname__:
        raise ValueError(f"the prefix {prefix!r} belongs to {other.__name__} already")
    PREFIXES[prefix] = cls
    return cls


def parse_env_str(env_str: str) -> tuple[str, dict[str, Any]]:
    """Prefix and arguments of ``Prefix@{json}``, split at the first ``@``.

    Raises:
        ValueError: There is no ``@``, or what follows is no JSON object.
    """
    prefix, at, text = env_str.partition("@")
    if not at:
        raise ValueError(f"{env_str!r:.80} names no environment: it must read as in 'TwentyQuestions@{{\"max_turns\": 6}}'")
    try:
        arguments = plain_json.loads(text)
    except ValueError as error:
        raise ValueError(f"{env_str!r:.80}: after the '@': {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{env_str!r:.80}: a JSON object must follow the '@', and it is a {type(arguments).__name__}")
    return prefix, arguments


def make_env(env_str: str) -> BaseEnvironment:
    """The task that a string names: of a class given to ``register_env``, or of an environment of the registry.

    For the latter the keys are those of ``env_config``, and ``task_id`` and ``seed`` of ``reset``. The string is the caller's
    own: it may name files, addresses and code where the environment takes them. For strings of rows there is ``row_env``.

    Raises:
        ValueError: The prefix is unknown, or the JSON or a key of it is wrong.
    """
    return _build(*parse_env_str(env_str))


def row_env(
    env_str: str,
    environments: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int | None = None,
    trusted: bool = False,
    split: str | None = None,
) -> BaseEnvironment:
    """The task that the string of a row names, which is data and may choose nothing but plain values unless it is trusted.

    Args:
        env_str: Environment string of the row.
        environments: Settings by prefix, from the run's configuration, that a row may add to.
        seed: Seed of a registered environment, where the row has none.
        trusted: Whether it may choose all that ``make_env`` takes.
        split: Split of an environment that has splits, where neither the row nor ``environments`` names one.

    Raises:
        ValueError: As ``check_row`` says, or the environment refuses its settings.
    """
    prefix, arguments = parse_env_str(env_str) if trusted else check_row(env_str, environments)
    if prefix in registry.ENVIRONMENTS and prefix not in PREFIXES and seed is not None:
        arguments.setdefault("seed", seed)
    arguments = {**(environments or {}).get(prefix, {}), **arguments}
    factory = PREFIXES.get(prefix) or registry.ENVIRONMENTS.get(prefix)
    if split is not None and factory is not None and "split" in inspect.signature(factory).parameters:
        arguments.setdefault("split", split)
    return _build(prefix, arguments)


def check_row(env_str: str, environments: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Prefix and arguments of a row's string, once they are what a row may choose.

    Raises:
        ValueError: The environment is not registered, or is none that rows may choose, or a key is none that they may set, or
            its value does not fit the schema.
    """
    prefix, arguments = parse_env_str(env_str)
    factory = PREFIXES.get(prefix) or registry.ENVIRONMENTS.get(prefix)
    if factory is None:
        raise ValueError(f"{env_str!r:.80}: {unknown_key(prefix, {*PREFIXES, *registry.ENVIRONMENTS})}")
    schema = getattr(factory, "row_schema", None)
    if schema is None and prefix not in (environments or {}):
        raise ValueError(
            f"{env_str!r:.80}: rows may not choose {prefix}, which has no row_schema: give its settings under "
            f"env_config.environments.{prefix}, or set env_config.trusted: true where the files are your own"
        )
    known = inspect.signature(factory).parameters
    schema = {**(schema or {}), **({} if prefix in PREFIXES else _OF_THE_RESET)}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    for key in arguments:
        if key not in known and key not in schema:
            raise ValueError(f"{env_str!r:.80}: {unknown_key(key, {*known, *schema})}")
    check_values(arguments, schema, f"{env_str!r:.80}", f"env_config.environments.{prefix}")
    return prefix, arguments


def _build(prefix: str, arguments: dict[str, Any]) -> BaseEnvironment:
    if prefix in PREFIXES:
        return PREFIXES[prefix].from_env_str(f"{prefix}@{json.dumps(arguments)}")
    if prefix in registry.ENVIRONMENTS:
        arguments = dict(arguments)
        task_id, seed = arguments.pop("task_id", None), arguments.pop("seed", None)
        return GymTask(registry.make(prefix, arguments), task_id, seed)
    raise ValueError(f"{prefix!r:.80}@...: {unknown_key(prefix, {*PREFIXES, *registry.ENVIRONMENTS})}")


class GymTask(BaseEnvironment):
    """A gymnasium environment behind this interface: one episode of it.

    Args:
        env: The environment.
        task_id: Which task, None draws one.
        seed: Seed of the reset.

    Attributes:
        info: What it said last.
        truncated: Whether a limit ended the episode.
    """

    env_str_prefix = ""

    def __init__(self, env: gym.Env[str, str], task_id: str | None = None, seed: int | None = None) -> None:
        self.env = env
        try:
            self.prompt, self.info = env.reset(seed=seed, options={"task_id": task_id} if task_id is not None else None)
            self._check_kept(self.prompt)
        except BaseException:
            env.close()
            raise
        self.system_prompt = self.info.get("system_prompt", "")
        self._reward, self._finished = 0.0, False
        self.truncated = False

    def step(self, action: str, timeout: float | None = None) -> tuple[bool, str]:
        if self._finished:
            return False, "The episode is over."
        output, reward, terminated, truncated, self.info = self.env.step(action)
        self._check_kept(output)
        self._reward += float(reward)
        self._finished, self.truncated = terminated or truncated, truncated and not terminated
        return True, output

    def _check_kept(self, output: str) -> None:
        if self.info.get("discard"):
            raise EpisodeLost(self.info.get("stop_reason") or "unknown", output)

    @property
    def reward(self) -> float:
        return self._reward

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def success(self) -> bool:
        """The environment's own word; where it has none a positive return counts, as it does without this interface."""
        said = self.info.get("success")
        return self.reward > 0 if said is None else bool(said)

    def close(self) -> None:
        self.env.close()


def agent_env(answer: str | Sequence[str], truth: Any, *, trusted: bool = False, **_: Any) -> float:
    """What an environment itself pays for these actions, until it is over.

    Args:
        answer: The action, or all actions of an episode.
        truth: The environment's string, which may choose what a row may.
        trusted: Whether it may choose all that ``make_env`` takes.

    Raises:
        ValueError: The string names no environment, or sets more than a row may.
        EpisodeLost: The environment lost the episode, as where somebody behind an endpoint could not be reached.
    """
    with closing(row_env(str(truth), trusted=trusted)) as env:
        for action in [answer] if isinstance(answer, str) else answer:
            if env.finished:
                break
            env.step(action)
        return env.reward


AGENT_ENV = "agent_env"  # a reward style; in a task set the agent plays the environment turn by turn
STYLES[AGENT_ENV] = agent_env
