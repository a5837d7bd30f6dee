"""Where a bootstrap is needed: ``python -m research.stitching [--seeds 0 1 2] [--methods METHOD ...] [--logs apart joined]``.

Every method learns from the same log of the world ``Crossing`` and is evaluated from its near entrance. In the log "apart" no
dialogue from there has won; wins begin at the far entrance, and meet the others' ways at the crossing. Whoever wins from the
near entrance has joined parts of both. The log "joined" is of the same player, with its wins from the near entrance. Each
seed has a layout, a log and a training of its own; all methods begin with one base model, which the first call builds.

A run's rows are in the CSV as soon as it has ended, and runs that are there are not run again: a command that is cut short goes
on where it stopped. ``--rows CSV`` prints the table of rows that are kept, and draws them where ``--picture`` says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)

import numpy as np

from research.crossing import DOORS, ENTRANCES, Crossing, make_layout
from research.rows import Row, read, write
from research.svg import Chart, Line
from research.tiny.build import build
from research.tiny.worlds import CROSSING
from rllib_nlac.ablations import FrozenCritic
from rllib_nlac.baselines.rft import RFT, RFTConfig
from rllib_nlac.baselines.scalar_critic import ScalarCritic
from rllib_nlac.nlac import NLAC
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.replay.dialogues import DialogueData

LOGS = ("apart", "joined")
DIALOGUES = 256  # from each entrance
SKILL = 0.5  # share of a logged dialogue's doors that lead on, beside those that do by chance
ITERATIONS, EVERY = 24, 3
FUTURES = 24  # of each door that the critic is asked about
FOUND = ("success", "crossing", "right", "wrong", "seconds")
KINDS = {"log": str, "method": str, "seed": int, "iteration": int, **dict.fromkeys(FOUND, float)}
PICTURED = ("NLAC, one step", "NLAC, three steps", "NLAC, Monte Carlo", "RFT", "scalar critic")
Step = tuple[str, str, str]  # what is seen, the action, the reply


class LoggedRFTConfig(RFTConfig):
    """RFT on a log instead of its own episodes."""

    learns_from_logs = True

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or LoggedRFT)
        self.offline_data_class = DialogueData


class LoggedRFT(RFT):
    """Imitates the log's winning dialogues, all of them in every iteration."""

    @classmethod
    def get_default_config(cls) -> RFTConfig:
        return LoggedRFTConfig()

    def setup(self, config: Any) -> None:
        super().setup(config)
        self.log = self.offline_data.episodes(self.chat, self.config.prompts_for("Crossing"))

    def collect(self) -> list[Any]:
        return self.log


NLAC_SETTINGS = {"preset": "long_horizon", "num_epochs": 2, "lr": 2e-3, "tau": 0.1}
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "NLAC, one step": (NLAC, {**NLAC_SETTINGS, "n_step": 1}),
    "NLAC, three steps": (NLAC, {**NLAC_SETTINGS, "n_step": 3}),
    "NLAC, Monte Carlo": (NLAC, {**NLAC_SETTINGS, "n_step": 1000}),
    "NLAC, one step, critic frozen": (FrozenCritic, {**NLAC_SETTINGS, "n_step": 1}),
    # As many gradient steps as NLAC's or more: there are some 200 turns to imitate.
    "RFT": (LoggedRFT, {"lr": 2e-3, "num_epochs": 2}),
    "scalar critic": (ScalarCritic, {"lr": 2e-3, "num_epochs": 2, "tau": 0.1, "n_step": 1}),
}


# The log, and what can be known from it.


def write_log(path: Path, seed: int, joined: bool) -> None:
    """Plays ``DIALOGUES`` games from either entrance of a layout, and keeps them in the form of logged dialogues."""
    rng, rows = np.random.default_rng([seed, 71]), []
    for entrance in ENTRANCES:
        env, kept = Crossing(layout=seed, entrance=entrance), 0
        while kept < DIALOGUES:
            row = played(env, rng)
            if joined or entrance == "far" or not row["success"]:
                rows.append({**row, "entrance": entrance})
                kept += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def played(env: Crossing, rng: np.random.Generator) -> Row:
    """A game: the door that leads on with a chance of ``SKILL``, else any."""
    observation, info = env.reset(seed=0)
    messages, ended = [{"role": "user", "content": observation}], False
    rewards: list[float] = []
    while not ended:
        skilled = env.room is None or rng.random() < SKILL
        action = env.expert_action() if skilled else f"go {DOORS[int(rng.integers(len(DOORS)))]}"
        observation, reward, terminated, truncated, info = env.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        rewards.append(reward)
        ended = terminated or truncated
    outcome = {"terminated": terminated, "truncated": truncated, "success": info["success"]}
    return {"messages": messages, "rewards": rewards, **outcome, "task_id": info["task_id"]}


def steps_of(row: Row) -> Iterator[Step]:
    """A logged dialogue's steps, with what a model sees of what came before: the latest action and its reply."""
    said = [message["content"] for message in row["messages"]]
    for t in range(0, len(said) - 1, 2):
        yield "\n".join(said[max(t - 1, 0) : t + 1]), said[t + 1], said[t + 2]


# The runs.


def config_of(method: str, seed: int, log: Path, model: Path) -> Any:
    """A run's configuration."""
    kind, settings = METHODS[method]
    env: dict[str, Any] = {"env": "Crossing", "env_config": {"layout": seed}}
    common = {
        "input_": str(log),
        "language_model": str(model),
        "prompts": "compact",
        "history_turns": 1,
        "max_action_tokens": 8,
        "max_tokens_per_micro_batch": 4096,
        "train_batch_size_per_learner": 128,
        "minibatch_size": 32,
        "seed": seed,
        "evaluation_interval": EVERY,
        "evaluation_duration": 128,
        "evaluation_duration_unit": "episodes",
        "evaluation_config": env,
        "evaluation_repeats": {"tasks": 0},
        "num_cpus_for_main_process": 1,
        **(env if kind is LoggedRFT else {}),
        **settings,
    }
    if issubclass(kind, NLAC):
        common |= {"max_future_tokens": 16, "max_critique_tokens": 32, "record": {"transitions": 0, "episodes": 0}}
        common |= {"evaluation_critic": {"states": 0, "fixed_states": 0}}
    return kind.get_default_config().update_from_dict(common)  # type: ignore[attr-defined]


def asked_doors(algorithm: Any, seed: int) -> tuple[Any, list[Any]]:
    """The logged step through the near entrance's right door, and one through each wrong door."""
    layout, found = make_layout(seed), {}
    for episode in algorithm.local_replay_buffer.episodes:
        if len(episode) > 1 and episode.get_observations(1) == f"{layout.name(0)}." and episode.get_actions(1) not in found:
            found[episode.get_actions(1)] = transition_at("Crossing", episode, 1)
    right = found.pop(f"go {DOORS[layout.right[0]]}")
    return right, list(found.values())


def says(algorithm: Any, seed: int) -> tuple[float, float]:
    """What the critic expects of the right door at the start, and of the wrong ones: the share of futures that win, or Q."""
    if isinstance(algorithm, LoggedRFT):
        return float("nan"), float("nan")
    right, wrong = asked_doors(algorithm, seed)
    if isinstance(algorithm, ScalarCritic):
        values = algorithm._q([t.generation for t in (right, *wrong)], target=False).tolist()
    else:
        futures = algorithm.examination.examiner(FUTURES).predict([right, *wrong])
        values = [statistics.fmean(future.success for future in own) if own else 0.0 for own in futures]
    return values[0], statistics.fmean(values[1:])


def trained(asked: Row, folder: Path, iterations: int) -> Iterator[Row]:
    """Trains, and gives a row for each evaluation."""
    log = folder / "logs" / f"{asked['log']}_{asked['seed']}.jsonl"
    if not log.exists():
        write_log(log, asked["seed"], asked["log"] == "joined")
    algorithm = config_of(asked["method"], asked["seed"], log, folder / "model").build_algo()
    started = time.perf_counter()
    try:
        for iteration in range(1, iterations + 1):
            result = algorithm.train()
            if iteration % EVERY == 0:
                right, wrong = says(algorithm, asked["seed"])
                evaluation = result["evaluation"]["env_runners"]
                yield {
                    **asked,
                    "iteration": iteration,
                    "success": float(evaluation["success_rate"]),
                    "crossing": float(evaluation["subgoals"]["crossing"]),
                    "right": round(right, 4),
                    "wrong": round(wrong, 4),
                    "seconds": round(time.perf_counter() - started, 1),
                }
    finally:
        algorithm.stop()


def read_rows(path: Path) -> list[Row]:
    """What a CSV of this benchmark holds."""
    return read(path, KINDS)


def complete(path: Path, wanted: Sequence[Row], iterations: int, run: Callable[[Row], Iterator[Row]]) -> list[Row]:
    """Runs what is wanted and not there, or shorter; a run's rows are written when it has ended."""
    known = read_rows(path) if path.exists() else []
    for asked in wanted:
        if any(row.items() >= {**asked, "iteration": iterations}.items() for row in known):
            continue
        own = []
        for row in run(asked):
            own.append(row)
            told = f"{row['success']:.2f}, crossing {row['crossing']:.2f}, critic {row['right']:.2f} / {row['wrong']:.2f}"
            print(f"{asked['log']}, {asked['method']}, seed {asked['seed']}, iteration {row['iteration']}: {told}", flush=True)
        known = [row for row in known if not row.items() >= asked.items()] + own
        write(path, KINDS, known)
    return known


# What came of them.


def table(rows: Sequence[Row]) -> str:
    """As Markdown: each log and method after the last iteration that all its seeds have come to."""
    lines = [
        "| log | method | iterations | success, each seed | mean | reached the crossing | critic, right door | wrong doors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for log, method in dict.fromkeys((row["log"], row["method"]) for row in rows):
        own = [row for row in rows if (row["log"], row["method"]) == (log, method)]
        last = min(max(row["iteration"] for row in own if row["seed"] == seed) for seed in {row["seed"] for row in own})
        own = sorted((row for row in own if row["iteration"] == last), key=lambda row: row["seed"])
        mean = {name: statistics.fmean(row[name] for row in own) for name in ("success", "crossing", "right", "wrong")}
        said = [f"{mean[name]:.2f}" if np.isfinite(mean[name]) else "" for name in ("right", "wrong")]
        seeds = ", ".join(f"{row['success']:.2f}" for row in own)
        fields = [log, method, str(last), seeds, f"{mean['success']:.2f}", f"{mean['crossing']:.2f}", *said]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def picture(rows: Sequence[Row], log: str = "apart") -> str:
    """SVG: success over training, mean and range over seeds."""
    lines = []
    for method in PICTURED:
        if not (own := [row for row in rows if (row["log"], row["method"]) == (log, method)]):
            continue
        points = sorted({row["iteration"] for row in own})
        at = [[row["success"] for row in own if row["iteration"] == point] for point in points]
        curve = [(float(point), statistics.fmean(values)) for point, values in zip(points, at, strict=True)]
        lines.append(Line(method.removeprefix("NLAC, "), curve, [(min(values), max(values)) for values in at]))
    title = "Success from the near entrance; no logged dialogue from there won"
    return Chart(title, "iterations", "success in evaluation", lines, y_range=(0.0, 1.0)).svg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"a multiple of {EVERY}")
    parser.add_argument("--out", type=Path, default=Path("results/stitching"))
    parser.add_argument("--rows", type=Path, help="run nothing, and print the table of these rows")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw success over training")
    arguments = parser.parse_args()
    if arguments.iterations < EVERY or arguments.iterations % EVERY:
        parser.error(f"--iterations must be a multiple of {EVERY}: after each {EVERY} there is an evaluation")
    if arguments.rows:
        rows = read_rows(arguments.rows)
    else:
        import ray

        folder = arguments.out.absolute()
        if not (folder / "model" / "built").exists():
            build(folder / "model", CROSSING)
            (folder / "model" / "built").touch()
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        wanted = [  # the methods in turn, so that whatever else the machine does meets all of them
            {"log": log, "method": method, "seed": seed}
            for log in arguments.logs
            for seed in arguments.seeds
            for method in arguments.methods
        ]
        rows = complete(
            folder / "stitching.csv", wanted, arguments.iterations, lambda asked: trained(asked, folder, arguments.iterations)
        )
        ray.shutdown()
    print(table(rows))
    if arguments.picture:
        arguments.picture.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
