"""Plays a checkpoint's policy, ours or any RLlib algorithm's, and reports what it reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from rich.console import Console

import rllib_nlac  # noqa: F401 - registers NLAC and the environments
from rllib_nlac.checkpoint import MANIFEST, read_manifest
from rllib_nlac.progress import evaluation_table
from rllib_nlac.sampling.env_runner import TextEnvRunner, episode_success

MAX_RENDERED = 10


def evaluate_checkpoint(checkpoint: Path, episodes: int, render: bool, console: Console, verbose: bool) -> None:
    """Restores an algorithm, plays and prints.

    Raises:
        FileNotFoundError: The folder is no checkpoint.
    """
    if not (checkpoint / "rllib_checkpoint.json").is_file():
        raise FileNotFoundError(
            f"{checkpoint} is no checkpoint: it has no rllib_checkpoint.json. Checkpoints are the folders checkpoint_000... "
            "of a trial; training writes them with 'checkpoint_config: {checkpoint_at_end: true}'"
        )
    if (checkpoint / MANIFEST).is_file():
        read_manifest(checkpoint)
    import ray

    from rllib_nlac.cli import start_ray

    start_ray(verbose)
    algorithm = Algorithm.from_checkpoint(str(checkpoint.absolute()))
    try:
        runner = algorithm.env_runner
        if isinstance(runner, TextEnvRunner):
            runner.begin_evaluation()
        played = runner.sample(num_episodes=episodes, explore=False)
        if render:
            for episode in played[:MAX_RENDERED]:
                console.print(dialogue(episode), highlight=False, markup=False)
        console.print(evaluation_table(f"{type(algorithm).__name__} on {algorithm.config.env}", summary(played)))
    finally:
        algorithm.stop()
        ray.shutdown()


def summary(episodes: Sequence[SingleAgentEpisode]) -> dict[str, str]:
    """Success with its interval, where the environment speaks of success, then return and length."""
    returns = np.array([episode.get_return() for episode in episodes])
    rows = {"episodes": str(len(episodes))}
    if all("success" in episode.get_infos(-1) for episode in episodes):
        won = sum(episode_success(episode) for episode in episodes)
        low, high = wilson_interval(won, len(episodes))
        rows["success"] = f"{won / len(episodes):.3f}   (95 % interval {low:.3f} to {high:.3f})"
    rows["return"] = f"{returns.mean():.3f} ± {returns.std():.3f}"
    rows["length"] = f"{np.mean([len(episode) for episode in episodes]):.2f} steps"
    return rows


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a success rate, which stays within [0, 1] also near its ends."""
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return centre - half, centre + half


def dialogue(episode: SingleAgentEpisode) -> str:
    """An episode as a person reads it."""
    lines = [f"── {episode.id_} ──", f"environment: {episode.get_observations(0)}"]
    for t, action in enumerate(episode.get_actions()):
        lines += [f"agent:       {action}", f"environment: {episode.get_observations(t + 1)}"]
    info = episode.get_infos(-1)
    lines.append(f"return {episode.get_return():g}, {info.get('stop_reason', 'ended')}\n")
    return "\n".join(lines)
