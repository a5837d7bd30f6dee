"""The rows of a comparison: a file of them, their tables as Markdown, and the picture of a world."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from research.compare_plan import Plan
from research.svg import Chart, Line

COLUMNS = ("world", "method", "seed", "episodes", "success", "evaluation", "subgoals", "generated_tokens", "seconds")
PASS = "pass_at_4"  # a column that rows from before it was kept do not have
Row = dict[str, Any]


def evaluations(rows: Iterable[Row], world: str, method: str) -> dict[int, list[Row]]:
    """A method's rows in a world that hold an evaluation, by seed."""
    by_seed: dict[int, list[Row]] = {}
    for row in rows:
        if (row["world"], row["method"]) == (world, method) and row["evaluation"] is not None:
            by_seed.setdefault(row["seed"], []).append(row)
    return by_seed


def read_rows(path: Path) -> list[Row]:
    """What a ``compare.csv`` holds.

    Raises:
        ValueError: It holds no rows, or others.
    """
    kinds = {"world": str, "method": str, "seed": int, "episodes": int, "generated_tokens": int, "subgoals": json.loads}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} holds no rows of a comparison: it has no column {', '.join(sorted(missing))}")
        rows = []
        for row in reader:
            try:
                rows.append({key: kinds.get(key, float)(row[key]) if row.get(key) else None for key in (*COLUMNS, PASS)})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no rows: nothing has been run yet")
    return rows


def summary(rows: Sequence[Row], plan: Plan) -> str:
    """All worlds as Markdown: success of the plan's main methods in the last evaluation, mean and range over seeds."""

    def success(world: str, method: str) -> str:
        ends = [curve[-1]["evaluation"] for curve in evaluations(rows, world, method).values()]
        spread = f" ({min(ends):.3f} to {max(ends):.3f})" if ends[1:] else ""
        return f"{statistics.mean(ends):.3f}{spread}" if ends else ""

    def episodes(world: str) -> str:
        planned = int(plan.worlds[world]["episodes"])
        ends = {curve[-1]["episodes"] for method in methods for curve in evaluations(rows, world, method).values()}
        if not ends or max(ends) >= planned:
            return str(planned)
        return " to ".join(map(str, sorted({min(ends), max(ends)})))  # of a shorter comparison, or of a search

    methods = [method for method in plan.summary if any(row["method"] == method for row in rows)]
    lines = [f"| world | episodes | {' | '.join(methods)} |", "|---" * (len(methods) + 2) + "|"]
    for world in dict.fromkeys(row["world"] for row in rows):
        fields = [plan.worlds[world]["title"], episodes(world)]
        lines.append(f"| {' | '.join([*fields, *(success(world, method) for method in methods)])} |")
    return "\n".join(lines)


def table(rows: Sequence[Row], plan: Plan, world: str) -> str:
    """One world as Markdown.

    Episodes to the goal are the first evaluation's that reaches it, seed by seed. What is kept of the best is the mean over
    runs that ever won. Sub-goals are the share of episodes that reached the first, the second, and so on, mean over seeds, and
    pass@4 is the share of tasks won in one of four attempts.
    """
    place = plan.worlds[world]
    own = [row for row in rows if row["world"] == world]
    goal, has_subgoals, has_pass = place["goal"], any(row["subgoals"] for row in own), any(row.get(PASS) for row in own)
    head = ["method", f"episodes to {goal}", "episodes", "success, each seed", "mean", "kept of best"]
    head += ["pass@4"] if has_pass else []
    head += ["sub-goals"] if has_subgoals else []
    head += ["generated tokens", "seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows if row["world"] == world):
        by_seed = evaluations(rows, world, method)
        if not by_seed:
            continue
        last = [curve[-1] for curve in by_seed.values()]
        first = [next((row["episodes"] for row in curve if row["evaluation"] >= goal), None) for curve in by_seed.values()]
        kept = [c[-1]["evaluation"] / best for c in by_seed.values() if (best := max(row["evaluation"] for row in c))]
        fields = [
            method,
            ", ".join("-" if n is None else str(n) for n in first),
            f"{statistics.mean(row['episodes'] for row in last):.0f}",
            ", ".join(f"{row['evaluation']:.3f}" for row in last),
            f"{statistics.mean(row['evaluation'] for row in last):.3f}",
            f"{statistics.mean(kept):.2f}" if kept else "-",
        ]
        if has_pass:
            known = [row[PASS] for row in last if row.get(PASS) is not None]
            fields.append(f"{statistics.mean(known):.3f}" if known else "-")
        if has_subgoals:
            shares = zip(*(row["subgoals"] for row in last if row["subgoals"]), strict=True)
            fields.append(" / ".join(f"{statistics.mean(share):.3f}" for share in shares))
        fields += [f"{statistics.mean(row[key] for row in last):,.0f}" for key in ("generated_tokens", "seconds")]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], plan: Plan, world: str, path: Path) -> None:
    """Evaluation success against episodes, tokens and seconds: mean over seeds as a line, their range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    figure, panels = plt.subplots(1, 3, figsize=(15, 4.6), sharey=True)
    methods = [m for m in dict.fromkeys(row["method"] for row in rows if row["world"] == world) if m != "base model"]
    labels = {"episodes": "training episodes", "generated_tokens": "generated tokens", "seconds": "seconds"}
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        for number, method in enumerate(methods):
            by_seed = evaluations(rows, world, method)
            if not by_seed:
                continue
            points = [[curve[i] for curve in by_seed.values()] for i in range(min(map(len, by_seed.values())))]
            x = [statistics.mean(row[key] for row in point) for point in points]
            values = [[row["evaluation"] for row in point] for point in points]
            style = "-" if method.startswith("NLAC") else "--"
            colour = plt.get_cmap("tab20")(number % 20)
            panel.plot(x, list(map(statistics.mean, values)), style, marker="o", ms=3, label=method, color=colour)
            panel.fill_between(x, list(map(min, values)), list(map(max, values)), alpha=0.12, color=colour)
        panel.set(xlabel=label, ylim=(0, 1), xscale="log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="success in evaluation")
    panels[0].set_title(plan.worlds[world]["title"], loc="left")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def picture(rows: Sequence[Row], plan: Plan, world: str) -> str:
    """SVG: evaluation success against episodes, mean and range over seeds, without the base model, which does not learn."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows if row["world"] == world and row["method"] != "base model"):
        by_seed = evaluations(rows, world, method)
        points = list(zip(*by_seed.values(), strict=False))  # up to the end of the shortest run
        success = [[row["evaluation"] for row in point] for point in points]
        episodes = [statistics.mean(row["episodes"] for row in point) for point in points]
        curve = list(zip(episodes, map(statistics.mean, success), strict=True))
        lines.append(Line(method, curve, [(min(values), max(values)) for values in success]))
    return Chart(plan.worlds[world]["title"], "training episodes", "success in evaluation", lines, y_range=(0.0, 1.0)).svg()


def markdown(rows: Sequence[Row], plan: Plan) -> str:
    """The tables: of all worlds where there are several, and of each."""
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    parts = [f"### Success\n\n{summary(rows, plan)}\n"] if worlds[1:] else []
    return "\n".join([*parts, *(f"### {plan.worlds[world]['title']}\n\n{table(rows, plan, world)}\n" for world in worlds)])
