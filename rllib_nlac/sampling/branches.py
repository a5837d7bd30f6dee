"""Branches: episodes that repeat the first steps of another one, and in which the policy goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_nlac.episode import task_seed_of
from rllib_nlac.sampling.slot import Start

Prefix = tuple[SingleAgentEpisode, int]  # an episode and the number of its steps that are played again


def play_branches(
    prefixes: Sequence[Prefix],
    count: int,
    rng: np.random.Generator,
    play: Callable[[Sequence[Start]], Sequence[SingleAgentEpisode]],
) -> list[list[SingleAgentEpisode]]:
    """Lets the policy go on after each prefix, ``count`` times.

    Args:
        prefixes: Prefixes of episodes with different ids.
        count: Branches of each prefix.
        rng: Draws what the policy samples with.
        play: Plays them, as ``TextEnvRunner.play_forks`` does, in any order.

    Returns:
        For each prefix its branches, whole episodes from the first step on; fewer where one was lost, or where the
        environment answered the prefix otherwise.
    """
    starts = [
        [
            Start(
                f"{episode.id_}/{steps}/{number}",
                task_seed_of(episode),
                int(rng.integers(1 << 31)),
                (episode, steps),
                role="branches",
            )
            for number in range(count)
        ]
        for episode, steps in prefixes
    ]
    every = [start for own in starts for start in own]
    played = {episode.id_: episode for episode in play(every)} if every else {}
    return [[played[start.name] for start in own if start.name in played] for own in starts]
