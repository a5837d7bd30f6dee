"""NLAC beside its ablations and baselines, from one base model each world: ``make compare``, or

    python -m research.compare [--quick] [--worlds WORLD ...] [--methods METHOD ...] [--seeds N] [--parallel N]
    python -m research.compare --search           # the small search that chose each method's settings
    python -m research.compare --report           # only put together what is there
    python -m research.compare --rows CSV ...     # the tables of rows that are kept

``compare.yaml`` says what is compared. Each cell (a method on a world with a seed) is an experiment file of its own that
``rllib train`` runs through Tune, below ``results/compare``; an interrupted command goes on where it stopped. What counts are
evaluations on seeds of their own. Writes ``compare.csv``, a picture of the learning curves of each world (against
episodes, generated tokens and wall-clock; mean and range over seeds), and the tables as Markdown: of all worlds, and of each.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from research.compare_plan import HERE, Cell, Plan, asked_for
from research.compare_tables import COLUMNS, PASS, Row, markdown, picture, plot, read_rows
from research.rows import generated_tokens
from rllib_nlac.checkpoints.checkpoint import weights_digest
from rllib_nlac.diagnostics.results import Results, evaluated, lookup, read_results
from rllib_nlac.names import unknown_key
from rllib_nlac.nlac import NLACConfig

BASE_MODEL = "base model"


def build(plan: Plan, world: str) -> None:
    """The model of a world that asks for one of its own, unless it is there."""
    wanted, out = plan.worlds[world].get("build"), plan.models / world
    if wanted and not (out / "built").exists():
        print(f"{world}: building its model, a few minutes, once", flush=True)
        command = ["research.tiny.build", f"--world={wanted}", f"--out={out}"]
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=HERE.parent)
        (out / "built").touch()


def run(cell: Cell, folder: Path) -> None:
    """Trains one cell to its end, from the last checkpoint where it was begun."""
    if is_done(cell, folder):
        return
    file = folder / f"{cell.name}.yaml"
    plan = yaml.safe_dump({cell.name: cell.experiment}, sort_keys=False)
    file.write_text(f"# {BASE_MODEL} {weights_of(cell)}\n{plan}", encoding="utf-8")
    command = [sys.executable, "-m", "rllib_nlac.command", "train", "file", str(file), "--storage-path", str(folder)]
    if list((folder / cell.name).glob("*/checkpoint_*")):
        command.append("--resume")
    with (folder / f"{cell.name}.log").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    state = "done" if ended.returncode == 0 and is_done(cell, folder) else f"FAILED, see {folder / cell.name}.log"
    last = next((row for row in reversed(rows_of(cell, folder)) if row["evaluation"] is not None), None)
    print(
        f"{cell.world:18s} {cell.method:32s} seed {cell.seed}  {state}"
        + (f": {last['evaluation']:.3f} after {last['episodes']} episodes" if last else ""),
        flush=True,
    )


def weights_of(cell: Cell) -> str:
    """A checksum of the weights that a cell begins with: those of a shipped model change with the package."""
    name = cell.experiment["config"].get("language_model", NLACConfig().language_model)
    return weights_digest(NLACConfig().language(language_model=name).model_path)


def is_done(cell: Cell, folder: Path) -> bool:
    """Whether the run has reached its end, by its own experiment file."""
    file, results = folder / f"{cell.name}.yaml", results_of(cell, folder)
    if not results or not file.is_file():
        return False
    if yaml.safe_load(file.read_text()) != {cell.name: json.loads(json.dumps(cell.experiment))}:
        raise SystemExit(f"{file} is of another plan: remove it and {folder / cell.name}, or choose another --out")
    began_with = re.match(rf"# {BASE_MODEL} (\w+)", file.read_text())
    if began_with and began_with[1] != weights_of(cell):
        raise SystemExit(
            f"{file} is of other weights of the base model: remove it and {folder / cell.name}, or choose another --out"
        )
    return any((lookup(results[-1], key) or 0) >= limit for key, limit in cell.experiment["stop"].items())


def rows_of(cell: Cell, folder: Path) -> list[Row]:
    """A row for each iteration."""
    rows, tokens = [], 0.0
    for result in results_of(cell, folder):
        tokens += generated_tokens(result)
        evaluation, played = evaluated(result), "evaluation/env_runners"
        if "evaluation_interval" not in cell.experiment["config"]:
            evaluation, played = lookup(result, "env_runners/success_rate"), "env_runners"
        subgoals = lookup(result, f"{played}/subgoals") if evaluation is not None else None
        rows.append(
            {
                "world": cell.world,
                "method": cell.method,
                "seed": cell.seed,
                "episodes": int(_number(lookup(result, "env_runners/num_episodes_lifetime"))),
                "success": lookup(result, "env_runners/success_rate"),
                "evaluation": evaluation,
                "subgoals": [subgoals[name] for name in sorted(subgoals)] if subgoals else None,
                "generated_tokens": int(tokens),
                "seconds": result.get("time_total_s", 0.0),  # an evaluation before training has none
                PASS: lookup(result, f"evaluation/repeated/{PASS}"),
            }
        )
    return rows


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def results_of(cell: Cell, folder: Path) -> list[Results]:
    """The results of a run, an iteration each."""
    # A run that was interrupted before its first checkpoint began again in a folder of its own.
    latest = max((folder / cell.name).glob("*/result.json"), key=lambda file: file.stat().st_mtime, default=None)
    return read_results(latest)[0] if latest else []


def positive(text: str) -> int:
    """A whole number above 0, for the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def report(cells: Sequence[Cell], plan: Plan, folder: Path) -> None:
    """CSV, pictures and tables of all that has been run."""
    begun = [(is_done(cell, folder), found) for cell in cells if (found := rows_of(cell, folder))]
    rows = [row for has_ended, found in begun for row in found if has_ended]
    if left_out := sum(not has_ended for has_ended, _ in begun):
        print(
            f"Left out: {left_out} runs that have not come to their end; without --report the same command goes on with them."
        )
    if not rows:
        return
    with (folder / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, PASS))
        writer.writeheader()
        writer.writerows(rows)
    for world in dict.fromkeys(row["world"] for row in rows):
        plot(rows, plan, world, folder / f"{world}.png")
    tables = markdown(rows, plan)
    (folder / "compare.md").write_text(tables, encoding="utf-8")
    print(tables)
    print(f"Written: {folder}/compare.csv, compare.md and a picture of each world.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=HERE / "compare.yaml")
    parser.add_argument("--quick", action="store_true", help="the shorter comparison")
    parser.add_argument("--search", action="store_true", help="search settings, the same number of runs for every method")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--rows", nargs="+", type=Path, metavar="CSV", help="run nothing, and print the tables of these rows")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="with --rows, of one world: draw success over episodes")
    parser.add_argument("--worlds", nargs="+", default=[], metavar="WORLD")
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD")
    parser.add_argument("--seeds", type=positive, help="instead of the plan's")
    parser.add_argument(
        "--parallel", type=positive, default=max(1, (os.cpu_count() or 1)), help="runs side by side, a thread each"
    )
    parser.add_argument("--out", type=Path, default=Path("results/compare"))
    arguments = parser.parse_args()
    try:
        plan, folder = Plan(arguments.plan, arguments.out / "models"), arguments.out.absolute()
    except ValueError as error:
        parser.error(str(error))
    for what, known, asked in (("world", plan.worlds, arguments.worlds), ("method", plan.methods, arguments.methods)):
        for name in asked:
            # A row's method may have its candidate's number, as in "RFT #2".
            if (name.partition(" #")[0] if arguments.rows and what == "method" else name) not in known:
                parser.error(f"{arguments.plan}: {unknown_key(name, known, what)}")
    if arguments.rows:
        if missing := [str(path) for path in arguments.rows if not path.is_file()]:
            parser.error(f"there is no {', '.join(missing)}: a run writes its rows to compare.csv below --out")
        try:
            rows = [row for path in arguments.rows for row in read_rows(path)]
        except ValueError as error:
            parser.error(str(error))
        there = "\n  ".join(sorted({f"{row['world']}: {row['method']}" for row in rows}))
        rows = [row for row in rows if not arguments.worlds or row["world"] in arguments.worlds]
        rows = [row for row in rows if not arguments.methods or row["method"] in arguments.methods]
        if not rows:
            parser.error(f"no row is of {asked_for(arguments.worlds, arguments.methods)}; there are\n  {there}")
        if others := {row["world"] for row in rows} - plan.worlds.keys():
            parser.error(f"{arguments.plan} knows no {', '.join(sorted(others))}: give these rows their own --plan")
        if arguments.picture and len({row["world"] for row in rows}) > 1:
            parser.error("--picture shows one world: choose it with --worlds")
        print(markdown(rows, plan))
        if arguments.picture:
            arguments.picture.write_text(picture(rows, plan, rows[0]["world"]), encoding="utf-8")
        return
    if arguments.picture:
        parser.error("--picture draws rows that are kept: give them with --rows")
    if arguments.search and (arguments.quick or arguments.seeds):
        parser.error("--search has runs and a seed of its own: leave out --quick and --seeds")
    runs = "search" if arguments.search else "quick" if arguments.quick else "runs"
    try:
        cells = plan.select(runs, arguments.worlds, arguments.methods, arguments.seeds)
    except ValueError as error:
        parser.error(str(error))
    folder = folder if runs == "runs" else folder / runs
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.report and not any(rows_of(cell, folder) for cell in cells):
        parser.error(f"nothing has been run yet of {asked_for(arguments.worlds, arguments.methods)} below {folder}")
    if not arguments.report:
        missing = [cell for cell in cells if not is_done(cell, folder)]
        print(f"{len(cells)} runs, of which {len(cells) - len(missing)} are there already; {arguments.parallel} at a time")
        for world in dict.fromkeys(cell.world for cell in missing):
            build(plan, world)
        with ThreadPoolExecutor(arguments.parallel) as pool:
            list(pool.map(lambda cell: run(cell, folder), missing))
    report(cells, plan, folder)
    if not arguments.report and (failed := [cell.name for cell in cells if not is_done(cell, folder)]):
        raise SystemExit(f"{len(failed)} runs failed, first {folder / failed[0]}.log; the same command tries them again")


if __name__ == "__main__":
    main()
