"""What the critic knows, at the first evaluation that asked it and at the last."""

from __future__ import annotations

import math

from rllib_nlac.diagnostics.results import Results, Run, figure
from rllib_nlac.diagnostics.rules import CRITIC
from rllib_nlac.reporting.words import iteration, number


def critic(run: Run) -> str:
    """The section of the report."""
    parts = ["## What the critic knows"]
    asked = [r for r in run.evaluated if figure(r, f"{CRITIC}/num_states") > 0]
    if not asked:
        parts.append(
            "No evaluation asked a critic in words: this algorithm has none, or the run had no evaluation, or "
            "evaluation_critic has states: 0."
        )
        return "\n\n".join(parts)
    ends = [asked[0], asked[-1]] if len(asked) > 1 else asked
    names = {
        "turns asked about": "num_states",
        "AUC (0.5 is chance)": "auc",
        "Brier score": "brier",
        "Brier score of always saying the mean": "brier_of_base_rate",
        "calibration error (ECE)": "ece",
        "mean chance that it gave": "predicted_success",
        "share that came": "success",
        "answers that do not parse": "unparsed_rate",
        "AUC on replayed turns": "replayed/auc",
    }
    lines = [f"| | {' | '.join(f'iteration {iteration(r)}' for r in ends)} |", "|---" * (len(ends) + 1) + "|"]
    for name, key in names.items():
        values = [number(figure(r, f"{CRITIC}/{key}"), 0 if key == "num_states" else 3) for r in ends]
        if any(value != "-" for value in values):
            lines.append(f"| {name} | {' | '.join(values)} |")
    refined = [_refinement(r) for r in ends]
    if any(refined):
        lines.append(f"| refined action better, where it mattered | {' | '.join(each or '-' for each in refined)} |")
    parts.append("\n".join(lines))
    if figure(ends[-1], f"{CRITIC}/one_class") == 1:
        parts.append(
            "In the last evaluation all turns that were drawn are of episodes that ended alike, so nothing can be said of how "
            "well it orders them."
        )
    return "\n\n".join(parts)


def _refinement(result: Results) -> str:
    rate, low, high, count = (
        figure(result, f"{CRITIC}/refinement/{name}") for name in ("win_rate", "win_low", "win_high", "num_decided")
    )
    return "" if math.isnan(rate) else f"{rate:.2f} ({low:.2f} to {high:.2f}) of {count:.0f} turns"


def ends(run: Run) -> dict[str, list[float]]:
    """The critic's figures at the first evaluation that has them and at the last."""
    ends: dict[str, list[float]] = {}
    for name, title in (("auc", "AUC"), ("brier", "Brier score")):
        values = [value for r in run.evaluated if not math.isnan(value := figure(r, f"{CRITIC}/{name}"))]
        if values:
            ends[title] = [values[0], values[-1]] if len(values) > 1 else values
    return ends
