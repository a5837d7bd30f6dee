"""Checks what an experiment file asks of Tune, which itself drops, or waits for ever on, much that is wrong.

Keys, limits and metrics are checked before a run; whether results hold the metrics, as soon as the first results come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import Callback, CheckpointConfig

from rllib_nlac.command.search import ExperimentError
from rllib_nlac.names import nearest, unknown_key

# Parts of a result that may come later than the first: before learning starts, before the first evaluation.
LATER = ("evaluation", "learners", "env_runners", "replay_buffer", "fault_tolerance")
# Counters only rise from 0, so that a limit of 0 or less would end a run before it began.
COUNTERS = ("training_iteration", "iterations_since_restore", "time_total_s", "time_since_restore", "timesteps_total")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_samples": (lambda v: _is_int(v) and (v >= 1 or v == -1), "must be at least 1, or -1 for no end (with time_budget_s)"),
    "max_failures": (lambda v: _is_int(v) and v >= -1, "must be at least 0, or -1 for no end"),
    "time_budget_s": (lambda v: _is_number(v) and v > 0, "must be a number of seconds above 0"),
    "max_concurrent_trials": (lambda v: _is_int(v) and v >= 1, "must be at least 1"),
    "metric": (lambda v: isinstance(v, str) and bool(v), "must be a result's path, as in evaluation/env_runners/success_rate"),
    "mode": (lambda v: v in ("max", "min"), "must be max or min"),
    "storage_path": (lambda v: isinstance(v, str) and bool(v), "must be a folder or a URI"),
    "loggers": (lambda v: isinstance(v, Mapping), "must be a mapping, as in {wandb: {project: nlac}}"),
    "checkpoint_config": (lambda v: isinstance(v, Mapping), "must be a mapping, as in {checkpoint_at_end: true}"),
    "stop": (lambda v: isinstance(v, Mapping), "must be a mapping, as in {training_iteration: 8}"),
    "config": (lambda v: isinstance(v, Mapping), "must be a mapping of the algorithm's keys"),
}
_CHECKPOINT_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_to_keep": (lambda v: _is_int(v) and v >= 1, "must be at least 1"),
    "checkpoint_frequency": (lambda v: _is_int(v) and v >= 0, "must be a number of iterations, or 0 for none"),
    "checkpoint_at_end": (lambda v: isinstance(v, bool), "must be true or false"),
    "checkpoint_score_attribute": (lambda v: isinstance(v, str) and bool(v), "must be a result's path"),
    "checkpoint_score_order": (lambda v: v in ("max", "min"), "must be max or min"),
}


def check_tune_keys(given: Mapping[str, Any], where: str) -> None:
    """Checks the values of the keys beside ``config``.

    Raises:
        ExperimentError: One is of another kind, or makes no sense.
    """
    _check(given, _CHECKS, where)
    checkpoints = given.get("checkpoint_config") or {}
    for key in checkpoints:
        if key not in CheckpointConfig.__dataclass_fields__:
            raise ExperimentError(f"{where}, checkpoint_config: {unknown_key(key, CheckpointConfig.__dataclass_fields__)}")
    _check(checkpoints, _CHECKPOINT_CHECKS, f"{where}, checkpoint_config")
    for key in checkpoints.keys() - _CHECKPOINT_CHECKS.keys():
        raise ExperimentError(f"{where}, checkpoint_config: Tune no longer takes {key!r}; leave it out")
    if given.get("num_samples") == -1 and not given.get("time_budget_s"):
        raise ExperimentError(f"{where}: num_samples is -1, which never ends: give a number, or time_budget_s too")
    if given.get("mode") and not given.get("metric"):
        raise ExperimentError(f"{where}: mode is {given['mode']!r}, and there is no metric that it is about: add 'metric'")


def check_stop(stop: Mapping[str, Any], where: str) -> None:
    """Checks the limits at which a trial stops.

    Raises:
        ExperimentError: A limit is no number, or reached before anything begins.
    """
    for key, limit in stop.items():
        if not isinstance(key, str):
            raise ExperimentError(f"{where}, stop: {key!r} must be the path of a result, as in training_iteration")
        if isinstance(limit, Mapping):
            inner = next(iter(limit), "...")
            raise ExperimentError(f"{where}, stop: write nested results as one path, as in '{key}/{inner}: ...'")
        if not _is_number(limit):
            raise ExperimentError(f"{where}, stop: {key} is {limit!r} and must be a finite number")
        if limit <= 0 and (key in COUNTERS or key.endswith("_lifetime")):
            raise ExperimentError(f"{where}, stop: {key} is {limit!r} and must be above 0")


def check_metrics(metrics: Iterable[tuple[str, str]], config: Mapping[str, Any], where: str) -> None:
    """Says before a run which of its metrics cannot come.

    Args:
        metrics: Pairs of the key that names a metric, and its path in the results.
        config: The algorithm's configuration as given.
        where: What errors call the experiment.

    Raises:
        ExperimentError: A metric is one of evaluation, and there is no evaluation; or of play, and nothing is played.
    """
    for key, metric in metrics:
        if metric.startswith("evaluation/") and not config.get("evaluation_interval"):
            raise ExperimentError(f"{where}, {key}: {metric!r} needs evaluation; set evaluation_interval in config")
        is_of_play = metric.startswith("env_runners/") or metric == NUM_ENV_STEPS_SAMPLED_LIFETIME
        if is_of_play and config.get("env") is None:  # and so input_, or it is refused elsewhere
            raise ExperimentError(
                f"{where}, {key}: {metric!r} never comes of logged dialogues alone; use training_iteration or evaluation/..."
            )


class MetricCheck(Callback):
    """Ends a run that asks for a metric which no result ever has: it would go on for ever.

    Args:
        metrics: Pairs of the key that names a metric, and its path in the results, as in ``env_runners/success_rate``.
        where: What errors call the experiment.
    """

    def __init__(self, metrics: Iterable[tuple[str, str]], where: str) -> None:
        self._metrics = list(metrics)
        self._where = where
        self.problem: str | None = None

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        """Raises at the first result that shows a metric to be missing; Tune then ends the run."""
        for key, metric in list(self._metrics):
            found = find_metric(result, metric)
            if found is True:
                self._metrics.remove((key, metric))
            elif isinstance(found, str):
                self.problem = f"{self._where}, {key}: no result has {metric!r}; {found}"
                raise ExperimentError(self.problem)


def find_metric(result: Mapping[str, Any], metric: str) -> bool | str:
    """Looks for a metric in a result.

    Returns:
        True where it is there, False where it may come later, and otherwise what is there in its place.
    """
    place: Any = result
    parts = metric.split("/")
    for depth, part in enumerate(parts):
        if isinstance(place, Mapping) and part in place:
            place = place[part]
            continue
        if (depth == 0 and part in LATER) or not _is_complete(result, parts[0]):
            return False
        known = set(_paths(result))
        near = nearest(metric, known)
        beside = sorted(path for path in known if path.rpartition("/")[0] == "/".join(parts[:depth]))
        return f"did you mean {near!r}?" if near else f"there are {', '.join(beside[:30])}"
    if isinstance(place, Mapping):
        return f"it is a group of them: {', '.join(f'{metric}/{name}' for name in sorted(map(str, place))[:10])}"
    return True


def _is_complete(result: Mapping[str, Any], group: str) -> bool:
    """Whether a part of a result has all that it will have: what is of episodes comes with the first that ended."""
    part = result.get(group)
    if group == "evaluation" and isinstance(part, Mapping):
        part = part.get("env_runners")
    if group not in LATER:
        return True
    if not isinstance(part, Mapping) or not part:
        return False
    if group in ("env_runners", "evaluation"):
        return bool(part.get("num_episodes") or part.get("num_episodes_lifetime"))
    return True


def _paths(result: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all numbers in a result but those of its configuration."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config":
                yield from _paths(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}"


def _check(given: Mapping[str, Any], checks: Mapping[str, tuple[Callable[[Any], bool], str]], where: str) -> None:
    for key, (is_right, complaint) in checks.items():
        if given.get(key) is not None and not is_right(given[key]):
            raise ExperimentError(f"{where}: {key} is {given[key]!r} and {complaint}")
