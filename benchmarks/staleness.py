"""What data that are a few updates old save, and what they cost: ``python -m benchmarks.staleness [--seeds 0 1 2]``.

The quick start and the text house, each with episodes that are played ahead (``max_staleness`` 0, 1, 2, 4) and with waves that
run ahead (``stage_staleness`` 1). All of them have one EnvRunner and one engine in processes of their own, and equally many
episodes and gradient steps; a run is evaluated once, at its end, on the example's tasks. Seconds are those of its iterations,
without the start and that evaluation, on a machine that should do nothing else: with fewer processors than processes there is
little that could be saved.

Every run is a row of the CSV as soon as it has ended, and rows that are there are not run again: a command that is cut short
goes on where it stopped. ``--rows CSV`` prints the table of rows that are kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, apart, read, write

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
WORLDS = {"quick_start": "twenty_questions_nlac", "house": "text_house_nlac"}
WAYS = ("max_staleness=0", "max_staleness=1", "max_staleness=2", "max_staleness=4", "stage_staleness=1")
ATTEMPTS = 4
ASKED = ("world", "way", "seed", "episodes")
FOUND = (
    *("success", "success_low", "success_high", f"pass_at_{ATTEMPTS}"),
    *("seconds", "seconds_an_iteration", "idle_engine", "idle_learner", "staleness_mean"),
)
KINDS = {"world": str, "way": str, "seed": int, "episodes": int, **dict.fromkeys(FOUND, float)}


def config_of(world: str, way: str, seed: int) -> Any:
    """An example's configuration, with one way to run ahead.

    Raises:
        ValueError: The world or the way is not known.
    """
    from rllib_nlac.algorithms import OURS
    from rllib_nlac.command.experiment import load_experiments

    if world not in WORLDS or way not in WAYS:
        raise ValueError(f"no run {world}, {way}: worlds are {', '.join(WORLDS)}, and ways are {', '.join(WAYS)}")
    (example,) = load_experiments(EXAMPLES / f"{WORLDS[world]}.yaml")
    key, _, value = way.partition("=")
    config = OURS[example.run].get_default_config().update_from_dict({**example.config, key: int(value)})
    config.debugging(seed=seed).engines(num_engines=1).env_runners(num_env_runners=1)
    # It is evaluated by hand: within an iteration an evaluation would count as the engine's work.
    config.evaluation(evaluation_interval=1 << 30, evaluation_repeats={"attempts": ATTEMPTS})
    config.evaluation(evaluation_critic={"states": 0, "fixed_states": 0})
    return config.training(rehearsal={"held_out": 0})


def episodes_of(world: str) -> int:
    """How many the example plays."""
    from rllib_nlac.command.experiment import load_experiments

    (example,) = load_experiments(EXAMPLES / f"{WORLDS[world]}.yaml")
    return int(example.stop["env_runners/num_episodes_lifetime"])


def trained(config: Any, episodes: int) -> Row:
    """Trains for so many episodes, and returns the figures of the run."""
    algorithm = config.build_algo()
    try:
        results, seconds = [], []
        for _ in range(episodes // config.episodes_per_iteration):
            started = time.perf_counter()
            results.append(algorithm.train())
            seconds.append(time.perf_counter() - started)
        evaluation = algorithm.evaluate()
    finally:
        algorithm.stop()
    later = slice(1, None) if len(results) > 1 else slice(None)  # the first compiles, and fills what runs ahead
    success, repeated = evaluation["env_runners"], evaluation.get("repeated", {})

    def mean(part: str, name: str) -> float:
        return statistics.fmean(float(result[part][name]) for result in results[later] if name in result.get(part, {}))

    return {
        "success": float(success["success_rate"]),
        "success_low": float(success["success_low"]),
        "success_high": float(success["success_high"]),
        f"pass_at_{ATTEMPTS}": float(repeated.get(f"pass_at_{ATTEMPTS}", "nan")),
        "seconds": sum(seconds),
        "seconds_an_iteration": statistics.median(seconds[later]),
        "idle_engine": mean("idle", "engine"),
        "idle_learner": mean("idle", "learner"),
        "staleness_mean": mean("collection", "staleness_mean"),
    }


def run(asked: Row) -> Row:
    """One run, in a process that does nothing else."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        return trained(config_of(asked["world"], asked["way"], asked["seed"]), asked["episodes"])
    finally:
        ray.shutdown()


run_apart = partial(apart, run)


def read_rows(path: Path) -> list[Row]:
    """What a CSV of this benchmark holds."""
    return read(path, KINDS)


def complete(path: Path, wanted: Sequence[Row], play: Callable[[Row], Row] = run_apart) -> list[Row]:
    """Runs what is wanted and not there; each row is in the CSV as soon as it is known.

    Args:
        path: The CSV.
        wanted: Rows with what is asked, ``ASKED``.
        play: Makes a run.
    """
    known = read_rows(path) if path.exists() else []
    write(path, KINDS, known)
    for asked in wanted:
        if any(row.items() >= asked.items() for row in known):
            continue
        known.append({**asked, **play(asked)})
        write(path, KINDS, known)
        print(table(known[-1:]).splitlines()[-1], flush=True)
    return known


def table(rows: Sequence[Row]) -> str:
    """As Markdown: each world and way, the mean of its seeds, and the success of each."""
    lines = [
        f"| world | way | success | each seed | pass@{ATTEMPTS} | seconds | of an iteration | engine idle | learner idle |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lengths = {(row["world"], row["episodes"]) for row in rows}
    has_several = len(lengths) > len({world for world, _ in lengths})
    for world, way, episodes in dict.fromkeys((row["world"], row["way"], row["episodes"]) for row in rows):
        own = [row for row in rows if (row["world"], row["way"], row["episodes"]) == (world, way, episodes)]
        mean = {name: statistics.fmean(row[name] for row in own) for name in FOUND}
        fields = [
            f"{world}, {episodes} episodes" if has_several else world,
            f"`{way}`",
            f"{mean['success']:.2f}",
            ", ".join(f"{row['success']:.2f}" for row in own),
            f"{mean[f'pass_at_{ATTEMPTS}']:.2f}",
            f"{mean['seconds']:.0f}",
            f"{mean['seconds_an_iteration']:.1f}",
            f"{mean['idle_engine']:.0%}",
            f"{mean['idle_learner']:.0%}",
        ]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, help="of a run; else the example's")
    parser.add_argument("--out", type=Path, default=Path("results/staleness.csv"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    arguments = parser.parse_args()
    if arguments.rows:
        print(table(read_rows(arguments.rows)))
        return
    for world in arguments.worlds if arguments.episodes is not None else ():
        each = config_of(world, WAYS[0], 0).episodes_per_iteration
        if arguments.episodes < each or arguments.episodes % each:
            parser.error(f"--episodes must be a multiple of the {each} of an iteration of {world}")
    wanted = [  # the ways in turn, so that whatever else the machine does meets all of them
        {"world": world, "way": way, "seed": seed, "episodes": arguments.episodes or episodes_of(world)}
        for world in arguments.worlds
        for seed in arguments.seeds
        for way in arguments.ways
    ]
    print(table(complete(arguments.out, wanted)))


if __name__ == "__main__":
    main()
