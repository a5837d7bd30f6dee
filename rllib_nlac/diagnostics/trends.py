"""What goes wrong slowly: figures that fall while success rises, failures that climb, a policy that leaps away from its base.

Each is held against what this process has seen of the same run, and only a change beyond chance is said.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rllib_nlac.diagnostics.results import ROLES, figure, largest_k

Say = Callable[[str, str | None], None]  # a trouble's name, and what to say of it

LEAST_FALL = 0.1  # of a figure between 0 and 1, before it is worth a word
CLIMB_FROM = 0.1  # share of answers that do not parse, before its climbing is worth a word
LEAP = 3.0  # times the median of the last ones
LEAST_LEAP = 0.05  # nats
PAGE = "page 'Reading a run'"
UNPARSED = {
    "env_runners/action_parse_failures": "the policy's turns",
    **{f"language_stages/{role}/unparsed_answer_rate": f"the {what}" for role, (what, _) in ROLES.items()},
}


class Trends:
    """Remembers the figures of a run.

    Args:
        say: Hears of each trouble how it stands: a text, or None where it is over. See ``Notices.heed``.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._evaluations: list[dict[str, float]] = []
        self._least_unparsed: dict[str, float] = {}
        self._kl: deque[float] = deque(maxlen=5)

    def heed_evaluation(self, results: Mapping[str, Any]) -> None:
        """Takes note of an evaluation: does anything fall that should rise with success?

        Args:
            results: What stands under ``evaluation``.
        """
        names = ("success_rate", "success_low", "success_high")
        now = {name: figure(results, f"env_runners/{name}") for name in names}
        for name in ("auc", "predicted_success", "success", "bias_error", "num_states"):
            now[name] = figure(results, f"critic/{name}")
        repeated = results.get("repeated") or {}
        k = largest_k(repeated) or 1
        now |= {"k": k, "pass": figure(repeated, f"pass_at_{k}") if k > 1 else math.nan, "tasks": figure(repeated, "num_tasks")}
        before = [each for each in self._evaluations if each["success_high"] < now["success_low"]]
        self._evaluations.append(now)
        self._say("AUC falls", self._of_auc(now, before))
        self._say("bias grows", self._of_bias(now, before))
        self._say("pass@k falls", self._of_pass(now, before))

    def _of_auc(self, now: Mapping[str, float], before: list[dict[str, float]]) -> str | None:
        best = max((each for each in before if not math.isnan(each["auc"])), key=lambda each: each["auc"], default=None)
        if best is None or math.isnan(now["auc"]):
            return None
        chance = 2 * math.hypot(_auc_error(best), _auc_error(now))
        if best["auc"] - now["auc"] <= max(LEAST_FALL, chance):
            return None
        return (
            f"success rose to {now['success_rate']:.2f}, and the critic tells wins from losses less well: its AUC fell from "
            f"{best['auc']:.2f} to {now['auc']:.2f}. What to do: see evaluation/critic on {PAGE}; a lower lr, or "
            "more of the training for the critic (num_epochs, judged_fraction, policy_loss_coeff)"
        )

    def _of_bias(self, now: Mapping[str, float], before: list[dict[str, float]]) -> str | None:
        known = [each for each in before if not math.isnan(each["predicted_success"])]
        if not known or math.isnan(now["predicted_success"]):
            return None
        bias = now["predicted_success"] - now["success"]
        least = min(known, key=lambda each: abs(each["predicted_success"] - each["success"]))
        former = least["predicted_success"] - least["success"]
        errors = [0.0 if math.isnan(each["bias_error"]) else each["bias_error"] for each in (least, now)]
        if abs(bias) - abs(former) <= max(LEAST_FALL, 2 * math.hypot(*errors)):
            return None
        word = "hopes more" if bias > 0 else "hopes less"
        return (
            f"success rose to {now['success_rate']:.2f}, and the critic {word} than it should: it predicts success for "
            f"{now['predicted_success']:.2f} of the turns where {now['success']:.2f} came. What to do: see evaluation/critic "
            f"on {PAGE}; old play may mislead it (a smaller replay capacity), or it learns too slowly (num_epochs, tau)"
        )

    def _of_pass(self, now: Mapping[str, float], before: list[dict[str, float]]) -> str | None:
        best = max(
            (e for e in before if e["k"] == now["k"] and not math.isnan(e["pass"])), key=lambda e: e["pass"], default=None
        )
        if best is None or math.isnan(now["pass"]):
            return None
        errors = [math.sqrt(max(e["pass"] * (1 - e["pass"]), 0.0) / max(e["tasks"], 1.0)) for e in (best, now)]
        if best["pass"] - now["pass"] <= max(LEAST_FALL, 2 * math.hypot(*errors)):
            return None
        return (
            f"success rose to {now['success_rate']:.2f}, and pass@{now['k']:.0f} fell from {best['pass']:.2f} to "
            f"{now['pass']:.2f}: the policy wins some tasks always and others never. What to do: see action_entropy on {PAGE}; "
            "stop earlier, or a lower policy_loss_coeff or lr"
        )

    def heed_iteration(self, results: Mapping[str, Any]) -> None:
        """Takes note of an iteration: do answers that do not parse climb, does the policy leap away from its base?

        Args:
            results: Of the iteration.
        """
        for path, whose in UNPARSED.items():
            rate = figure(results, path)
            if path.startswith("env_runners/"):  # a count
                steps = figure(results, "env_runners/num_env_steps_sampled")
                rate = rate / steps if steps > 0 else math.nan
            if math.isnan(rate):
                continue
            least = min(self._least_unparsed.get(path, rate), rate)
            self._least_unparsed[path] = least
            climbs = rate >= CLIMB_FROM and rate > 2 * least + 0.05
            self._say(
                f"{whose} climb",
                f"of {whose} {rate:.0%} do not parse, where it was {least:.0%}: the model forgets its format. What to do: a "
                "lower lr, or judge_weights: initial for roles that are not trained; go on from a checkpoint before it began"
                if climbs
                else None,
            )
        kl = figure(results, "kl_to_base")
        if math.isnan(kl):
            return
        usual = statistics.median(self._kl) if len(self._kl) >= 2 else math.inf
        leaps = kl > LEAP * usual and kl - usual > LEAST_LEAP
        self._say(
            "KL leaps",
            f"the policy leapt away from the base model: KL {kl:.3g} nats after {usual:.3g}. What to do: a "
            "lower lr or grad_clip"
            if leaps
            else None,
        )
        if math.isfinite(kl):
            self._kl.append(kl)


def _auc_error(figures: Mapping[str, float]) -> float:
    """Standard error of the area under the ROC curve (Hanley and McNeil, 1982)."""
    area, count = figures["auc"], figures["num_states"]
    good = figures["success"] * count
    bad = count - good
    if not good > 0 or not bad > 0:
        return 0.0
    of_two_good, of_two_bad = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (good - 1) * (of_two_good - area**2) + (bad - 1) * (of_two_bad - area**2)
    return math.sqrt(max(spread, 0.0) / (good * bad))
