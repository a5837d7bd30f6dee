"""Evaluation: the same tasks and seeds every time, on any number of runners, several attempts each, with their intervals.

RLlib calls ``evaluate_tasks`` as its ``custom_evaluation_function``; everything else is RLlib's own evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.activity import EPISODES, activity
from rllib_nlac.diagnostics.calibration import wilson
from rllib_nlac.engine.protocol import Engine
from rllib_nlac.episode import episode_success, generations_of, task_of
from rllib_nlac.sampling.collector import MAX_LOSSES, CollectionError, CollectionRound, Rounds, WorkItem, check_age
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start

Work = Callable[[Any, Sequence[Any]], list[SingleAgentEpisode]]  # what a runner does with its share

REPEATED = "repeated"  # results of the tasks that are attempted several times, for pass@k


@dataclass(frozen=True)
class Repeats:
    """For pass@k, tasks are attempted again; each field is a key of ``evaluation_repeats``.

    Attributes:
        tasks: Number of tasks. None: sixteen, or an eighth of ``evaluation_duration`` where that is less. 0: none. Ignored
            where the policy is greedy.
        attempts: How often each of them is attempted, k.
    """

    tasks: int | None = None
    attempts: int = 4


def evaluate_tasks(algorithm: Any, group: EnvRunnerGroup | None) -> tuple[dict[str, Any], int, int]:
    """RLlib's hook: plays ``evaluation_duration`` episodes, and whatever else the config asks for.

    That is a few tasks again for pass@k, and whatever ``algorithm.watch.examine`` looks at.

    Metrics (evaluation):
        env_runners/success_rate, env_runners/success_low, env_runners/success_high: Success on fixed tasks, with a 95 %
            interval over tasks.
        env_runners/action_entropy, env_runners/token_entropy: Entropy in nats of a turn and of a token, as sampled. Near 0
            early: lower `lr`, or a higher `action_temperature`.
        repeated/pass_at_1, repeated/pass_at_2, repeated/pass_at_4: Chance that one of that many attempts at a task succeeds
            (`evaluation_repeats`).
        repeated/avg_at_4, repeated/num_tasks: Mean of the attempts, and the number of tasks.
    """
    config = algorithm.config
    own = algorithm.evaluation_config or config  # may have another temperature
    tasks = range(config.evaluation_duration)
    rounds = [(ENV_RUNNER_RESULTS, tasks, 1)]
    if own.num_repeated_tasks:
        rounds.append((REPEATED, range(own.num_repeated_tasks), own.repeats.attempts))
    steps = 0
    for key, tasks, attempts in rounds:
        again = activity.stage("evaluating again, for pass@k", len(tasks) * attempts, EPISODES)
        with again if key == REPEATED else nullcontext():
            episodes, results = play_tasks(algorithm, group, tasks, attempts)
        summary = MetricsLogger(root=False)
        entropy = action_entropy(episodes) if own.action_temperature else {}
        for name, value in {**success_metrics(episodes), **entropy}.items():
            summary.log_value(name, value, window=1)
        for result in results:
            result.pop("success_rate", None)  # a runner's own mean, which the one over all tasks replaces
        algorithm.metrics.aggregate(results, key=(EVALUATION_RESULTS, key))
        algorithm.metrics.aggregate([summary.reduce()], key=(EVALUATION_RESULTS, key))
        steps += sum(len(episode) for episode in episodes)
        if key == ENV_RUNNER_RESULTS and (examine := algorithm.watch.examine) is not None:
            examine(episodes, group)
    return {}, steps, steps


def play_tasks(
    algorithm: Any, group: EnvRunnerGroup | None, tasks: Sequence[int], attempts: int
) -> tuple[list[SingleAgentEpisode], list[Any]]:
    """Plays tasks on the runners of a group, or on the algorithm's own one.

    Returns:
        The episodes in the order of the tasks, and the runners' metrics.

    Raises:
        CollectionError: A runner reports an error, or none answers within ``evaluation_sample_timeout_s``.
    """
    work = partial(_tasks, attempts=attempts)
    episodes, metrics = on_runners(algorithm, group, tasks, work)
    if algorithm.weight_version is not None:
        check_age(episodes, algorithm.weight_version, max_staleness=0)
    return episodes, metrics


def play_forks(algorithm: Any, group: EnvRunnerGroup | None, starts: Sequence[Start]) -> list[SingleAgentEpisode]:
    """Plays episodes that begin with the first turns of others, on the same runners; see ``TextEnvRunner.play_forks``."""
    return on_runners(algorithm, group, starts, TextEnvRunner.play_forks)[0]


def on_runners(
    algorithm: Any, group: EnvRunnerGroup | None, items: Sequence[Any], work: Work
) -> tuple[list[SingleAgentEpisode], list[Any]]:
    """Divides items among the runners of a group, or gives all of them to the algorithm's own runner.

    Returns:
        The episodes in the order of their names, and the runners' metrics.

    Raises:
        CollectionError: A runner reports an error, or none answers within ``sample_timeout_s``, of the runners of an evaluation
            ``evaluation_sample_timeout_s``.
    """
    if group is None or not group.num_remote_env_runners():
        runner = group.local_env_runner if group is not None else algorithm.env_runner
        return work(runner, items), [runner.get_metrics()]
    shares = [tuple(items[i :: group.num_remote_env_runners()]) for i in range(group.num_remote_env_runners())]
    played, metrics = _TaskRounds(algorithm, group, work).play([share for share in shares if share])
    return sorted(played, key=lambda episode: episode.id_), metrics


class _TaskRounds(Rounds):
    """Plays tasks on the remote runners of a group."""

    def __init__(self, algorithm: Any, group: EnvRunnerGroup, work: Work) -> None:
        restore = partial(algorithm.restore_env_runners, group)
        key = "sample_timeout_s" if group is algorithm.env_runner_group else "evaluation_sample_timeout_s"
        super().__init__(group, restore, getattr(algorithm.config, key), key)
        self._engine = algorithm.engine
        self._work = work

    def play(self, shares: list[tuple[Any, ...]]) -> tuple[list[SingleAgentEpisode], list[Any]]:
        """The episodes, in any order, and the runners' metrics."""
        current = CollectionRound([WorkItem(tasks) for tasks in shares])
        self._rounds.append(current)
        self.finish(current)
        return current.results(), current.metrics()

    @override(Rounds)
    def request(self, runner: int, item: WorkItem) -> Callable[[Any], tuple[Any, Any, int]]:
        return partial(_play, engine=self._engine, items=item.content, work=self._work)

    @override(Rounds)
    def after_loss(self, runner: int, item: WorkItem) -> list[WorkItem]:
        """Two halves of its share, so that a task that ends its runner's process is soon found alone."""
        tasks = item.content
        if len(tasks) == 1 and len(item.lost_by) >= MAX_LOSSES:
            what = getattr(tasks[0], "name", tasks[0])
            raise CollectionError(
                f"the processes of {', then of '.join(item.lost_by)} ended, one after the other, while they played task "
                f"{what}. Its environment ends the process (os._exit, a crash of native code), or memory is short: "
                "see the system's log"
            )
        half = (len(tasks) + 1) // 2
        return [replace(item, content=part) for part in (tasks[:half], tasks[half:]) if part]


def _play(runner: Any, engine: Engine | None, items: Sequence[Any], work: Work) -> tuple[list[SingleAgentEpisode], Any, int]:
    with runner.lent(engine) if engine is not None else nullcontext():
        return work(runner, items), runner.get_metrics(), 0


def _tasks(runner: Any, tasks: Sequence[int], attempts: int) -> list[SingleAgentEpisode]:
    return runner.sample_tasks(tasks, attempts)


def success_metrics(episodes: Sequence[SingleAgentEpisode]) -> dict[str, float]:
    """Success over tasks: its mean with a 95 % interval, avg@k and the pass@j of k attempts. NaN where all episodes were lost:
    a checkpoint that is kept by it needs a score, or Tune takes it for the best."""
    if not episodes:
        return {**dict.fromkeys(("success_rate", "success_low", "success_high"), math.nan), "num_tasks": 0}
    table = success_table(episodes)
    attempts = table.shape[1]
    low, high = success_interval(table)
    metrics = {"success_rate": float(table.mean()), "success_low": low, "success_high": high, "num_tasks": len(table)}
    if attempts > 1:
        metrics[f"avg_at_{attempts}"] = float(table.mean())
        metrics |= {f"pass_at_{j}": pass_at(table, j) for j in {*_powers_of_two(attempts), attempts}}
    return metrics


def success_table(episodes: Sequence[SingleAgentEpisode]) -> np.ndarray:
    """Successes, 1 or 0, shape (tasks, attempts); a task that lost an attempt to its environment loses the others too."""
    by_task: dict[int | str, list[bool]] = {}
    for episode in episodes:
        by_task.setdefault(task_of(episode), []).append(episode_success(episode))
    attempts = max(map(len, by_task.values()))
    return np.array([row for row in by_task.values() if len(row) == attempts], float)


def pass_at(table: np.ndarray, j: int) -> float:
    """Unbiased estimate of the chance that one of j attempts succeeds, from k >= j attempts a task (arXiv 2107.03374)."""
    k = table.shape[1]
    return float(np.mean([1 - math.comb(k - int(wins), j) / math.comb(k, j) for wins in table.sum(axis=1)]))


def success_interval(table: np.ndarray) -> tuple[float, float]:
    """The 95 % Wilson interval of the success rate, with tasks as the unit.

    Attempts of one task are not independent, so the variance is that of the tasks' means, and Wilson's sample size is the
    number of independent attempts that would give the same: at least the number of tasks, at most that of all attempts.
    Unlike a bootstrap it is no point where every task is won or lost.

    Args:
        table: Successes, 1 or 0, shape (tasks, attempts).

    Returns:
        Low and high; NaN for a single task.
    """
    tasks, mean = len(table), float(table.mean())
    if tasks < 2:
        return float("nan"), float("nan")
    variance, of_one = float(table.mean(axis=1).var(ddof=1)), mean * (1 - mean)
    size = float(np.clip(tasks * of_one / max(variance, 1e-12), tasks, table.size))
    return wilson(mean, size)


def action_entropy(episodes: Sequence[SingleAgentEpisode]) -> dict[str, float]:
    """The policy's entropy as its own samples tell it, in nats: -log p of a sampled turn is an unbiased estimate of it.

    Args:
        episodes: Whose turns were sampled at a temperature above 0, with their log-probabilities.

    Returns:
        ``action_entropy``, the mean of a whole turn, and ``token_entropy``, that of a token; nothing where an engine behind an
        endpoint told no log-probabilities.
    """
    turns = [g.logprobs for episode in episodes for g in generations_of(episode) if len(g.token_ids) == len(g.logprobs)]
    known = [logprobs for logprobs in turns if len(logprobs) and np.isfinite(logprobs).all()]
    if not known:
        return {}
    surprise = np.array([-float(logprobs.sum()) for logprobs in known])
    return {
        "action_entropy": float(surprise.mean()),
        "token_entropy": float(surprise.sum() / sum(map(len, known))),
    }


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]
