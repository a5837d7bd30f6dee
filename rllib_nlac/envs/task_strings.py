"""Tasks that strings name, as in ``TwentyQuestions@{"max_turns": 6, "task_id": "dog"}``: NLAC's own form for them.

What stands before the ``@`` is the name of an environment of the registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

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


def parse_env_str(env_str: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of ``Name@{json}``, split at the first ``@``.

    Raises:
        ValueError: There is no ``@``, or what follows is no JSON object.
    """
    name, at, text = env_str.partition("@")
    if not at:
        raise ValueError(f"{env_str!r:.80} names no environment: it must read as in 'TwentyQuestions@{{\"max_turns\": 6}}'")
    try:
        arguments = plain_json.loads(text)
    except ValueError as error:
        raise ValueError(f"{env_str!r:.80}: after the '@': {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{env_str!r:.80}: a JSON object must follow the '@', and it is a {type(arguments).__name__}")
    return name, arguments


def row_env(
    env_str: str,
    environments: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int | None = None,
    trusted: bool = False,
    split: str | None = None,
) -> GymTask:
    """The task that the string of a row names, which is data and may choose nothing but plain values unless it is trusted.

    Args:
        env_str: Environment string of the row.
        environments: Settings by name, from the run's configuration, that a row may add to.
        seed: Seed of the reset, where the row has none.
        trusted: Whether it may set all keys, those that name files, addresses and code too.
        split: Split of an environment that has splits, where neither the row nor ``environments`` names one.

    Raises:
        ValueError: As ``check_row`` says, or the environment refuses its settings.
    """
    name, arguments = parse_env_str(env_str) if trusted else check_row(env_str, environments)
    if name not in registry.ENVIRONMENTS:
        raise ValueError(f"{env_str!r:.80}: {unknown_key(name, registry.ENVIRONMENTS)}")
    if seed is not None:
        arguments.setdefault("seed", seed)
    arguments = {**(environments or {}).get(name, {}), **arguments}
    if split is not None and "split" in inspect.signature(registry.ENVIRONMENTS[name]).parameters:
        arguments.setdefault("split", split)
    task_id, seed = arguments.pop("task_id", None), arguments.pop("seed", None)
    return GymTask(registry.make(name, arguments), task_id, seed)


def check_row(env_str: str, environments: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a row's string, once they are what a row may choose.

    Raises:
        ValueError: The environment is not registered, or is none that rows may choose, or a key is none that they may set, or
            its value does not fit the schema.
    """
    name, arguments = parse_env_str(env_str)
    factory = registry.ENVIRONMENTS.get(name)
    if factory is None:
        raise ValueError(f"{env_str!r:.80}: {unknown_key(name, registry.ENVIRONMENTS)}")
    schema = getattr(factory, "row_schema", None)
    if schema is None and name not in (environments or {}):
        raise ValueError(
            f"{env_str!r:.80}: rows may not choose {name}, which has no row_schema: give its settings under "
            f"env_config.environments.{name}, or set env_config.trusted: true where the files are your own"
        )
    known = inspect.signature(factory).parameters
    schema = {**(schema or {}), **_OF_THE_RESET}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    for key in arguments:
        if key not in known and key not in schema:
            raise ValueError(f"{env_str!r:.80}: {unknown_key(key, {*known, *schema})}")
    check_values(arguments, schema, f"{env_str!r:.80}", f"env_config.environments.{name}")
    return name, arguments


class GymTask:
    """One episode of an environment.

    Args:
        env: The environment.
        task_id: Which task, None draws one.
        seed: Seed of the reset.

    Attributes:
        prompt: The first thing that the agent reads.
        system_prompt: What it is told before that; may be empty.
        reward: The sum of the rewards so far.
        finished: Whether the episode is over.
        info: What it said last.
        truncated: Whether a limit ended the episode.
    """

    def __init__(self, env: gym.Env[str, str], task_id: str | None = None, seed: int | None = None) -> None:
        self.env = env
        try:
            self.prompt, self.info = env.reset(seed=seed, options={"task_id": task_id} if task_id is not None else None)
            self._check_kept(self.prompt)
        except BaseException:
            env.close()
            raise
        self.system_prompt = self.info.get("system_prompt", "")
        self.reward, self.finished, self.truncated = 0.0, False, False

    def step(self, action: str) -> str:
        """Acts; returns what the agent reads next."""
        output, reward, terminated, truncated, self.info = self.env.step(action)
        self._check_kept(output)
        self.reward += float(reward)
        self.finished, self.truncated = terminated or truncated, truncated and not terminated
        return output

    def _check_kept(self, output: str) -> None:
        if self.info.get("discard"):
            raise EpisodeLost(self.info.get("stop_reason") or "unknown", output)

    @property
    def success(self) -> bool:
        """The environment's own word; where it has none a positive return counts, as it does without this interface."""
        said = self.info.get("success")
        return self.reward > 0 if said is None else bool(said)

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


def agent_env(answer: str | Sequence[str], truth: Any, *, trusted: bool = False, **_: Any) -> float:
    """What an environment itself pays for these actions, until it is over.

    Args:
        answer: The action, or all actions of an episode.
        truth: The environment's string, which may choose what a row may.
        trusted: Whether it may set all keys of the environment.

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
