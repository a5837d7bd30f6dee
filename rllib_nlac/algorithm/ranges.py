"""What numeric keys of a configuration may hold. NaN, infinity, a text or a flag in their place is refused by name."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Range:
    """The numbers that a key may hold.

    Attributes:
        low: The least.
        high: The largest.
        above: Whether ``low`` itself is too small.
        whole: Whether they are whole numbers.
        optional: Whether None will do.
        schedule: Whether a list of [step, number] will do.
        words: Texts that will do, such as "auto".
        infinite: Whether infinity will do.
        why: What the bounds are for.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    whole: bool = False
    optional: bool = False
    schedule: bool = False
    words: tuple[str, ...] = ()
    infinite: bool = False
    why: str = ""

    def complaint(self, value: Any) -> str | None:
        """What is wrong with a value, as it follows "... and"; None where nothing is."""
        wrong = self._complaint(value)
        return f"{wrong}: {self.why}" if wrong and self.why else wrong

    def _complaint(self, value: Any) -> str | None:
        if (value is None and self.optional) or (isinstance(value, str) and value in self.words):
            return None
        if self.schedule and isinstance(value, (list, tuple)):
            return self._complaint_of_schedule(value)
        kind = "a whole number" if self.whole else "a number"
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            others = [*([repr(word) for word in self.words]), *(["None"] if self.optional else [])]
            return f"must be {' or '.join([kind, *others])}{_hint(value)}"
        try:
            number = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            number = math.nan
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            return "must be a finite number"
        too_small = number <= self.low if self.above else number < self.low
        return f"must {self._bounds()}" if too_small or number > self.high else None

    def _complaint_of_schedule(self, value: list | tuple) -> str | None:
        steps: list[int] = []
        for entry in value:
            if not isinstance(entry, (list, tuple)) or len(entry) != 2 or STEP.complaint(entry[0]):
                return f"must be a schedule [[0, number], [step, number], ...], and one entry is {entry!r}"
            steps.append(entry[0])
            if wrong := Range(self.low, self.high, self.above).complaint(entry[1]):
                return f"{wrong}, also at step {entry[0]}"
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            return "must be a schedule whose steps begin with 0 and rise"
        return None

    def _bounds(self) -> str:
        if self.low == self.high:
            return f"be {self.low:g}"
        if self.high == math.inf:
            return (
                "not be negative"
                if (self.low, self.above) == (0, False)
                else (f"be above {self.low:g}" if self.above else f"be at least {self.low:g}")
            )
        return (
            f"be above {self.low:g} and at most {self.high:g}" if self.above else f"be between {self.low:g} and {self.high:g}"
        )


@dataclass(frozen=True)
class Flag:
    """True or false, and nothing that Python takes for one of them: the text "no" counts as true.

    Attributes:
        optional: Whether None will do.
    """

    optional: bool = False

    def complaint(self, value: Any) -> str | None:
        """As ``Range.complaint``."""
        good = isinstance(value, (bool, np.bool_)) or (value is None and self.optional)
        return None if good else f"must be true or false{_hint(value)}"


Ranges = Mapping[str, Range | Flag]

FLAG = Flag()
FLAG_OR_NONE = Flag(optional=True)
# For losses that divide the learner's probabilities by those that the engine sampled with.
POLICY_GRADIENT: Ranges = {
    "action_temperature": Range(
        0.01, why="a greedy policy has no gradient, and vLLM raises any lower temperature above 0 to it"
    ),
    "action_top_p": Range(1, 1, why="the loss compares probabilities under the whole distribution"),
}
STEP = Range(0, whole=True)
COUNT = Range(1, whole=True)
COUNT_OR_NONE = Range(1, whole=True, optional=True)
NOT_NEGATIVE = Range(0)
WHOLE_NOT_NEGATIVE = Range(0, whole=True)
POSITIVE = Range(0, above=True)
SHARE = Range(0, 1)

# RLlib's keys that are used here, of all algorithms.
RLLIB: Ranges = {
    "lr": Range(0, schedule=True),
    "gamma": SHARE,
    "grad_clip": Range(0, optional=True),
    "train_batch_size_per_learner": COUNT_OR_NONE,
    "minibatch_size": COUNT_OR_NONE,
    "num_epochs": COUNT,
    "seed": Range(0, whole=True, optional=True),
    "num_env_runners": WHOLE_NOT_NEGATIVE,
    "num_envs_per_env_runner": COUNT,
    "num_cpus_per_env_runner": NOT_NEGATIVE,
    "num_gpus_per_env_runner": NOT_NEGATIVE,
    "rollout_fragment_length": Range(1, whole=True, words=("auto",)),
    "sample_timeout_s": Range(0, optional=True),
    "num_learners": WHOLE_NOT_NEGATIVE,
    "num_gpus_per_learner": NOT_NEGATIVE,
    "num_cpus_per_learner": Range(0, words=("auto",)),
    "num_cpus_for_main_process": NOT_NEGATIVE,
    "evaluation_interval": Range(0, whole=True, optional=True),
    "evaluation_duration": Range(1, whole=True, words=("auto",)),
    "evaluation_num_env_runners": WHOLE_NOT_NEGATIVE,
    "evaluation_sample_timeout_s": POSITIVE,
    "min_time_s_per_iteration": Range(0, optional=True),
    "min_sample_timesteps_per_iteration": Range(0, whole=True, optional=True),
    "min_train_timesteps_per_iteration": Range(0, whole=True, optional=True),
}


def check(ranges: Ranges, values: Mapping[str, Any], where: str) -> None:
    """Refuses values outside their ranges; keys that have none are left alone.

    Args:
        ranges: By key.
        values: By key.
        where: How a key reads in the error, with ``{key}`` in it.

    Raises:
        ValueError: Names key, value and what it may be.
    """
    for key, allowed in ranges.items():
        if key in values and (wrong := allowed.complaint(values[key])):
            raise ValueError(f"{where.format(key=key)} is {values[key]!r:.200} and {wrong}")


def _hint(value: Any) -> str:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    if not isinstance(value, str):
        return ""
    return f"; in quotes, or without a dot as in 1e-3, YAML takes it for a text: write {float(value)!r}"
