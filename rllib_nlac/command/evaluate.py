"""``rllib evaluate``: restores an algorithm from a checkpoint and lets it play."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

import rllib_nlac
from rllib_nlac.activity import EPISODES, activity
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.evaluation import success_metrics
from rllib_nlac.algorithm.logs import LOGGED
from rllib_nlac.checkpoints.checkpoint import is_ours, opened
from rllib_nlac.command.errors import running
from rllib_nlac.command.run import start_ray
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.nlac import NLAC
from rllib_nlac.sampling.env_runner import TextEnvRunner

rllib_nlac.load()  # what a checkpoint names is looked up

MAX_RENDERED = 10


def evaluate_checkpoint(
    checkpoint: str | os.PathLike, episodes: int, attempts: int, refined: bool, render: bool, terminal: Terminal, verbose: bool
) -> None:
    """Restores an algorithm, ours or any of RLlib's, plays and prints; the checkpoint is a folder, or a URI.

    Raises:
        CheckpointError: The checkpoint is damaged.
        FileNotFoundError: The folder is no checkpoint.
        ValueError: The algorithm has no critic in words to refine with, or the episodes are no whole number of tasks.
        RunFailed: Something failed while it played.
    """
    if episodes % attempts:
        fewer = max(episodes // attempts, 1) * attempts
        raise ValueError(
            f"--episodes {episodes} is no multiple of --attempts {attempts}, and counts the attempts of all tasks: "
            f"take {fewer} or {fewer + attempts}"
        )
    ours = is_ours(str(checkpoint))
    if not ours and not (Path(checkpoint) / "rllib_checkpoint.json").is_file():
        raise FileNotFoundError(
            f"{checkpoint} is no checkpoint: it has no rllib_checkpoint.json. Checkpoints are the folders checkpoint_000... "
            "of a trial; training writes them with 'checkpoint_config: {checkpoint_at_end: true}'"
        )
    algorithm: Algorithm | None = None
    try:
        with opened(checkpoint) if ours else nullcontext() as verified:  # refused before Ray starts
            activity.turn_to("starting Ray")
            start_ray(verbose)
            activity.turn_to("loading the checkpoint")
            folder = verified.folder if verified else Path(checkpoint).absolute()
            algorithm = Algorithm.from_checkpoint(str(folder))
            activity.turn_to("")
        runner = evaluation_runner(algorithm)
        if runner is None:
            raise ValueError(
                f"{checkpoint} was trained on logged dialogues without an environment: train with evaluation_interval and "
                "evaluation_config: {env: ...}, or export the model and evaluate it with run: ReAct"
            )
        if refined and (obstacle := obstacle_to_refining(algorithm)):
            raise ValueError(f"{type(algorithm).__name__} {obstacle}: leave out --refined")
        if attempts > 1 and not isinstance(runner, TextEnvRunner):
            raise ValueError(f"{runner.config.env} is no environment of text, and has no tasks to repeat: leave out --attempts")
        with running():
            if isinstance(runner, TextEnvRunner):
                with activity.stage("playing", episodes, EPISODES):
                    played = runner.sample_tasks(range(episodes // attempts), attempts, refined)
            else:
                if getattr(runner, "env", None) is None:  # RLlib's algorithms make none here where they have remote runners
                    runner.make_env()
                with activity.stage("playing"):
                    played = runner.sample(num_episodes=episodes, explore=False)
            if not played:
                raise RuntimeError("every episode was lost to its environment; the warnings (--verbose) say why")
        if render:
            for episode in played[:MAX_RENDERED]:
                terminal.say(dialogue(episode))
        title = f"{type(algorithm).__name__} on {runner.config.env}{', one refinement a turn' if refined else ''}"
        terminal.rows([*summary(played).items()], title=title)
    finally:
        if algorithm is not None:
            algorithm.stop()
        ray.shutdown()


def evaluation_runner(algorithm: Algorithm) -> Any:
    """The runner of this process that plays as the run's evaluations do, by ``evaluation_config`` where there is one; None
    where a run of logged dialogues alone has none.
    """
    group = algorithm.eval_env_runner_group
    if group is None or group.local_env_runner is None:
        return None if algorithm.config.env == LOGGED else algorithm.env_runner
    if not isinstance(algorithm, LanguageAlgorithm):  # whose runners ask its engine; RLlib syncs before each evaluation
        group.sync_weights(from_worker_or_learner_group=algorithm.learner_group, inference_only=True)
    return group.local_env_runner


def obstacle_to_refining(algorithm: Algorithm) -> str:
    """Why a turn cannot be criticised before it is played; empty where it can."""
    if not getattr(algorithm.config, "criticises_in_words", False):
        return "has no critic in words to refine with"
    if not isinstance(algorithm, NLAC):
        return ""
    if not algorithm.variant.predicts:
        return "reads what really came, which nobody knows while a game is played"
    reason = algorithm.variant.unrefined_because
    return f"cannot: {reason}" if reason else ""


def summary(episodes: Sequence[SingleAgentEpisode]) -> Mapping[str, str]:
    """Success with its interval, where the environment speaks of success, then return and length."""
    returns = np.array([episode.get_return() for episode in episodes])
    rows = {"episodes": str(len(episodes))}
    if all("success" in episode.get_infos(-1) for episode in episodes):
        metrics = success_metrics(episodes)
        low, high = metrics["success_low"], metrics["success_high"]
        interval = "" if np.isnan(low) else f"   (95 % interval {low:.3f} to {high:.3f})"  # of one task there is none
        rows["success"] = f"{metrics['success_rate']:.3f}{interval}"
        rows |= {name.replace("_at_", "@"): f"{value:.3f}" for name, value in metrics.items() if "_at_" in name}
    rows["return"] = f"{returns.mean():.3f} ± {returns.std():.3f}"
    rows["length"] = f"{np.mean([len(episode) for episode in episodes]):.2f} steps"
    return rows


def dialogue(episode: SingleAgentEpisode) -> str:
    """An episode as a person reads it."""
    lines = [f"── {episode.id_} ──", f"environment: {episode.get_observations(0)}"]
    for t, action in enumerate(episode.get_actions()):
        lines += [f"agent:       {action}", f"environment: {episode.get_observations(t + 1)}"]
    info = episode.get_infos(-1)
    lines.append(f"return {episode.get_return():g}, {info.get('stop_reason', 'ended')}\n")
    return "\n".join(lines)
