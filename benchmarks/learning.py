"""NLAC beside its ablations and baselines, from one base model: ``python -m benchmarks.learning``.

Every method runs through Tune on its own file in ``tuned_examples/``, with several seeds; what counts is the evaluation at
the end, on tasks and seeds of its own. NLAC's ablations: its critic not trained; futures of other transitions; and
distillation only, in which the evaluator sees the same constant future for everything, so that reward and critic play no
part. Writes ``learning.csv`` and ``learning_curve.png``, and prints a Markdown table.

``--methods`` picks some; ``--csv FILE ...`` only puts the rows of earlier runs together.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray import tune

from rllib_nlac.experiment import load_experiments, trainable_of
from rllib_nlac.progress import evaluated, lookup

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # files are named from the repository's root
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)
EXAMPLES = Path(__file__).parent.parent / "tuned_examples"
# Each method's file, without its beginning "twenty_questions_", and what it changes there.
METHODS: dict[str, tuple[str, dict]] = {
    "NLAC": ("nlac", {}),
    "NLAC, critic frozen": ("nlac", {"critic_loss_coeff": 0.0}),
    "NLAC, futures permuted": ("nlac", {"critic_input": "permuted"}),
    "NLAC, distillation only": ("nlac", {"critic_loss_coeff": 0.0, "critic_input": "constant"}),
    "NLAC, Monte Carlo": ("nlac", {"n_step": 1000}),
    "NLAC, uniform replay": ("nlac", {"replay_buffer_config": {"capacity": 20000, "alpha": 0.0}}),
    "NLAC, no target network": ("nlac", {"tau": 1.0}),
    "NLAC, no refinement": ("nlac", {"num_refinements": 0}),
    "NLAC, k = 4": ("nlac", {"num_futures": 4}),
    "NLAC, m = 2": ("nlac", {"num_refinements": 2}),
    "PPO (RLlib)": ("ppo", {}),
    "APPO (RLlib)": ("appo", {}),
    "GRPO": ("grpo", {}),
    "RFT": ("rft", {}),
    "NLRL": ("nlrl", {}),
    "self-distillation": ("self_distillation", {}),
    "NLQL": ("nlql", {}),
    "scalar critic": ("scalar_critic", {}),
    "offline NLAC": ("nlac_offline", {}),
    "offline NLAC, critic frozen": ("nlac_offline", {"critic_loss_coeff": 0.0}),
    "offline NLAC, distillation only": ("nlac_offline", {"critic_loss_coeff": 0.0, "critic_input": "constant"}),
}
COLUMNS = ("method", "seed", "episodes", "success", "evaluation", "generated_tokens", "seconds")


def run(method: str, seed: int, folder: Path) -> list[dict]:
    """One training run; a row for each iteration."""
    example, changes = METHODS[method]
    (experiment,) = load_experiments(EXAMPLES / f"twenty_questions_{example}.yaml")
    name = "".join(letter if letter.isalnum() else "-" for letter in method)
    analysis = tune.run(
        trainable_of(experiment), name=f"{name}-{seed}", config={**experiment.config, **changes, "seed": seed},
        stop=experiment.stop, storage_path=str(folder.absolute()), verbose=0,
    )  # fmt: skip
    rows, tokens = [], 0
    for result in _results(Path(analysis.trials[0].path)):
        tokens += int(lookup(result, "env_runners/num_generated_tokens") or 0)
        tokens += int(lookup(result, "language_stages/num_generated_tokens") or 0)
        rows.append({
            "method": method, "seed": seed, "episodes": int(lookup(result, "env_runners/num_episodes_lifetime") or 0),
            "success": lookup(result, "env_runners/success_rate"), "evaluation": evaluated(result),
            "generated_tokens": tokens, "seconds": result["time_total_s"],
        })  # fmt: skip
    return rows


def _results(trial: Path) -> Iterator[dict]:
    for line in (trial / "result.json").read_text().splitlines():
        yield json.loads(line)


def table(rows: Sequence[dict], base: float | None) -> str:
    """Last evaluations as Markdown: each seed, mean, episodes, tokens and time."""
    lines = ["| | episodes | success, each seed | mean | generated tokens | seconds |", "|---|---|---|---|---|---|"]
    if base is not None:
        lines.append(f"| base model | 0 | | {base:.3f} | 0 | 0 |")
    for method in dict.fromkeys(row["method"] for row in rows):
        last = {row["seed"]: row for row in rows if row["method"] == method and row["evaluation"] is not None}.values()
        mean = {key: statistics.mean(row[key] for row in last) for key in COLUMNS[2:] if key != "success"}
        each = ", ".join(f"{row['evaluation']:.3f}" for row in last)
        lines.append(
            f"| {method} | {mean['episodes']:.0f} | {each} | {mean['evaluation']:.3f} | {mean['generated_tokens']:,.0f} | "
            f"{mean['seconds']:.0f} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict], base: float | None, path: Path) -> None:
    """Evaluation success against episodes, mean and range over seeds, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["episodes"]]  # offline runs collect none
    figure, axes = plt.subplots(figsize=(8.5, 4.8))
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        seeds = {row["seed"] for row in rows if row["method"] == method}
        # Iterations of equal number, whose episodes may differ a little between seeds.
        curves = [
            [(row["episodes"], row["evaluation"]) for row in rows
             if row["method"] == method and row["seed"] == seed and row["evaluation"] is not None]
            for seed in sorted(seeds)
        ]  # fmt: skip
        points = [[curve[i] for curve in curves] for i in range(min(map(len, curves)))]
        x = [statistics.mean(episodes for episodes, _ in point) for point in points]
        values = [[value for _, value in point] for point in points]
        style = "-" if method.startswith("NLAC") else "--"
        (line,) = axes.plot(
            x,
            list(map(statistics.mean, values)),
            style,
            marker="o",
            ms=3,
            label=method,
            color=plt.get_cmap("tab20")(number % 20),
        )
        axes.fill_between(x, list(map(min, values)), list(map(max, values)), alpha=0.12, color=line.get_color())
    if base is not None:
        axes.axhline(base, color="grey", lw=0.8, ls=":", label="base model")
    axes.set(xlabel="training episodes", ylabel="success in evaluation", ylim=(0, 1))
    axes.set_xscale("log", base=2)
    axes.set_title("Twenty questions (16 objects, 8 attributes, 6 turns), shipped small model")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read(path: Path) -> list[dict]:
    """Rows of an earlier run."""
    with path.open(newline="") as file:
        return [
            {key: value if key == "method" else (float(value) if value else None) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--csv", nargs="*", type=Path, default=[], help="only put these together")
    parser.add_argument("--base", type=float, help="the base model's success, as rllib_nlac.tiny.card prints it")
    parser.add_argument("--out", type=Path, default=Path("results/learning"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [row for path in arguments.csv for row in read(path)]
    if not arguments.csv:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        for method in arguments.methods:
            for seed in range(arguments.seeds):
                rows += run(method, seed, arguments.out)
                last = [row for row in rows if row["evaluation"] is not None][-1]
                print(f"{method}, seed {seed}: {last['evaluation']} after {last['episodes']} episodes", flush=True)
                write(rows, arguments.out / "learning.csv")
    write(rows, arguments.out / "learning.csv")
    plot(rows, arguments.base, arguments.out / "learning_curve.png")
    print(table(rows, arguments.base))


def write(rows: Sequence[dict], path: Path) -> None:
    """All rows so far, so that an interruption loses none."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
