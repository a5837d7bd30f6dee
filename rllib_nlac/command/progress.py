"""A line an iteration that a person can follow, for any RLlib algorithm."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ray.tune import Callback

from rllib_nlac.activity import TRIALS, Doing
from rllib_nlac.command.terminal import Terminal, Waiting
from rllib_nlac.diagnostics.notices import NOTICES
from rllib_nlac.diagnostics.results import evaluated, lookup, with_beginning

COLUMNS = {
    "iter": 4,
    "episodes": 8,
    "success": 7,
    "eval": 5,
    "return": 7,
    "L1 critic": 9,
    "L2 policy": 9,
    "tokens/s": 8,
    "seconds": 7,
    "left": 6,
}
GOES_ON = ("PENDING", "RUNNING")  # a trial whose process starts is still pending
LINES_UNDER_A_HEADER = 30  # then it is repeated


class ProgressLines(Callback):
    """Prints one line for every result of every trial.

    Args:
        terminal: Where to print.
        stop: The stop criteria, for the time left.
        waiting: Says what goes on between the lines.
        num_trials: How many trials there will be; 0 where nobody knows.
    """

    def __init__(
        self, terminal: Terminal, stop: Mapping[str, Any], waiting: Waiting | None = None, num_trials: int = 1
    ) -> None:
        self._terminal = terminal
        self._waiting = waiting
        self._num_trials = num_trials
        self._stop = stop
        self._lines = 0
        self._started: dict[str, tuple[float, float]] = {}

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        """Tune calls a trial started when its process is there and has built everything; what it does until then is news."""
        if self._waiting is not None:
            active = {_folder(trial): trial.trial_id[-5:] for trial in trials if trial.status in GOES_ON}
            sweep = Doing("sweep", 0, len(trials) - len(active), self._num_trials, TRIALS)
            self._waiting.watch(active, sweep if self._num_trials != 1 else None)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._terminal.say(f"{trial} starts", "bold")

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if self._lines % LINES_UNDER_A_HEADER == 0:
            self._terminal.say(_row({name: name for name in COLUMNS}), "bold")
        self._lines += 1
        prefix = f"{trial.trial_id[-5:]} " if len(trials) > 1 else ""
        for row in with_beginning([result]):
            values = read_result(row)
            values["left"] = self._left(trial.trial_id, result) if row is result else ""
            self._terminal.say(prefix + _row({name: _show(values.get(name)) for name in COLUMNS}))
        for notice in (result.get(NOTICES) or "").splitlines():
            self._terminal.say(f"{prefix}Note: {notice}", "yellow")

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._terminal.say(f"{trial} is done.", "green")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._terminal.say(f"{trial} failed.", "red")

    def _left(self, trial_id: str, result: Mapping[str, Any]) -> str:
        """Time left, from how far the nearest stop criterion has come since the first result."""
        reached = [(_number(lookup(result, key)), _number(threshold)) for key, threshold in self._stop.items()]
        shares = [
            min(value / threshold, 1.0)
            for value, threshold in reached
            if math.isfinite(value) and math.isfinite(threshold) and threshold > 0
        ]
        if not shares:
            return "-"
        share, now = max(shares), time.monotonic()
        first_share, first_time = self._started.setdefault(trial_id, (share, now))
        if share >= 1.0:
            return "0 s"
        if share <= first_share:
            if share <= 0:
                return "-"
            iterations = (result.get("training_iteration") or 1) * (1.0 - share) / share  # not all were made in this run
            seconds = (result.get("time_this_iter_s") or 0.0) * iterations
        else:
            seconds = (now - first_time) * (1.0 - share) / (share - first_share)
        return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _folder(trial: Any) -> str:
    """The name of a trial's folder, which its process knows, too."""
    return str(trial.storage.trial_dir_name)


def read_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a result, None where an algorithm does not report one."""
    env = result.get("env_runners") or {}
    learner = (result.get("learners") or {}).get("default_policy") or {}
    return {
        "iter": result.get("training_iteration"),
        "episodes": env.get("num_episodes_lifetime"),
        "success": env.get("success_rate"),
        "eval": evaluated(result),
        "return": env.get("episode_return_mean"),
        "L1 critic": learner.get("critic_loss", learner.get("vf_loss")),
        "L2 policy": learner.get("policy_loss"),
        "tokens/s": env.get("tokens_per_s"),
        "seconds": result.get("time_total_s"),
    }


def _row(values: Mapping[str, str]) -> str:
    return " ".join(values[name].rjust(width) for name, width in COLUMNS.items())


def _number(value: Any) -> float:
    """A value as a float, NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    number = _number(value)
    if not math.isfinite(number):
        return "-" if math.isnan(number) else str(number)
    if abs(number) >= 1e8:
        return f"{number:.0e}"
    return f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3f}"
