"""The quick start beside its ablations, from one base model: ``python -m benchmarks.learning``.

NLAC; its critic not trained; futures of other transitions; and distillation only, in which the evaluator sees the same
constant future for everything, so that reward and critic play no part. Each runs through Tune on the quick start's own
file, with several seeds; what counts is the evaluation at the end, on tasks and seeds of its own. Writes
``learning.csv`` and ``learning_curve.png``, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import statistics
from collections.abc import Iterator
from pathlib import Path

import ray
from ray import tune

from rllib_nlac.experiment import load_experiments
from rllib_nlac.progress import evaluated, lookup

logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)
EXAMPLE = Path(__file__).parent.parent / "tuned_examples" / "twenty_questions_nlac.yaml"
VARIANTS = {
    "NLAC": {},
    "critic frozen": {"critic_loss_coeff": 0.0},
    "futures permuted": {"critic_input": "permuted"},
    "distillation only": {"critic_loss_coeff": 0.0, "critic_input": "constant"},
}
COLUMNS = ("variant", "seed", "episodes", "success", "evaluation", "generated_tokens", "seconds")


def run(variant: str, changes: dict, seed: int, folder: Path) -> list[dict]:
    """One training run; a row for each iteration."""
    (experiment,) = load_experiments(EXAMPLE)
    analysis = tune.run(
        experiment.run, name=f"{variant.replace(' ', '-')}-{seed}", config={**experiment.config, **changes, "seed": seed},
        stop=experiment.stop, storage_path=str(folder.absolute()), verbose=0,
    )  # fmt: skip
    rows, tokens = [], 0
    for result in _results(Path(analysis.trials[0].path)):
        tokens += int(lookup(result, "env_runners/num_generated_tokens") or 0)
        tokens += int(lookup(result, "language_stages/num_generated_tokens") or 0)
        rows.append({
            "variant": variant, "seed": seed, "episodes": int(result["env_runners"]["num_episodes_lifetime"]),
            "success": result["env_runners"]["success_rate"],
            "evaluation": evaluated(result), "generated_tokens": tokens,
            "seconds": result["time_total_s"],
        })  # fmt: skip
    return rows


def _results(trial: Path) -> Iterator[dict]:
    for line in (trial / "result.json").read_text().splitlines():
        yield json.loads(line)


def table(rows: list[dict], base: float | None) -> str:
    """Final evaluations as Markdown: mean, spread over seeds, tokens and time."""
    lines = ["| | success after 256 episodes, each seed | mean | generated tokens | seconds |", "|---|---|---|---|---|"]
    if base is not None:
        lines.append(f"| base model | | {base:.3f} | 0 | 0 |")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        last = {row["seed"]: row for row in rows if row["variant"] == variant and row["evaluation"] is not None}.values()
        finals = [row["evaluation"] for row in last]
        tokens = statistics.mean(row["generated_tokens"] for row in last)
        seconds = statistics.mean(row["seconds"] for row in last)
        each = ", ".join(f"{final:.3f}" for final in finals)
        lines.append(f"| {variant} | {each} | {statistics.mean(finals):.3f} | {tokens:,.0f} | {seconds:.0f} |")
    return "\n".join(lines)


def plot(rows: list[dict], base: float | None, path: Path) -> None:
    """Evaluation success against episodes, mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        measured: dict[int, list[float]] = {}
        for row in rows:
            if row["variant"] == variant and row["evaluation"] is not None:
                measured.setdefault(row["episodes"], []).append(row["evaluation"])
        if base is not None:
            measured[0] = [base]
        x = sorted(measured)
        (line,) = axes.plot(x, [statistics.mean(measured[e]) for e in x], marker="o", label=variant)
        axes.fill_between(x, [min(measured[e]) for e in x], [max(measured[e]) for e in x], alpha=0.15, color=line.get_color())
    axes.set(xlabel="training episodes", ylabel="success in evaluation", ylim=(0, 1))
    axes.set_title("Twenty questions (16 objects, 8 attributes, 6 turns), shipped small model")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--base", type=float, help="the base model's success, as rllib_nlac.tiny.card prints it")
    parser.add_argument("--out", type=Path, default=Path("results/learning"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rows = []
    for variant in arguments.variants:
        for seed in range(arguments.seeds):
            rows += run(variant, VARIANTS[variant], seed, arguments.out)
            print(f"{variant}, seed {seed}: {rows[-1]['evaluation']}", flush=True)
    with (arguments.out / "learning.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, arguments.base, arguments.out / "learning_curve.png")
    print(table(rows, arguments.base))


if __name__ == "__main__":
    main()
