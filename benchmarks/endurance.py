"""What 500 updates do to a policy: ``python -m benchmarks.endurance [--methods NLAC SDPO RFT] [--seeds 0 1 2]``.

Twenty questions by the tuned examples, with 16 episodes an update instead of 32 or 64, and for NLAC a quarter of the
transitions: so a run of so many updates takes half an hour on a core. Every 50 updates it is evaluated on 256 episodes:

- success, pass@4 and the entropy of an action;
- how far the policy has left the base model: KL a token, on the turns just played;
- what is forgotten: loss a token of the base model's own answers, above the base model's loss. NLAC has more roles that answer
  than the others, so this compares a method with itself only.

All rows of a run are in the CSV as soon as it has ended, and a run that is there is not made again. ``--rows CSV`` prints
the table of rows that are kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, apart, generated_tokens, read, write
from rllib_nlac.algorithm.told import lookup

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
METHODS = {"NLAC": "twenty_questions_nlac", "SDPO": "twenty_questions_sdpo", "RFT": "twenty_questions_rft"}
UPDATES, EVERY, EPISODES, ATTEMPTS = 500, 50, 16, 4
# Column, and where an iteration's results have it.
FOUND = {
    "success": "evaluation/env_runners/success_rate",
    f"pass_at_{ATTEMPTS}": f"evaluation/repeated/pass_at_{ATTEMPTS}",
    "action_entropy": "evaluation/env_runners/action_entropy",
    "kl_to_base": "kl_to_base",
    "loss": "evaluation/retention/loss",
    "loss_of_base": "evaluation/retention/loss_of_base",
}
KINDS = {"method": str, "seed": int, "update": int, **dict.fromkeys((*FOUND, "generated_tokens", "seconds"), float)}


def config_of(method: str, seed: int) -> Any:
    """A tuned example's configuration with small updates, and all that is measured."""
    from rllib_nlac.algorithms import OURS
    from rllib_nlac.command.experiment import load_experiments

    (example,) = load_experiments(EXAMPLES / f"{METHODS[method]}.yaml")
    config = OURS[example.run].get_default_config().update_from_dict(example.config)
    config.training(episodes_per_iteration=EPISODES, kl_to_base_coeff=0.0, rehearsal={"fraction": 0.0})
    if method == "NLAC":
        config.training(train_batch_size_per_learner=config.train_batch_size_per_learner // 4)
        config.evaluation(evaluation_critic={"states": 0, "fixed_states": 0})
    config.env_runners(num_envs_per_env_runner=EPISODES).debugging(seed=seed)
    return config.evaluation(evaluation_interval=EVERY, evaluation_duration=256, evaluation_repeats={"attempts": ATTEMPTS})


def trained(config: Any, updates: int) -> list[Row]:
    """A row for each evaluation of so many updates."""
    algorithm = config.build_algo()
    rows: list[Row] = []
    try:
        tokens, started = 0.0, time.perf_counter()
        for update in range(1, updates + 1):
            result = algorithm.train()
            tokens += generated_tokens(result)
            if update % config.evaluation_interval == 0:  # the others have no evaluation
                found = {name: float(lookup(result, key)) for name, key in FOUND.items()}
                seconds = time.perf_counter() - started
                rows.append({"update": update, **found, "generated_tokens": tokens, "seconds": seconds})
    finally:
        algorithm.stop()
    return rows


def run(method: str, seed: int, updates: int) -> list[Row]:
    """One run, in a process that does nothing else."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        return [{"method": method, "seed": seed, **row} for row in trained(config_of(method, seed), updates)]
    finally:
        ray.shutdown()


run_apart = partial(apart, run)


def read_rows(path: Path) -> list[Row]:
    """What a CSV of this benchmark holds."""
    return read(path, KINDS)


def complete(
    path: Path, wanted: Sequence[tuple[str, int]], updates: int, play: Callable[..., list[Row]] = run_apart
) -> list[Row]:
    """Makes the runs that are wanted and not there.

    Args:
        path: The CSV.
        wanted: Methods and seeds.
        updates: Of each run.
        play: Makes a run.
    """
    known = read_rows(path) if path.exists() else []
    for method, seed in wanted:
        if any((row["method"], row["seed"], row["update"]) == (method, seed, updates) for row in known):
            continue
        known = [row for row in known if (row["method"], row["seed"]) != (method, seed)]
        known += play(method, seed, updates)
        write(path, KINDS, known)
        print(table([row for row in known if (row["method"], row["seed"]) == (method, seed)]), flush=True)
    return known


def table(rows: Sequence[Row]) -> str:
    """As Markdown: for each method and every hundredth update the means of its seeds, and the success of each."""
    lines = [
        f"| method | update | success, each seed | mean | pass@{ATTEMPTS} | entropy | KL | forgotten | tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, update in dict.fromkeys((row["method"], row["update"]) for row in rows):
        if update % (2 * EVERY) and update != EVERY:
            continue
        own = [row for row in rows if (row["method"], row["update"]) == (method, update)]

        def mean(value: Callable[[Row], float], own: Sequence[Row] = own) -> float:
            return statistics.fmean(map(value, own))

        fields = [
            method,
            str(update),
            ", ".join(f"{row['success']:.3f}" for row in own),
            f"{mean(lambda row: row['success']):.3f}",
            f"{mean(lambda row: row[f'pass_at_{ATTEMPTS}']):.2f}",
            f"{mean(lambda row: row['action_entropy']):.2f}",
            f"{mean(lambda row: row['kl_to_base']):.2f}",
            f"{mean(lambda row: row['loss'] - row['loss_of_base']):.2f}",
            f"{mean(lambda row: row['generated_tokens']):,.0f}",
            f"{mean(lambda row: row['seconds']):,.0f}",
        ]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"of a run, a multiple of {EVERY}")
    parser.add_argument("--out", type=Path, default=Path("results/endurance.csv"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read_rows(arguments.rows)))
        return
    if arguments.updates < EVERY or arguments.updates % EVERY:
        parser.error(f"--updates must be a multiple of {EVERY}: so often a run is evaluated")
    wanted = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    print(table(complete(arguments.out, wanted, arguments.updates)))


if __name__ == "__main__":
    main()
