"""The environment of a run that learns from logged dialogues alone: it has text spaces, and nobody can play it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from rllib_nlac.envs.spaces import TextSpace


class LoggedDialogues(gym.Env[str, str]):
    """No environment: training rests on ``input_`` alone."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = self.action_space = TextSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        raise RuntimeError("logged dialogues cannot be played: set 'env' to collect episodes or to evaluate")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("logged dialogues cannot be played: set 'env' to collect episodes or to evaluate")
