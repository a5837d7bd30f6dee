"""Writes what each method reached, from the rows that the comparison keeps, for the algorithms' pages to include.

``python docs/results_tables.py`` draws the README's picture from the same rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare_plan import Plan
from benchmarks.compare_tables import Row, evaluations, read_rows

HERE = Path(__file__).parent
BASE = ("base model",)
METHODS = {"nlac": ("NLAC",), "ppo": ("PPO (RLlib)",), "grpo": ("GRPO",), "rft": ("RFT",), "react": BASE}


def results(rows: Sequence[Row], plan: Plan, methods: Sequence[str]) -> str:
    """Success in the last evaluation, mean and range over runs, beside the base model's."""
    lines = ["| world | episodes | runs | success | base model |", "|---|---|---|---|---|"]
    if methods == BASE:
        lines = ["| world | runs | success |", "|---|---|---|"]
    for world in dict.fromkeys(row["world"] for row in rows):
        base = _ends(rows, world, "base model")
        for method in methods:
            ends = _ends(rows, world, method)
            if ends:
                title, episodes = plan.worlds[world]["title"], plan.worlds[world]["episodes"]
                spread = f" ({min(ends):.3f} to {max(ends):.3f})" if ends[1:] else ""
                mean = f"{statistics.mean(ends):.3f}{spread}"
                untrained = f"{statistics.mean(base):.3f}" if base else ""  # not run there
                fields = [title, str(episodes), str(len(ends)), mean, untrained]
                lines.append(f"| {' | '.join([title, *fields[2:4]] if methods == BASE else fields)} |")
    return "\n".join(lines) + "\n"


def _ends(rows: Sequence[Row], world: str, method: str) -> list[float]:
    return [curve[-1]["evaluation"] for curve in evaluations(rows, world, method).values()]


def write(folder: Path) -> None:
    """Writes one file a method below a folder."""
    plan = Plan(HERE.parent / "benchmarks" / "compare.yaml", HERE.parent / "benchmarks")
    rows = [row for path in sorted(HERE.glob("*.csv")) for row in read_rows(path)]
    folder.mkdir(exist_ok=True)
    for name, methods in METHODS.items():
        path, text = folder / f"results_{name}.md", results(rows, plan, methods)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def draw(path: Path) -> None:
    """The front page's picture: one world, success in evaluation against episodes, mean and range over runs."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"font.size": 13, "svg.hashsalt": "rllib_nlac", "svg.fonttype": "none"})
    from matplotlib import pyplot

    rows = read_rows(HERE / "text_house.csv")
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    colours = {
        "NLAC": "#1f77b4",
        "NLAC, critic frozen": "#e6842a",
        "RFT": "#2ca02c",
        "GRPO": "#9467bd",
    }
    for method, colour in colours.items():
        curves = evaluations(rows, "house_4_depth_3", method).values()
        points = list(zip(*curves, strict=False))
        episodes = [statistics.mean(row["episodes"] for row in point) for point in points]
        values = [[row["evaluation"] for row in point] for point in points]
        axes.plot(episodes, [statistics.mean(v) for v in values], "o-", color=colour, label=method)
        axes.fill_between(episodes, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
    axes.set(xlabel="training episodes", ylabel="success", ylim=(-0.03, 1.03), title="Text house 4, three locks deep")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=11)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(HERE / "text_house_front.svg")
