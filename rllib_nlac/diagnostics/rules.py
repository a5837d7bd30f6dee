"""Rules that are asked during a run and in its report: each looks at the results so far, and says what is wrong and what to do.

During a run the text of a rule is a warning, in the report it is advice. A rule returns None where nothing is wrong, where its
figures are missing, and where chance alone may explain them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rllib_nlac.diagnostics.results import Results, Run, figure, largest_k

Rule = Callable[[Run], str | None]
CRITIC, PLAYED = "evaluation/critic", "evaluation/env_runners"
LEAST_STATES = 30  # turns that the critic must have been asked about
LEAST_FALL = 0.1  # smallest change of a figure between 0 and 1 that is worth a word


def critic_figures(run: Run) -> dict[str, float] | None:
    """Figures of the critic in the last evaluation; None for too few turns, and before training."""
    if not run.evaluated or figure(run.evaluated[-1], "training_iteration") == 0:
        return None
    critic = _critic(run.evaluated[-1])
    return critic if critic["num_states"] >= LEAST_STATES else None


def critic_forgets(run: Run) -> str | None:
    """Success rose, and the critic tells wins from losses less well than in its best evaluation before."""
    before = [r for r in _lower_success(run) if not math.isnan(figure(r, f"{CRITIC}/auc"))]
    if not before:
        return None
    best, now = max(map(_critic, before), key=lambda critic: critic["auc"]), _critic(run.evaluated[-1])
    chance = 2 * math.hypot(_auc_error(best), _auc_error(now))
    if not best["auc"] - now["auc"] > max(LEAST_FALL, chance):
        return None
    return (
        f"Success rose, and the critic tells wins from losses less well: its AUC fell from {best['auc']:.2f} to "
        f"{now['auc']:.2f}. Try a lower lr, or more training for the critic (num_epochs, judged_fraction, policy_loss_coeff)."
    )


def critic_biased(run: Run) -> str | None:
    """The critic's chances are too high or too low on the whole."""
    critic = critic_figures(run)
    if critic is None:
        return None
    bias = critic["predicted_success"] - critic["success"]
    if not abs(bias) > max(0.15, 2 * critic["bias_error"]):
        return None
    word, ways = (
        (
            "hopes for more than comes",
            "a smaller replay capacity, as old play misleads it, or more training for it (num_epochs)",
        )
        if bias > 0
        else ("expects less than comes", "more training for it (num_epochs), or a larger tau: its targets lag behind the play")
    )
    return f"The critic {word}: it predicts {critic['predicted_success']:.2f} where {critic['success']:.2f} came; {ways}."


def less_variety(run: Run) -> str | None:
    """pass@k fell although success did not."""
    known = [r for r in run.evaluated if not math.isnan(figure(r, "evaluation/repeated/success_rate"))]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    k = largest_k(last["evaluation"]["repeated"])
    a, b = (figure(r, f"evaluation/repeated/pass_at_{k}") for r in (first, last))
    tasks = figure(last, "evaluation/repeated/num_tasks")
    chance = 2 * math.sqrt(max(a * (1 - a) + b * (1 - b), 0.0) / max(tasks, 1.0))
    if k is None or not a - b > max(LEAST_FALL, chance) or _score(run, last) < _score(run, first):
        return None
    return (
        f"pass@{k} fell from {a:.2f} to {b:.2f}: some tasks are won always and others never. Stop earlier, or a lower "
        "policy_loss_coeff or lr."
    )


def fell_back(run: Run) -> str | None:
    """It was better before, beyond chance."""
    if not run.measures_success or len(run.evaluated) < 2:
        return None
    best = max(run.evaluated, key=lambda r: figure(r, f"{PLAYED}/success_rate"))
    last = run.evaluated[-1]
    if not figure(last, f"{PLAYED}/success_high") < figure(best, f"{PLAYED}/success_low"):
        return None
    accepted = figure(last, "language_stages/yes_success_rate") > LEAST_FALL
    or_else = ", or train_on_yes: never, for the policy imitates those of its own actions that the evaluator accepts"
    return (
        f"Success fell from {figure(best, f'{PLAYED}/success_rate'):.2f} (iteration "
        f"{figure(best, 'training_iteration'):.0f}) to {figure(last, f'{PLAYED}/success_rate'):.2f}: keep checkpoints by "
        "score (checkpoint_score_attribute: evaluation/env_runners/success_rate), and try a lower lr"
        f"{or_else if accepted else ''}."
    )


#: Rules that are asked after every iteration; the report asks them too.
DURING: tuple[Rule, ...] = (critic_forgets, critic_biased, less_variety, fell_back)


def _lower_success(run: Run) -> list[Results]:
    """Earlier evaluations whose success is clearly lower than that of the last: their interval lies below its own."""
    if not run.evaluated:
        return []
    low = figure(run.evaluated[-1], f"{PLAYED}/success_low")
    return [r for r in run.evaluated[:-1] if figure(r, f"{PLAYED}/success_high") < low]


def _critic(result: Results) -> dict[str, float]:
    names = ("auc", "predicted_success", "success", "num_states", "bias_error")
    return {name: figure(result, f"{CRITIC}/{name}") for name in names}


def _score(run: Run, result: Mapping[str, Any]) -> float:
    return figure(result, f"evaluation/{run.score}")


def _auc_error(critic: Mapping[str, float]) -> float:
    """Standard error of the area under the ROC curve (Hanley and McNeil, 1982)."""
    area, count = min(max(critic["auc"], 0.0), 1.0), critic["num_states"]  # results are a file, in which anything may stand
    good = critic["success"] * count
    bad = count - good
    if not good > 0 or not bad > 0:
        return 0.0
    of_two_good, of_two_bad = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (good - 1) * (of_two_good - area**2) + (bad - 1) * (of_two_bad - area**2)
    return math.sqrt(max(spread, 0.0) / (good * bad))
