"""The text space of every environment: any string up to a length.

``gymnasium.spaces.Text`` contains neither spaces nor the empty string by default, and a full Unicode charset makes it
slow to build and pickle. Membership here depends on the type and the length alone.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

MAX_TEXT_LENGTH = 1_000_000


class TextSpace(gym.spaces.Text):
    """Contains every ``str`` of at most ``max_length`` characters, the empty one included.

    A subclass of ``Text`` rather than of ``Space``, because RLlib serialises only the spaces it knows.

    Args:
        max_length: The longest string contained, in characters.
        seed: Seeds ``sample()``, which draws short strings of ASCII letters and spaces.
    """

    def __init__(self, max_length: int = MAX_TEXT_LENGTH, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length=max_length, min_length=0, charset="abcdefghijklmnopqrstuvwxyz ?.", seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(0, min(self.max_length, 40) + 1))
        letters = self.np_random.choice(list(self.characters), size=length)
        return "".join(letters)

    def __repr__(self) -> str:
        return f"TextSpace({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]


def check_text_env(env: gym.Env, name: Any) -> None:
    """Refuses an environment whose observations or actions are not text.

    Raises:
        ValueError: A space is not a ``gymnasium.spaces.Text``.
    """
    for kind in ("observation", "action"):
        space = getattr(env, f"{kind}_space", None)
        if not isinstance(space, gym.spaces.Text):
            raise ValueError(
                f"the environment {name!r} has the {kind} space {space}, and NLAC needs text: use "
                "rllib_nlac.envs.spaces.TextSpace for both spaces, or one of RLlib's own algorithms for this environment"
            )
