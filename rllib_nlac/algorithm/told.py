"""What a run has told of its iterations, as a reader takes it up: a figure by its path, and the results of one branch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result", bound=Mapping[str, Any])
BEFORE = "before_training"  # key of the first result: the evaluation of what the run began with
RESULTS = "result.json"  # Tune's, in a trial's folder, a line an iteration
#: What a person calls the critic's roles, and the key that limits each one's tokens.
ROLES = {
    "future": ("critic's futures", "max_future_tokens"),
    "target": ("critic's Bellman targets", "max_future_tokens"),
    "critique": ("critic's critiques", "max_critique_tokens"),
    "refinement": ("refined actions", "max_action_tokens"),
}
WITH_FORM = ("future", "target", "critique")  # roles whose answers have a form that an engine can enforce


def lookup(results: Mapping[str, Any], path: str) -> Any:
    """A value of nested results by its path, as in ``env_runners/success_rate``; None where there is none."""
    value: Any = results
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def figure(results: Mapping[str, Any], path: str) -> float:
    """A number of nested results by its path, NaN where there is none."""
    try:
        return float(lookup(results, path))
    except (TypeError, ValueError, OverflowError):
        return math.nan


def with_beginning(results: Sequence[Result]) -> list[Any]:
    """The results, and before them the evaluation of what the run began with as one of iteration 0, where there is one."""
    first = results[0] if results else {}
    if not isinstance(first.get(BEFORE), Mapping):
        return list(results)
    begun = {"training_iteration": 0, "evaluation": first[BEFORE], "env_runners": {"num_episodes_lifetime": 0}}
    return [{**begun, "config": first.get("config")}, *results]


def largest_k(repeated: Any) -> int | None:
    """The largest k above 1 of pass@k, in the results of tasks that are attempted several times; None where there is none."""
    names = repeated if isinstance(repeated, Mapping) else ()
    tails = [name.removeprefix("pass_at_") for name in names if name.startswith("pass_at_")]
    return max((k for tail in tails if tail.isdecimal() and (k := int(tail)) > 1), default=None)


def one_branch(results: Iterable[Result], number: Callable[[Result], float]) -> list[Result]:
    """The results, as they were written, without what a run had come to before it went on from a checkpoint of another time.

    That is an earlier one of its own, or one of another trial, as under population-based training.

    Args:
        results: In the order in which they were written.
        number: The iteration of a result.
    """
    kept: list[Result] = []
    for result in results:
        while kept and number(kept[-1]) >= number(result):
            kept.pop()
        if kept and _is_anothers(result, kept[-1]):
            kept.clear()
        kept.append(result)
    return kept


def _is_anothers(result: Mapping[str, Any], former: Mapping[str, Any]) -> bool:
    """Whether a result is the first after a restore from another trial: then the time until then is not the former's."""
    if figure(result, "iterations_since_restore") != 1:
        return False
    before, then = figure(result, "time_total_s") - figure(result, "time_this_iter_s"), figure(former, "time_total_s")
    return abs(before - then) > 1e-6 * max(then, 1.0)
