"""The pretrained model on each task, by every method from one warm-up: ``python -m research.real_model [--tasks TASK ...]``.

A cell is a task, a method and a seed. It runs ``tuned_examples/TASK_smollm2_METHOD.yaml`` with that seed by ``rllib train``.
All methods of a task start from the same supervised warm-up, whose conversations the task's expert writes first. Success is
that of evaluation before and after training. An interrupted command goes on with the cells that are missing, and a
cell whose run has ended is not run again. ``--report`` runs nothing, and ``--rows CSV`` prints the tables of rows that are
kept. Of NLAC's ablations, such as ``--methods NLAC_Hindsight``, a cell is NLAC's example under their name.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from research.rows import Row, generated_tokens, read, write
from rllib_nlac.ablations import ABLATIONS
from rllib_nlac.diagnostics.results import Results, evaluated, lookup, read_results

EXAMPLES = Path(__file__).parent.parent / "tuned_examples"
TASKS = ("guess_number", "twenty_questions", "math_level1", "miniwob_click")
METHODS = ("nlac", "rft", "grpo", "ppo")  # a task has those for which there is a TASK_smollm2_METHOD.yaml
WARM_UP = "sft"
KINDS = {
    "task": str,
    "method": str,
    "seed": int,
    "episodes": int,
    "before": float,
    "success": float,
    "generated_tokens": int,
    "kl_to_base": float,
    "minutes": float,
}


@dataclass(frozen=True)
class Cell:
    """A method on a task with a seed."""

    task: str
    method: str
    seed: int

    @property
    def example(self) -> Path:
        return EXAMPLES / f"{self.task}_smollm2_{'nlac' if self.method in ABLATIONS else self.method}.yaml"

    @property
    def experiment(self) -> dict[str, Any]:
        """The example with this seed, under a name of its own; the warm-up as it is, since the others start from its folder."""
        ((name, entry),) = yaml.safe_load(self.example.read_text("utf-8")).items()
        entry = {**entry, "extends": str(self.example.parent / entry["extends"])}
        if self.method == WARM_UP:
            return {name: entry}
        if self.method in ABLATIONS:
            name, entry = f"{name}-{self.method}", {**entry, "run": self.method}
        return {f"{name}-s{self.seed}": {**entry, "config": {**entry["config"], "seed": self.seed}}}

    @property
    def name(self) -> str:
        return next(iter(self.experiment))

    def results(self, folder: Path) -> list[Results]:
        """The results of its run, an iteration each; empty where it has not ended."""
        files = sorted((folder / self.name).glob("*/result.json"), key=lambda file: file.stat().st_mtime)
        ended = [own for file in files if (own := read_results(file)[0]) and own[-1].get("done")]
        return ended[-1] if ended else []


def commands(cell: Cell, folder: Path) -> list[list[str]]:
    """What a person would type for a cell: the expert's conversations before a warm-up, then training or its resumption."""
    train = ["train", "file", str(folder / f"{cell.name}.yaml"), "--storage-path", str(folder)]
    if any((folder / cell.name).glob("*/checkpoint_*")):
        return [[*train, "--resume"]]
    if cell.method != WARM_UP:
        return [train]
    # The example says in its first lines how its conversations are made.
    text = cell.example.read_text("utf-8").replace("\\\n#", " ")
    lines = [shlex.split(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#   rllib env expert")]
    return [*(line[1:] for line in lines), train]


def run(cell: Cell, folder: Path) -> None:
    """Runs a cell to its end, with its output in a log beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell.name}.yaml").write_text(yaml.safe_dump(cell.experiment, sort_keys=False), "utf-8")
    with (folder / f"{cell.name}.log").open("a") as log:
        for command in commands(cell, folder):
            whole = [sys.executable, "-m", "rllib_nlac.command", *command]
            subprocess.run(whole, stdout=log, stderr=subprocess.STDOUT, cwd=folder.parent, check=True)


def row_of(cell: Cell, results: Sequence[Results]) -> Row:
    """What a run came to; of a warm-up no tokens are generated and no episodes are played."""

    def last(path: str) -> float:
        values = [float(value) for result in results if (value := lookup(result, path)) is not None]
        return values[-1] if values else math.nan

    before, *after = [value for result in results if (value := evaluated(result)) is not None] or [math.nan]
    if results[0]["training_iteration"] != 0 or not after:
        raise ValueError(f"{cell.name}: its results hold no evaluation before and after training")
    episodes = last("env_runners/num_episodes_lifetime")
    row = {
        "task": cell.task,
        "method": cell.method,
        "seed": cell.seed,
        "episodes": 0 if math.isnan(episodes) else int(episodes),
        "before": round(before, 3),
        "success": round(after[-1], 3),
        "generated_tokens": int(sum(map(generated_tokens, results))),
        "kl_to_base": round(last("kl_to_base"), 4),
        "minutes": round(last("time_total_s") / 60, 1),
    }
    return {name: row[name] for name in KINDS}


def table(rows: Sequence[Row]) -> str:
    """As Markdown, a line for each task and method: success is the mean of the seeds, with each of them behind."""
    lines = [
        "| task | method | episodes | success before | success | generated tokens | KL to the base | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        own = sorted((r for r in rows if (r["task"], r["method"]) == (task, method)), key=lambda r: r["seed"])

        def mean(name: str, form: str, own: Sequence[Row] = own) -> str:
            value = statistics.fmean(r[name] for r in own)
            return "-" if math.isnan(value) else format(value, form)

        each = " (" + ", ".join(f"{r['success']:.3f}" for r in own) + ")" if own[1:] else ""
        fields = [task, method, mean("episodes", ",.0f"), mean("before", ".3f"), mean("success", ".3f") + each]
        fields += [mean("generated_tokens", ",.0f"), mean("kl_to_base", ".3f"), mean("minutes", ".0f")]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results"), help="as the examples name it, results")
    parser.add_argument("--report", action="store_true", help="run nothing, and collect what has ended")
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read(arguments.rows, KINDS)))
        return
    folder = arguments.out.absolute()
    cells = [Cell(task, WARM_UP, 0) for task in arguments.tasks]
    cells += [Cell(task, method, seed) for seed in arguments.seeds for task in arguments.tasks for method in arguments.methods]
    there = [cell for cell in cells if cell.example.is_file()]
    rows = []
    for number, cell in enumerate(there, start=1):
        if not arguments.report and not cell.results(folder):
            print(f"{number} of {len(there)}: {cell.name} ...", flush=True)
            run(cell, folder)
        if results := cell.results(folder):
            rows.append(row_of(cell, results))
            print(json.dumps(rows[-1]), flush=True)
            write(folder / "real_model.csv", KINDS, rows)
    if rows:
        print(table(rows))


if __name__ == "__main__":
    main()
