"""Results of a run: a figure by its path, the results of one branch, and ``Run``, all that the folder of a trial tells.

Whatever is there is of use: half a file, a line, or nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rllib_nlac.diagnostics.notices import NOTICES

Result = TypeVar("Result", bound=Mapping[str, Any])
Results = Mapping[str, Any]  # of an iteration, nested
DERIVED = ("policies", "simple_optimizer")  # RLlib sets them itself
RETURN, SUCCESS = "episode_return_mean", "success_rate"
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


def evaluated(result: Results) -> float | None:
    """Success in the evaluation of this very iteration, which RLlib's own algorithms repeat later; None without one."""
    success = lookup(result, f"evaluation/env_runners/{SUCCESS}") if has_evaluation(result) else None
    return None if isinstance(success, float) and math.isnan(success) else success


def has_evaluation(result: Results) -> bool:
    """Whether this very iteration was evaluated."""
    interval, iteration = lookup(result, "config/evaluation_interval"), result.get("training_iteration", 0)
    if not isinstance(interval, int) or not isinstance(iteration, int) or interval < 1:
        return False
    return iteration % interval == 0 and "evaluation" in result


@dataclass(frozen=True)
class Setting:
    """A key of the configuration that differs from the algorithm's default.

    Attributes:
        key: Its name.
        value: In the run.
        default: The algorithm's.
    """

    key: str
    value: Any
    default: Any


@dataclass(frozen=True)
class Run:
    """A trial as its folder tells of it.

    Attributes:
        folder: The trial's.
        algorithm: Name of the algorithm.
        results: An iteration each, in their order; what a resumed run repeats counts once.
        settings: What differs from the algorithm's defaults.
        examples: Lines of the record that the report shows, by their kinds; see ``reporting.transitions``.
        end: "done", "failed" or "interrupted".
        error: Why it failed, in brief; empty where it did not.
        restored: The checkpoint that it began with, if any.
        checkpoint: The last one that it wrote, if any.
        unreadable: Lines of its results that could not be read.
    """

    folder: Path
    algorithm: str
    results: Sequence[Results] = ()
    settings: Sequence[Setting] = ()
    examples: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    end: str = "done"
    error: str = ""
    restored: str | None = None
    checkpoint: str | None = None
    unreadable: int = 0

    @property
    def num_iterations(self) -> int:
        """Iterations that trained; the evaluation before them is none."""
        return sum(figure(r, "training_iteration") > 0 for r in self.results)

    @property
    def last(self) -> Results:
        """The results of the last iteration; empty where there is none."""
        return self.results[-1] if self.results else {}

    @property
    def config(self) -> Results:
        """As the run had it."""
        config = self.last.get("config")
        return config if isinstance(config, Mapping) else {}

    @cached_property
    def evaluated(self) -> list[Results]:
        """The results of the iterations that were evaluated, success or return known."""
        return [r for r in self.results if has_evaluation(r) and not math.isnan(figure(r, f"evaluation/{self.score}"))]

    @cached_property
    def score(self) -> str:
        """What is measured: success where the environment speaks of it, or else the return."""
        success = any(
            not math.isnan(figure(r, path))
            for r in self.results
            for path in (f"evaluation/env_runners/{SUCCESS}", f"env_runners/{SUCCESS}")
        )
        return f"env_runners/{SUCCESS if success else RETURN}"

    @property
    def measures_success(self) -> bool:
        """Whether the score is a share."""
        return self.score.endswith(SUCCESS)

    def progress(self, result: Results) -> float:
        """How far training was: episodes, or iterations where it plays none."""
        return figure(result, "env_runners/num_episodes_lifetime" if self.plays else "training_iteration")

    @cached_property
    def plays(self) -> bool:
        """Whether training plays episodes; learning from logs alone does not."""
        return any(figure(r, "env_runners/num_episodes_lifetime") > 0 for r in self.results)

    @property
    def learns(self) -> bool:
        """Whether anything was trained; prompting alone does not, nor a run that ended before."""
        return any(r.get("learners") for r in self.results)

    @property
    def notices(self) -> list[tuple[int, str]]:
        """What the run said to a person, with the iteration."""
        return [
            (int(figure(r, "training_iteration")), line)
            for r in self.results
            if isinstance(r.get(NOTICES), str)
            for line in r[NOTICES].splitlines()
        ]

    def total(self, path: str, results: Sequence[Results] | None = None) -> float:
        """The sum of a figure over iterations, those without it left out."""
        values = [figure(r, path) for r in (self.results if results is None else results)]
        return sum(value for value in values if math.isfinite(value))


def read_results(file: Path) -> tuple[list[Results], int]:
    """The iterations of a ``result.json``, and how many of its lines are none, as the last one of a run that was killed.

    A run that went on from an earlier checkpoint repeats iterations: what it had come to before from there on is left out.
    """
    results: list[Results] = []
    unreadable = 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    for line in lines:
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            result = None
        if isinstance(result, dict) and math.isfinite(_iteration(result)):
            results.append(result)
        else:
            unreadable += 1
    return with_beginning(one_branch(results, _iteration)), unreadable


def _iteration(result: Results) -> float:
    return figure(result, "training_iteration")


def differing(config: Results, defaults: Mapping[str, Any]) -> list[Setting]:
    """The settings of a run that are not the defaults.

    Args:
        config: As a result has it, or as a user wrote it: what JSON makes of values.
        defaults: The values of the keys that count.
    """
    plain = {key: json.loads(json.dumps(value)) for key, value in defaults.items() if key not in DERIVED and _is_plain(value)}
    return [Setting(key, config[key], plain[key]) for key in sorted(plain) if key in config and config[key] != plain[key]]


def _is_plain(value: Any) -> bool:
    """Whether JSON holds it as it is; what an object looks like says nothing."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
