"""An environment that fails on time."""

from __future__ import annotations

import gymnasium as gym

from rllib_nlac.envs.spaces import TextSpace


class Faulty(gym.Env):
    """Raises in every ``fails``-th step."""

    observation_space = action_space = TextSpace()
    steps = 0

    def __init__(self, fails: int, observation="Hm."):
        self.fails, self.observation = fails, observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Go.", {}

    def step(self, action):
        Faulty.steps += 1
        if Faulty.steps % self.fails == 0:
            raise OSError("the simulator fell over")
        return self.observation, 1.0, Faulty.steps % 5 == 0, False, {}
