"""One environment and the episode that it plays; what its calls answer, errors included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.envs.answers import checked_reset, checked_step
from rllib_nlac.types import ActionForm, Generation, Message


@dataclass(frozen=True)
class Start:
    """How an episode begins.

    Attributes:
        name: The episode's id.
        task_seed: Seeds the environment's reset.
        sampling_seed: Seeds the policy.
        prefix: An episode and a number of its steps, which are played again before the policy takes over.
        turn: What is played after the prefix, in the policy's place.
        role: What the policy's turns are asked for, by which their tokens are counted.
    """

    name: str
    task_seed: int
    sampling_seed: int
    prefix: tuple[SingleAgentEpisode, int] | None = None
    turn: Generation | None = None
    role: str = "play"


@dataclass(frozen=True)
class Outcome:
    """What an environment said to an action, or at a reset: an answer, or an error."""

    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(eq=False)  # two are never the same, and a comparison would go through their dialogues
class Slot:
    """One environment and the episode that it plays. ``reset`` and ``step`` may run in a thread: they touch nothing else but
    ``asked_at``."""

    env: gym.Env[str, str]
    episode: SingleAgentEpisode | None = None
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    sampling_seed: int = 0
    num_tokens: int = 0  # generated in this episode
    role: str = "play"  # what its turns are asked for
    form: ActionForm | None = None  # what the environment offers, where the engine enforces that
    turn: str = ""  # what the environment is asked to answer
    asked_at: float | None = None  # since when the environment owes an answer, by the monotonic clock

    def reset(self, start: Start) -> Outcome:
        """Resets the environment to the task of an episode."""
        return self._timed(self._reset, start)

    def step(self, action: str) -> Outcome:
        """Steps the environment."""
        return self._timed(self._step, action)

    def _timed(self, call: Callable[[Any], Outcome], argument: Any) -> Outcome:
        self.asked_at = time.monotonic()
        outcome = _caught(call, argument)
        self.asked_at = None
        return outcome

    def _reset(self, start: Start) -> Outcome:
        observation, info = checked_reset(self.env.reset(seed=start.task_seed))
        return Outcome(_as_text(observation), info=info)

    def _step(self, action: str) -> Outcome:
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action))
        return Outcome(_as_text(observation), reward, terminated, truncated, info)


class Played(NamedTuple):
    """A turn that was played.

    Attributes:
        slot: Where.
        generation: The turn.
        outcome: What the environment said to it.
    """

    slot: Slot
    generation: Generation
    outcome: Outcome


def _caught(call: Callable[[Any], Outcome], argument: Any) -> Outcome:
    """What a call of an environment gives, or the error that it raises.

    Ray leaves the first frame of a traceback out where it brings it to another process: this one, not the call's.
    """
    try:
        return call(argument)
    except (Exception, SystemExit) as error:
        return Outcome(error=error)


def _as_text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"the observation must be a str, and it is a {type(observation).__name__}")
    return observation
