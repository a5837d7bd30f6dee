"""Figures in words, as the tables of a report and its lines on screen have them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rllib_nlac.diagnostics.calibration import wilson
from rllib_nlac.diagnostics.results import Results, Run, figure

EVALUATION = "evaluation/env_runners"


def iteration(result: Results) -> str:
    """Its number."""
    return f"{figure(result, 'training_iteration'):.0f}"


def when(result: Results) -> str:
    """When an evaluation was made."""
    return f"after iteration {iteration(result)}" if figure(result, "training_iteration") else "before training"


def number(value: float, digits: int = 3) -> str:
    """A figure with so many digits, "-" where there is none."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-" if math.isnan(value) else str(value)


def thousands(value: float) -> str:
    """A count."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def score(run: Run, result: Results) -> str:
    """The evaluation's, with its interval where it has one."""
    value = figure(result, f"evaluation/{run.score}")
    low, high = (figure(result, f"{EVALUATION}/success_{end}") for end in ("low", "high"))
    known = run.measures_success and not math.isnan(low)
    return f"{value:.3f} ({low:.3f} to {high:.3f})" if known else f"{value:.3f}"


def _num_scored(result: Results) -> float:
    """The episodes that success is the mean of: those that ended for a reason, those left out again. Rollouts and second
    attempts have none."""
    played = result.get("env_runners")
    counts = [value for key, value in played.items() if key.startswith("stop_reason_")] if isinstance(played, Mapping) else []
    # One that ended no episode of this iteration, and of an earlier one, is NaN.
    known = [float(value) for value in counts if isinstance(value, int | float) and math.isfinite(value)]
    if not known:
        return figure(result, "env_runners/num_episodes")
    discarded = figure(result, "env_runners/episodes_discarded")
    return sum(known) - (0.0 if math.isnan(discarded) else discarded)


def collected(run: Run, result: Results) -> str:
    """The score of the episodes of training, with the interval of so many independent ones."""
    value, count = figure(result, run.score), _num_scored(result)
    if not run.measures_success or not 0 <= value <= 1 or not 0 < count < math.inf:
        return f"{value:.3f}"
    low, high = wilson(value, count)
    return f"{value:.3f} ({low:.3f} to {high:.3f}) of {count:.0f}"
