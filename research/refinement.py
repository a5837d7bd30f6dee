"""What refinement is worth with a trained critic and with a frozen one: ``python -m research.refinement``.

NLAC and NLAC_FrozenCritic are trained in a world of ``compare.yaml``, a text house, some seeds each. Every evaluation branches:
where refinement changes a drawn turn's action, the game goes on from there several times with each of both, to the end. Printed
is, of each critic, how often the refined action did better where it mattered (95 % Wilson interval, and each seed by itself),
and the mean difference of success: at each evaluation, and of all together.

An interrupted command goes on where it stopped. ``--rows CSV`` prints the table of rows that are kept.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.compare import build, is_done, positive, results_of, run
from research.compare_plan import HERE, Cell, Plan
from research.compare_tables import Row
from rllib_nlac.diagnostics.calibration import Z, wilson
from rllib_nlac.diagnostics.results import evaluated, lookup

WORLD = "house_1_goals"  # whose games are neither all lost nor all won
CRITICS = {"NLAC": "trained", "NLAC, critic frozen": "frozen"}
FIGURES = ("num_states", "num_decided", "win_rate", "success_of_action", "success_of_refined", "gain", "gain_low", "gain_high")
COLUMNS = ("critic", "seed", "episodes", "success", "auc", *FIGURES)


def cell(plan: Plan, world: str, method: str, seed: int, episodes: int, states: int, branches: int) -> Cell:
    """A run of the comparison whose evaluations are larger, and branch: of an episode one turn counts at most."""
    plain = plan.cell(world, method, seed, episodes=episodes)
    plain.experiment["config"] |= {
        "evaluation_duration": states,
        "evaluation_critic": {"states": states, "branches": branches},
        "evaluation_repeats": {"tasks": 0},
    }
    plain.experiment["checkpoint_config"]["checkpoint_frequency"] = 2
    return plain


def row_of(cell: Cell, result: dict[str, Any]) -> Row:
    """One evaluation's figures."""
    found = {name: lookup(result, f"evaluation/critic/refinement/{name}") for name in FIGURES}
    return {
        "critic": CRITICS[cell.method],
        "seed": cell.seed,
        "episodes": lookup(result, "env_runners/num_episodes_lifetime"),
        "success": lookup(result, "evaluation/env_runners/success_rate"),
        "auc": lookup(result, "evaluation/critic/auc"),
        **found,
    }


def together(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of several runs' turns as if they were one run's; a turn counts the same, whichever run it is of."""
    decided = sum(row["num_decided"] for row in rows)
    wins = sum(round(row["win_rate"] * row["num_decided"]) for row in rows if row["num_decided"])
    rate = wins / decided if decided else math.nan
    known = [row for row in rows if row["num_states"] > 1]
    count = sum(row["num_states"] for row in known)
    gain = sum(row["gain"] * row["num_states"] for row in known) / count if count else math.nan
    # Sums of squares around the common mean, from each run's standard error.
    variances = [((row["gain_high"] - row["gain"]) / Z) ** 2 * row["num_states"] for row in known]
    squares = sum(
        variance * (row["num_states"] - 1) + row["num_states"] * (row["gain"] - gain) ** 2
        for variance, row in zip(variances, known, strict=True)
    )
    half = Z * math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan
    low, high = wilson(rate, decided)
    return {
        "num_states": count,
        "num_decided": decided,
        "win_rate": rate,
        "win_low": low,
        "win_high": high,
        "gain": gain,
        "gain_low": gain - half,
        "gain_high": gain + half,
    }


def table(rows: Sequence[Row]) -> str:
    """As Markdown: each critic at each evaluation, all seeds together, and all evaluations."""
    lines = [
        "| critic | episodes | success, each seed | turns changed | decided | win rate | each seed | gain in success |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for critic in dict.fromkeys(row["critic"] for row in rows):
        of_critic = [row for row in rows if row["critic"] == critic]
        points = sorted({row["episodes"] for row in of_critic})
        for point in [*points, None]:
            own = [row for row in of_critic if point in (None, row["episodes"])]
            all_, seeds = together(own), [[r for r in own if r["seed"] == seed] for seed in sorted({r["seed"] for r in own})]
            fields = [
                critic,
                "all" if point is None else f"{point:.0f}",
                "" if point is None else ", ".join(f"{row['success']:.2f}" for each in seeds for row in each),
                f"{all_['num_states']:.0f}",
                f"{all_['num_decided']:.0f}",
                f"{all_['win_rate']:.2f} ({all_['win_low']:.2f} to {all_['win_high']:.2f})",
                ", ".join(f"{together(each)['win_rate']:.2f}" for each in seeds),
                f"{all_['gain']:+.3f} ({all_['gain_low']:+.3f} to {all_['gain_high']:+.3f})",
            ]
            lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def read_rows(path: Path) -> list[Row]:
    """What a CSV of this benchmark holds."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value if key == "critic" else float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default=WORLD, help="of compare.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=positive, default=256)
    parser.add_argument("--states", type=positive, default=512, help="episodes of an evaluation, and turns drawn of them")
    parser.add_argument("--branches", type=positive, default=2, help="continuations of each action")
    parser.add_argument("--out", type=Path, default=Path("results/refinement"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read_rows(arguments.rows)))
        return
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(HERE / "compare.yaml", folder / "models")
    build(plan, arguments.world)
    rows: list[Row] = []
    for seed in arguments.seeds:
        for method in CRITICS:
            one = cell(plan, arguments.world, method, seed, arguments.episodes, arguments.states, arguments.branches)
            run(one, folder)
            if not is_done(one, folder):
                raise SystemExit(f"a run failed, {folder / one.name}.log says why; the same command tries it again")
            rows += [row_of(one, result) for result in results_of(one, folder) if evaluated(result) is not None]
    with (folder / "refinement.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
