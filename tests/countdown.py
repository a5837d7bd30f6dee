"""An environment of short episodes of unequal length, and runners that play it."""

from __future__ import annotations

import gymnasium as gym
from scripted_engine import ScriptedEngine

from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.sampling.env_runner import TextEnvRunner


class Countdown(gym.Env[str, str]):
    """Ends after as many replies as its task says, one to four; only episodes of an even number succeed."""

    observation_space = action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.integers(1, 5))
        return f"{self.length} to go.", {"system_prompt": "Count."}

    def step(self, action):
        self.left -= 1
        info = {"success": self.length % 2 == 0, "stop_reason": f"after_{self.length}", "subgoals": {"two": self.length >= 2}}
        return f"{self.left} to go.", 0.5, self.left == 0, False, {} if self.left else info


def runner_of(config, chat, answer=lambda prompt, weights: "ok", env=Countdown, kind=TextEnvRunner, **settings):
    """A runner of three environments with a scripted policy, whose configuration has these settings."""
    own = config.copy(copy_frozen=False)
    own.num_envs_per_env_runner = 3
    for key, value in settings.items():
        setattr(own, key, value)
    runner = kind(config=own, worker_index=0, env_creator=lambda context: env())
    runner.attach(ScriptedEngine(chat, answer))
    return runner
