"""The interface of NLAC's own environments: ``make_env("Prefix@{json}")``, ``step(action) -> (success, output)``, ``reward``.

Classes of that kind are registered here by their prefix, and every environment of the registry is served as one, so that
strings like ``TwentyQuestions@{"max_turns": 6, "task_id": "dog"}`` name tasks in either world.
"""

from __future__ import annotations

import abc
import inspect
import json
from typing import Any, ClassVar, Self, TypeVar

import gymnasium as gym

from rllib_nlac.endpoint import EndpointError
from rllib_nlac.names import unknown_key


class BaseEnvironment(abc.ABC):
    """One task, from its string to its end.

    Attributes:
        env_str_prefix: What stands before the ``@``.
        prompt: The first thing that the agent reads.
        system_prompt: What it is told before that; may be empty.
    """

    env_str_prefix: ClassVar[str]
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


Environment = TypeVar("Environment", bound=type[BaseEnvironment])
PREFIXES: dict[str, type[BaseEnvironment]] = {}


def register_env(cls: Environment) -> Environment:
    """Makes a class known by its prefix; usable as a decorator.

    Raises:
        ValueError: It has no prefix, or one with an ``@``, or another class has it.
    """
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
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{env_str!r:.80}: not valid JSON after the '@' ({error.msg} at column {error.colno})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{env_str!r:.80}: a JSON object must follow the '@', and it is a {type(arguments).__name__}")
    return prefix, arguments


def make_env(env_str: str) -> BaseEnvironment:
    """The task that a string names: of a class given to ``register_env``, or of an environment of the registry.

    For the latter the keys are those of ``env_config``, and ``task_id`` and ``seed`` of ``reset``.

    Raises:
        ValueError: The prefix is unknown, or the JSON or a key of it is wrong.
    """
    from rllib_nlac.envs import registry

    prefix, arguments = parse_env_str(env_str)
    if prefix in PREFIXES:
        return PREFIXES[prefix].from_env_str(env_str)
    if prefix in registry.ENVIRONMENTS:
        task_id, seed = arguments.pop("task_id", None), arguments.pop("seed", None)
        return GymTask(registry.make(prefix, arguments), task_id, seed)
    raise ValueError(f"{env_str!r:.80}: {unknown_key(prefix, {*PREFIXES, *registry.ENVIRONMENTS})}")


class GymTask(BaseEnvironment):
    """A gymnasium environment behind this interface: one episode of it.

    Args:
        env: The environment.
        task_id: Which task, None draws one.
        seed: Of the reset.
    """

    env_str_prefix = ""

    def __init__(self, env: gym.Env[str, str], task_id: str | None = None, seed: int | None = None) -> None:
        self.env = env
        self.prompt, self.info = env.reset(seed=seed, options={"task_id": task_id} if task_id is not None else None)
        self.system_prompt = self.info.get("system_prompt", "")
        self._reward, self._finished = 0.0, False

    def step(self, action: str, timeout: float | None = None) -> tuple[bool, str]:
        if self._finished:
            return False, "The episode is over."
        output, reward, terminated, truncated, self.info = self.env.step(action)
        if self.info.get("discard"):
            raise EndpointError(output)
        self._reward += float(reward)
        self._finished = terminated or truncated
        return True, output

    @property
    def reward(self) -> float:
        return self._reward

    @property
    def finished(self) -> bool:
        return self._finished
