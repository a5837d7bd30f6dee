"""Writes what each method reached, from the rows that the comparison keeps, for the algorithms' pages to include."""

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
