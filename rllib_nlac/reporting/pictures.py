"""The pictures of a report: success over training, what a predicted chance was worth, and what falls as success rises."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rllib_nlac.diagnostics.results import Results, Run, figure, largest_k, lookup
from rllib_nlac.reporting.svg import Chart, Line

CRITIC = "evaluation/critic"


def pictures(run: Run) -> dict[str, str]:
    """SVG by file name; none of what a run has not measured."""
    charts = {
        "report_success.svg": success(run),
        "report_calibration.svg": calibration(run),
        "report_variety.svg": variety(run),
    }
    return {name: chart.svg() for name, chart in charts.items() if chart is not None}


def success(run: Run) -> Chart | None:
    """The evaluations with their intervals, and the episodes collected meanwhile."""
    lines = []
    if run.evaluated:
        points = [(run.progress(r), figure(r, f"evaluation/{run.score}")) for r in run.evaluated]
        names = ("success_low", "success_high") if run.measures_success else ()
        band = [tuple(figure(r, f"evaluation/env_runners/{name}") for name in names) for r in run.evaluated] if names else []
        lines.append(Line("evaluation, 95 % interval" if names else "evaluation", points, band))  # type: ignore[arg-type]
    collected = [(run.progress(r), figure(r, run.score)) for r in run.results]
    if any(math.isfinite(y) for _, y in collected):
        lines.append(Line("while collecting", collected))
    if not lines:
        return None
    what = "success" if run.measures_success else "return"
    return Chart(
        what.capitalize(),
        "episodes of training" if run.plays else "iterations",
        what,
        lines,
        y_range=(0.0, 1.0) if run.measures_success else None,
    )


def calibration(run: Run) -> Chart | None:
    """What came of the turns that were given a chance, at the first evaluation that asked and at the last."""
    asked = [(r, curve) for r in run.evaluated if (curve := _curve(r)) is not None]
    if not asked:
        return None
    ends = [asked[0], asked[-1]] if len(asked) > 1 else asked
    lines = []
    for result, (predicted, came, count) in ends:
        total = max(sum(count), 1)
        sizes = [2 + 10 * math.sqrt(n / total) for n in count]
        name = f"iteration {figure(result, 'training_iteration'):.0f} ({sum(count):.0f} turns)"
        lines.append(Line(name, list(zip(predicted, came, strict=True)), sizes=sizes))
    title, given, whole = "What the critic's chance was worth", "chance of success that it gave", (0.0, 1.0)
    return Chart(title, given, "share that came", lines, whole, whole, diagonal=True, width=420)


def _curve(result: Results) -> tuple[list[float], list[float], list[float]] | None:
    """Mean chance, share that came and count by bin; None where nothing was asked."""
    curve = lookup(result, f"{CRITIC}/reliability")
    if not isinstance(curve, Mapping):
        return None
    lists = [curve.get(name) for name in ("predicted", "came", "count")]
    if not all(isinstance(each, list) for each in lists) or not lists[0] or len(set(map(len, lists))) > 1:  # type: ignore[arg-type]
        return None
    predicted, came, count = ([value if isinstance(value, int | float) else math.nan for value in each] for each in lists)  # type: ignore[union-attr]
    return (predicted, came, count) if all(map(math.isfinite, (*predicted, *came, *count))) and min(count) >= 0 else None


def variety(run: Run) -> Chart | None:
    """pass@1 and pass@k of the tasks that are attempted several times, and the entropy of an action in nats."""
    k = attempts(run)
    if k is None:
        return None
    lines = [
        Line(name, [(run.progress(r), figure(r, f"evaluation/{path}")) for r in run.evaluated])
        for name, path in (
            ("pass@1", "repeated/pass_at_1"),
            (f"pass@{k}", f"repeated/pass_at_{k}"),
            ("token entropy, nats", "env_runners/token_entropy"),
        )
    ]
    known = [line for line in lines if any(math.isfinite(y) for _, y in line.points)]
    largest = max((y for line in known for _, y in line.points if math.isfinite(y)), default=1.0)
    what = "episodes of training" if run.plays else "iterations"
    return Chart("Does the policy still try different things?", what, "", known, (0.0, max(1.0, largest))) if known else None


def attempts(run: Run) -> int | None:
    """The largest k of pass@k, of the last evaluation that has one; None where no task is attempted several times."""
    ks = (largest_k(lookup(result, "evaluation/repeated")) for result in reversed(run.evaluated))
    return next((k for k in ks if k is not None), None)
