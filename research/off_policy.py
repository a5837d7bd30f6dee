"""What learning from older play costs and brings: ``python -m research.off_policy FILE [--plans PLAN ...] [--seeds 0 1 2]``.

Runs an experiment file of NLAC, or of RFT with the plans that suit it, under one of the plans below:

- ``as it is``: each iteration learns after it has played, as the file has it.
- ``stop at N``: after N iterations nothing is played any more, and the updates go on from what the buffer holds.
- ``S late``: an iteration learns from episodes that were played S iterations before, as with ``max_staleness: S``.
- ``S late, smaller``: the same with iterations that are 1 + S times as many and as small, so that as many generations of the
  policy play as in the file.
- ``N updates``: N times as many transitions are drawn for each episode that is played.

Success is that of evaluation, as often as the file evaluates. A run's rows are in the CSV as soon as it has ended, and runs
that are there are not run again. ``--rows CSV`` prints the table of rows that are kept.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)

from ray.rllib.algorithms.algorithm import Algorithm

from research.rows import Row, apart, generated_tokens, read, write
from rllib_nlac.command.experiment import load_experiments, resolve
from rllib_nlac.diagnostics.results import lookup

KINDS = {
    "example": str,
    "plan": str,
    "seed": int,
    "iteration": int,
    "episodes": int,
    "gradient_steps": int,
    "success": float,
    "generated_tokens": float,
    "seconds": float,
}
PLANS = ("as it is", "stop at 4", "1 late", "2 late", "1 late, smaller", "2 late, smaller", "2 updates", "4 updates")
EPISODES = "env_runners/num_episodes_lifetime"
FORM = re.compile(r"as it is|stop at (?P<stop>\d+)|(?P<late>\d+) late(?P<smaller>, smaller)?|(?P<times>\d+) updates")


def planned(path: Path, plan: str, seed: int) -> tuple[Any, int]:
    """The configuration, with the algorithm's class in it, and the number of iterations.

    Raises:
        ValueError: There is no such plan, or the file has no number of episodes to stop at.
    """
    found = FORM.fullmatch(plan)
    if found is None:
        raise ValueError(f"no plan is called {plan!r}; plans are called as in {', '.join(map(repr, PLANS))}")
    (experiment,) = load_experiments(path)
    config = resolve(experiment).copy(copy_frozen=False).debugging(seed=seed)
    if EPISODES not in experiment.stop:
        raise ValueError(f"{path}: its stop must have {EPISODES}")
    iterations = int(experiment.stop[EPISODES]) // config.episodes_per_iteration
    late, playing = int(found["late"] or 0), iterations
    if found["smaller"]:
        iterations = playing = iterations * (1 + late)
        for key in ("episodes_per_iteration", "train_batch_size_per_learner", "pool_size"):
            if hasattr(config, key):
                setattr(config, key, getattr(config, key) // (1 + late))
        config.evaluation_interval *= 1 + late
    if found["times"]:
        config.train_batch_size_per_learner *= int(found["times"])
    if found["stop"]:
        playing = int(found["stop"])
    config.algo_class = late_by(config.algo_class, late, playing)
    return config, iterations


def late_by(base: type[Algorithm], late: int, playing: int) -> type[Algorithm]:
    """An algorithm that learns from episodes of so many iterations before, and stops playing after so many."""

    class Late(base):  # type: ignore[misc, valid-type]
        def setup(self, config: Any) -> None:
            super().setup(config)
            self.played: collections.deque[Any] = collections.deque()

        def collect(self) -> Any:
            if self.iteration >= playing:
                return self.played.popleft() if self.played else []
            self.played.append(super().collect())
            return self.played.popleft() if len(self.played) > late else []

        def training_step(self) -> None:
            if self.iteration < late:  # nothing has come yet
                self.collect()
            else:
                super().training_step()

    Late.__name__ = base.__name__
    return Late


def outcome_of(path: Path, plan: str, seed: int) -> list[Row]:
    """Trains, and gives a row for each evaluation. To be called in a process of its own."""
    import ray

    config, iterations = planned(path, plan, seed)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm, tokens, steps, started, rows = config.build_algo(), 0.0, 0, time.perf_counter(), []
    try:
        for number in range(1, iterations + 1):
            result = algorithm.train()
            tokens += generated_tokens(result)
            steps += int(lookup(result, "learners/default_policy/num_gradient_steps") or 0)
            success = (result.get("evaluation") or {}).get("env_runners", {}).get("success_rate")
            if success is not None:
                row = {"example": path.stem, "plan": plan, "seed": seed, "iteration": number, "gradient_steps": steps}
                row |= {"episodes": int(result["env_runners"]["num_episodes_lifetime"]), "success": round(success, 3)}
                rows.append(row | {"generated_tokens": tokens, "seconds": round(time.perf_counter() - started, 1)})
        return [{name: row[name] for name in KINDS} for row in rows]
    finally:
        algorithm.stop()
        ray.shutdown()


def table(rows: Sequence[Row]) -> str:
    """As Markdown, a line for each example, plan and evaluation; success is the mean of the seeds with each of them behind."""
    lines = ["| example | plan | iteration | episodes | gradient steps | success | tokens |", "|---|---|---|---|---|---|---|"]
    places = dict.fromkeys((row["example"], row["plan"], row["iteration"]) for row in rows)
    for place in places:
        own = [row for row in rows if (row["example"], row["plan"], row["iteration"]) == place]
        each = ", ".join(f"{row['success']:.3f}" for row in sorted(own, key=lambda row: row["seed"]))
        mean = f"{statistics.fmean(row['success'] for row in own):.3f} ({each})"
        fields = [*place, own[0]["episodes"], own[0]["gradient_steps"], mean]
        fields.append(f"{statistics.fmean(row['generated_tokens'] for row in own):,.0f}")
        lines.append(f"| {' | '.join(map(str, fields))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="an experiment file that stops at a number of episodes")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), metavar="PLAN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/off_policy.csv"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read(arguments.rows, KINDS)))
        return
    if arguments.file is None:
        parser.error("name an experiment file, or --rows")
    for plan in arguments.plans:
        planned(arguments.file, plan, 0)  # a mistake is told before the first run
    rows = read(arguments.out, KINDS) if arguments.out.exists() else []
    for seed in arguments.seeds:
        for plan in arguments.plans:
            key = (arguments.file.stem, plan, seed)
            if any((row["example"], row["plan"], row["seed"]) == key for row in rows):
                continue
            rows += (found := apart(outcome_of, arguments.file, plan, seed))
            print(f"{plan}, seed {seed}: " + ", ".join(f"{row['success']:.3f}" for row in found), flush=True)
            write(arguments.out, KINDS, rows)
    print(table([row for row in rows if row["example"] == arguments.file.stem]))


if __name__ == "__main__":
    main()
