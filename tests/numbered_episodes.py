"""Episodes whose texts say which they are."""

from __future__ import annotations

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.episode import GENERATION, MESSAGES
from rllib_nlac.types import Generation, Message


def episode(number: int, length: int = 4, truncated: bool = False, text: str = "q") -> SingleAgentEpisode:
    result = SingleAgentEpisode(id_=f"episode-{number}")
    result.add_env_reset("Go.", {"task_id": str(number)})
    messages = (Message("user", "Go."),)
    for t in range(length):
        last = t == length - 1
        action, reply = f"{text}{number}.{t}", f"reply {number}.{t}"
        generation = Generation((1, 2, 3), (4, t), np.zeros(2, np.float32), True, number)
        result.add_env_step(
            reply,
            action,
            float(last),
            {"success": last and not truncated if last else None},
            terminated=last and not truncated,
            truncated=last and truncated,
            extra_model_outputs={GENERATION: generation, MESSAGES: messages},
        )
        messages = (*messages, Message("assistant", action), Message("user", reply))
    return result
