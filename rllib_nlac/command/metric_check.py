"""Ends a run whose stop criterion, or whose scheduler's metric, no result ever has: it would go on for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ray.tune import Callback

from rllib_nlac.command.search import ExperimentError
from rllib_nlac.names import nearest

# Parts of a result that may come later than the first: before learning starts, before the first evaluation.
LATER = ("evaluation", "learners", "env_runners", "replay_buffer", "fault_tolerance")


class MetricCheck(Callback):
    """Compares the metrics that an experiment asks for with what its results hold.

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
