"""NLAC beside its ablations and baselines, from one base model each world: ``make compare``, or

    python -m benchmarks.compare [--quick] [--worlds WORLD ...] [--methods METHOD ...] [--seeds N] [--parallel N]
    python -m benchmarks.compare --search           # the small search that chose each method's settings
    python -m benchmarks.compare --report           # only put together what is there
    python -m benchmarks.compare --rows CSV ...     # the tables of what is kept in docs/, for one

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
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rllib_nlac.inputs import plain_yaml
from rllib_nlac.names import nearest, unknown_key
from rllib_nlac.reporting.results import evaluated, lookup

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "tuned_examples"
SEARCH_SEED = 1000  # never among the reported ones
COLUMNS = ("world", "method", "seed", "episodes", "success", "evaluation", "subgoals", "generated_tokens", "seconds")
PASS = "pass_at_4"  # a column that rows from before it was kept do not have
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        world: Name of the world in the plan.
        method: Name of the method, with the candidate's number in a search.
        seed: Of everything in it.
        experiment: What ``rllib train`` runs.
    """

    world: str
    method: str
    seed: int
    experiment: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.world} {self.method} {self.seed}".lower())


class Plan:
    """What ``compare.yaml`` says.

    Args:
        path: The file: ``worlds``, ``methods``, ``search``, ``runs`` and ``quick``.
        models: Where the models are built that a world names and the package does not ship.
    """

    def __init__(self, path: Path, models: Path) -> None:
        self.models = models.absolute()
        self._plan = plain_yaml.read(path)
        for key in ("worlds", "methods"):
            if not isinstance(self._plan, dict) or not self._plan.get(key):
                raise ValueError(f"{path} is no plan: it has no {key!r}")
        self.worlds: dict[str, dict[str, Any]] = self._plan["worlds"]
        self.methods: dict[str, dict[str, Any]] = self._plan["methods"]
        self.summary: list[str] = self._plan.get("summary", [])

    def cells(self, runs: str, worlds: Sequence[str], methods: Sequence[str], seeds: int | None) -> list[Cell]:
        """The cells of "runs" or "quick", those of other worlds and methods left out."""
        cells = [
            self.cell(world, method, seed, episodes=run.get("episodes"))
            for run in self._plan[runs]
            for seed in range(seeds or run["seeds"])
            for world in run["worlds"]
            for method in run["methods"]
            if (not worlds or world in worlds) and (not methods or method in methods)
        ]
        return list({cell.name: cell for cell in cells}.values())

    def search_cells(self, worlds: Sequence[str], methods: Sequence[str]) -> list[Cell]:
        """Every candidate of every method that is searched in a world, each for as many episodes."""
        search = self._plan["search"]
        return [
            self.cell(run["world"], method, SEARCH_SEED, candidate, number, run["episodes"])
            for run in search["runs"]
            for method in run["methods"]
            for number, candidate in enumerate(search["candidates"][method][self.kind(run["world"])], start=1)
            if (not worlds or run["world"] in worlds) and (not methods or method in methods)
        ]

    def select(self, runs: str, worlds: Sequence[str], methods: Sequence[str], seeds: int | None) -> list[Cell]:
        """The cells of "runs", "quick" or "search" that are of these worlds and methods; of all where none are named.

        Raises:
            ValueError: There are none.
        """

        def cells(worlds: Sequence[str], methods: Sequence[str]) -> list[Cell]:
            return self.search_cells(worlds, methods) if runs == "search" else self.cells(runs, worlds, methods, seeds)

        if runs not in self._plan:
            raise ValueError(f"the plan has no {runs!r}; it has {', '.join(self._plan)}")
        found = cells(worlds, methods)
        if not found:
            every = cells([], [])
            known = sorted({cell.world for cell in every})
            for world in worlds:
                if world not in known:
                    near = nearest(world, known)
                    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
                    raise ValueError(f"no run of {runs!r} is in the world {world!r}; {hint}")
            beside = sorted({cell.method.partition(" #")[0] for cell in every if not worlds or cell.world in worlds})
            raise ValueError(f"no run of {runs!r} is of {asked_for(worlds, methods)}; there are {', '.join(beside)}")
        return found

    def kind(self, world: str) -> str:
        """The tuned examples that a world goes by: "twenty_questions", "text_house".

        Candidates are for a kind, and so is what was chosen, where the world has no choice of its own.
        """
        return self.worlds.get(world, {}).get("like", world)

    def cell(
        self,
        world: str,
        method: str,
        seed: int,
        candidate: dict[str, Any] | None = None,
        number: int = 0,
        episodes: int | None = None,
    ) -> Cell:
        """A method's tuned example, in another world where that is one, with the changes that the plan names."""
        place, settings = self.worlds[world], self.methods[method]
        kind = self.kind(world)
        examples = [EXAMPLES / f"{name}_{settings['file']}.yaml" for name in (kind, "twenty_questions")]
        (experiment,) = yaml.safe_load(next(path for path in examples if path.is_file()).read_text()).values()
        chosen = settings.get("chosen", {})
        chosen = chosen.get(world, chosen.get(kind, {})) if candidate is None else {}
        config = {
            **experiment["config"],
            **place.get("config", {}),
            **settings.get("by_world", {}).get(kind, {}),
            **chosen,
            **settings.get("config", {}),
            **(candidate or {}),
            "seed": seed,
            "num_cpus_for_main_process": 1,
        }
        if "env_config" in settings:
            config["env_config"] = {**config["env_config"], **settings["env_config"]}
        stop = experiment["stop"]
        if "evaluation_interval" in config and "own_stop" not in settings:  # all but prompting alone and logged dialogues
            per_iteration = config.get("episodes_per_iteration") or (
                config["train_batch_size_per_learner"] / config["env_config"]["max_turns"]
            )
            every = settings.get("evaluate_every", place["evaluate_every"])
            config["evaluation_interval"] = max(1, round(every / per_iteration))
            stop = {"env_runners/num_episodes_lifetime": (episodes or place["episodes"]) * settings.get("longer", 1)}
        experiment = {
            **experiment,
            "run": settings.get("run", experiment["run"]),
            "stop": stop,
            "config": config,
            "checkpoint_config": {"checkpoint_frequency": 8, "num_to_keep": 1, "checkpoint_at_end": True},
        }
        if "env" in place:
            experiment["env"] = place["env"]
        if "build" in place:
            config["language_model"] = str(self.models / world)
        return Cell(world, f"{method} #{number}" if number else method, seed, experiment)


def build(plan: Plan, world: str) -> None:
    """The model of a world that asks for one of its own, unless it is there."""
    wanted, out = plan.worlds[world].get("build"), plan.models / world
    if wanted and not (out / "built").exists():
        print(f"{world}: building its model, a few minutes, once", flush=True)
        command = ["rllib_nlac.tiny.build", f"--world={wanted}", f"--out={out}"]
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=HERE.parent)
        (out / "built").touch()


def run(cell: Cell, folder: Path) -> None:
    """Trains one cell to its end, from the last checkpoint where it was begun."""
    if is_done(cell, folder):
        return
    file = folder / f"{cell.name}.yaml"
    file.write_text(yaml.safe_dump({cell.name: cell.experiment}, sort_keys=False), encoding="utf-8")
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


def is_done(cell: Cell, folder: Path) -> bool:
    """Whether the run has reached its end, by its own experiment file."""
    file, results = folder / f"{cell.name}.yaml", list(results_of(cell, folder))
    if not results or not file.is_file():
        return False
    if yaml.safe_load(file.read_text()) != {cell.name: json.loads(json.dumps(cell.experiment))}:
        raise SystemExit(f"{file} is of another plan: remove it and {folder / cell.name}, or choose another --out")
    return any((lookup(results[-1], key) or 0) >= limit for key, limit in cell.experiment["stop"].items())


def rows_of(cell: Cell, folder: Path) -> list[Row]:
    """A row for each iteration."""
    rows, tokens = [], 0.0
    for result in results_of(cell, folder):
        tokens += _number(lookup(result, "env_runners/num_generated_tokens"))
        tokens += _number(lookup(result, "language_stages/num_generated_tokens"))
        tokens += _number(lookup(result, "num_reflection_tokens"))
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
                "seconds": result["time_total_s"],
                PASS: lookup(result, f"evaluation/repeated/{PASS}"),
            }
        )
    return rows


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def results_of(cell: Cell, folder: Path) -> Iterator[dict]:
    """The results of a run, an iteration each."""
    # A run that was interrupted before its first checkpoint began again in a folder of its own.
    latest = max((folder / cell.name).glob("*/result.json"), key=lambda file: file.stat().st_mtime, default=None)
    by_iteration = {}
    for line in latest.read_text().splitlines() if latest else ():
        result = json.loads(line)
        by_iteration[result["training_iteration"]] = result  # a resumed run repeats what came after its checkpoint
    yield from (by_iteration[number] for number in sorted(by_iteration))


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


def asked_for(worlds: Sequence[str], methods: Sequence[str]) -> str:
    """What was selected, in words."""
    return f"the worlds {', '.join(worlds) or 'of the plan'} and the methods {', '.join(methods) or 'of the plan'}"


def positive(text: str) -> int:
    """A whole number above 0, for the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def summary(rows: Sequence[Row], plan: Plan) -> str:
    """All worlds as Markdown: success of the plan's main methods in the last evaluation, mean and range over seeds."""

    def success(world: str, method: str) -> str:
        ends = [curve[-1]["evaluation"] for curve in evaluations(rows, world, method).values()]
        spread = f" ({min(ends):.3f} to {max(ends):.3f})" if ends[1:] else ""
        return f"{statistics.mean(ends):.3f}{spread}" if ends else ""

    methods = [method for method in plan.summary if any(row["method"] == method for row in rows)]
    lines = [f"| world | episodes | {' | '.join(methods)} |", "|---" * (len(methods) + 2) + "|"]
    for world in dict.fromkeys(row["world"] for row in rows):
        fields = [plan.worlds[world]["title"], str(plan.worlds[world]["episodes"])]
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


def markdown(rows: Sequence[Row], plan: Plan) -> str:
    """The tables: of all worlds where there are several, and of each."""
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    parts = [f"### Success\n\n{summary(rows, plan)}\n"] if worlds[1:] else []
    return "\n".join([*parts, *(f"### {plan.worlds[world]['title']}\n\n{table(rows, plan, world)}\n" for world in worlds)])


def report(cells: Sequence[Cell], plan: Plan, folder: Path) -> None:
    """CSV, pictures and tables of all that has been run."""
    rows = [row for cell in cells for row in rows_of(cell, folder)]
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
        print(markdown(rows, plan))
        return
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
