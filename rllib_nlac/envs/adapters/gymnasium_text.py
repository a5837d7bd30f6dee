"""Any gymnasium environment by its id: text or a named action in; text, a number, a field of a dict or a description out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from rllib_nlac.envs.base import check_number
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.names import attribute_of

WORDED = (gym.spaces.Text, gym.spaces.Discrete)  # observations that need no function to word them


class GymnasiumText(gym.Env[str, str]):
    """Any gymnasium environment by its id, with text or discrete observations and actions.

    Args:
        id: As ``gymnasium.make`` takes it: "Name-v0", or "module:Name-v0" to import the module first.
        kwargs: Further arguments of ``gymnasium.make``.
        system_prompt: What the agent is told first, where the environment's info has no ``system_prompt``. Default: the list
            of the actions, where they are discrete.
        observation_key: The field with the text, where observations are dicts.
        describe: Words an observation: a function of the observation, or its place, ``my_module:my_function``. Without it, a
            text is shown as it is and a discrete observation as its number.
        actions: Names of the actions of a discrete action space, in its order, each with a letter or digit. Default: their
            numbers. A text that names none of them, or several, is answered with the list and changes nothing. Of "go" and
            "go back", "go back" names one.
        max_turns: The agent's turns per episode, those that named no action included.
        success_return: Return from which an episode counts as a success, where the info has no ``success``.

    Raises:
        ValueError: There is no such environment, its spaces are neither text nor described by these arguments, or
            ``max_turns`` is no whole number of at least 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        observation_key: str | None = None,
        describe: str | Callable[[Any], str] | None = None,
        actions: Sequence[str] | None = None,
        max_turns: int = 200,
        success_return: float = 1.0,
    ) -> None:
        check_number("max_turns", max_turns, 1, whole=True)
        try:
            self.inner = gym.make(id, **dict(kwargs or {}))
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"env_config.id {id!r}: {type(error).__name__}: {error}") from error
        self.observation_space = self.action_space = TextSpace()
        self._key, self._success_return = observation_key, success_return
        if isinstance(describe, str):
            describe = attribute_of(describe, "env_config.describe", "my_module:my_function")
        self._describe: Any = describe
        acted = self.inner.action_space
        numbers = range(acted.start, acted.start + acted.n) if isinstance(acted, gym.spaces.Discrete) else range(0)
        actions = list(map(str, numbers)) if actions is None else actions
        if wrong := [name for name in actions if not isinstance(name, str)]:
            raise ValueError(
                f"env_config.actions has {wrong[0]!r}, and a name is a text: YAML reads yes, no, on, off and 1 "
                "as texts in quotes alone"
            )
        self._actions = {name.lower(): number for number, name in enumerate(actions, start=numbers.start)}
        if nameless := [name for name in self._actions if not _words(name)]:
            raise ValueError(f"env_config.actions has {nameless[0]!r}, and a name needs a letter or digit")
        if alike := _alike(self._actions):
            raise ValueError(
                f"env_config.actions: {' and '.join(map(repr, alike))} have the same words, and nobody could say which"
            )
        self._choices = f"Say one of: {', '.join(self._actions)}." if self._actions else ""
        self._prompt = system_prompt or self._choices
        self.max_turns, self._turn = max_turns, 0
        self._return = 0.0
        self._check(id)

    def _check(self, id: str) -> None:
        observed, acted = self.inner.observation_space, self.inner.action_space
        if self._key is not None:
            if not isinstance(observed, gym.spaces.Dict) or self._key not in observed.spaces:
                raise ValueError(f"{id} has the observations {observed}, without a field {self._key!r} (observation_key)")
            observed = observed[self._key]
        if self._describe is None and not isinstance(observed, WORDED):
            inside = observed.spaces if isinstance(observed, gym.spaces.Dict) else {}
            fields = [key for key, space in inside.items() if isinstance(space, WORDED)]
            raise ValueError(
                f"{id} has the observations {observed}, and text or a number is needed: "
                + (f"set env_config.observation_key to one of {fields}, or " if fields else "")
                + "set env_config.describe to a function of yours that words an observation, my_module:my_function"
            )
        if isinstance(acted, gym.spaces.Discrete):
            if len(self._actions) != acted.n:
                raise ValueError(f"{id} has {acted.n} actions; name them by env_config.actions, in their order")
        elif not isinstance(acted, gym.spaces.Text):
            raise ValueError(
                f"{id} has the actions {acted}, and text or discrete ones are needed: register a gymnasium.ActionWrapper of "
                "yours, whose action space is Discrete or TextSpace, under an id of its own"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self.inner.reset(seed=seed, options=options)
        self._return, self._turn = 0.0, 0
        return self._text(observation), {"system_prompt": self._prompt, **info}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        late = self._turn >= self.max_turns
        chosen: Any = action
        if self._actions:
            named = _named(action.lower(), self._actions)
            if len(named) != 1:
                info = {"success": self._return >= self._success_return} if late else {}
                told = {"system_prompt": self._prompt, **info}
                return self._choices, 0.0, False, late, told
            chosen = self._actions[named.pop()]
        observation, reward, terminated, truncated, info = self.inner.step(chosen)
        self._return += float(reward)
        truncated = bool(truncated) or (late and not terminated)
        if terminated or truncated:
            info = {"success": self._return >= self._success_return, **info}
        return (
            self._text(observation),
            float(reward),
            bool(terminated),
            bool(truncated),
            {"system_prompt": self._prompt, **info},
        )

    def _text(self, observation: Any) -> str:
        observation = observation[self._key] if self._key is not None else observation
        return str(observation if self._describe is None else self._describe(observation))

    def close(self) -> None:
        self.inner.close()


def _named(text: str, names: Iterable[str]) -> set[str]:
    """The names that a text holds word by word; where one begins as another does, the longer one."""
    words, named, at = _words(text), set(), 0
    while at < len(words):
        here = [name for name in names if words[at : at + len(_words(name))] == _words(name)]
        if not here:
            at += 1
            continue
        longest = max(here, key=lambda name: len(_words(name)))
        named.add(longest)
        at += len(_words(longest))
    return named


def _alike(names: Iterable[str]) -> list[str]:
    """The first names that have the same words."""
    by_words: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_words.setdefault(tuple(_words(name)), []).append(name)
    return next((alike for alike in by_words.values() if len(alike) > 1), [])


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() else " " for letter in text).split()
