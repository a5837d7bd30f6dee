"""Kills and stops processes at random moments of a run, and says what the run made of it.

    python -m research.faults --seed 0 1 2 [--record faults.jsonl] [--most 10]

Each seed gives a round of twenty faults in random order: each kind of process alone and each pair of kinds at the same
moment, once with SIGKILL, once with SIGSTOP and a SIGCONT some seconds later, half of them during training and half during
evaluation. A fault is survived when the iteration during which it happened and the one after it end with all their episodes
collected, a gradient step made, all evaluation episodes played, and engines whose weights have the current version and whose
log-probabilities are the learner's.

A fault takes about twenty seconds. With ``--record`` each verdict is kept in a file: the same command goes on where it ended,
by itself or killed, and sums up all that the file holds. ``--again`` makes those that were not survived once more. Exit code 1
where a fault was not survived.
"""

from __future__ import annotations

import os

# Ray makes its workers give way to everybody else: on a busy machine what was not struck would run into limits of time.
os.environ.setdefault("RAY_worker_niceness", "0")

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from tests.fault_runs import processes, small_config, verdict, wrong_evaluation, wrong_weights

KINDS = ("EnvRunner", "engine", "learner", "evaluation EnvRunner")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STOPPED_S = (1.0, 10.0)  # how long a stopped process stays so, at least and at most


@dataclass(frozen=True)
class Fault:
    """What happens, and when.

    Attributes:
        seed: Seed of its round.
        number: Its place within the round, from 1.
        kinds: The kinds of process that are struck, one process of each.
        signal: Name of the signal.
        phase: "training" or "evaluation".
    """

    seed: int
    number: int
    kinds: tuple[str, ...]
    signal: str
    phase: str


def faults_of(seed: int) -> list[Fault]:
    """The round of a seed."""
    rng = random.Random(seed)
    groups = [*((kind,) for kind in KINDS), *itertools.combinations(KINDS, 2)]
    whats = [(kinds, which.name) for kinds in groups for which in SIGNALS]
    phases = ["training", "evaluation"] * (len(whats) // 2)
    rng.shuffle(whats)
    rng.shuffle(phases)
    return [Fault(seed, i, *what, phase) for i, (what, phase) in enumerate(zip(whats, phases, strict=True), start=1)]


def read_record(path: Path) -> dict[Fault, str]:
    """The faults that a file holds and what was wrong after each. Half a line is left by a command that was killed."""
    faults = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        trouble = row.pop("trouble")
        faults[Fault(**{**row, "kinds": tuple(row["kinds"])})] = trouble
    return faults


def write_record(path: Path, fault: Fault, trouble: str) -> None:
    """Adds a fault to a file."""
    is_torn = path.is_file() and not path.read_text().endswith("\n")
    with path.open("a") as file:
        file.write("\n" * is_torn + json.dumps({**asdict(fault), "trouble": trouble}) + "\n")


def summary(faults: Mapping[Fault, str]) -> list[str]:
    """How many faults were survived, in all and of each sort."""
    made, survived = Counter[str](), Counter[str]()
    for fault, trouble in faults.items():
        for name in ("all", fault.signal, f"in {fault.phase}", "pairs" if len(fault.kinds) > 1 else "single"):
            made[name] += 1
            survived[name] += not trouble
    return [f"{name}: {survived[name]} of {made[name]} survived" for name in sorted(made)]


def strike(pids: Sequence[int], which: signal.Signals, stopped_s: float) -> None:
    """Kills processes, or stops them for a while."""
    for pid in pids:
        os.kill(pid, which)
    if which == signal.SIGSTOP:
        time.sleep(stopped_s)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # what did not answer may have been replaced meanwhile
                os.kill(pid, signal.SIGCONT)


class Attack:
    """One algorithm and what happens to it; another takes its place where a fault ends it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Builds an algorithm and measures its iterations."""
        self.algorithm: LanguageAlgorithm = small_config().build_algo()  # type: ignore[assignment]
        self.begun = {"training": threading.Event(), "evaluation": threading.Event()}
        last: dict[str, float] = {}
        for name, phase in (("training_step", "training"), ("evaluate", "evaluation")):
            setattr(self.algorithm, name, self._observed(getattr(self.algorithm, name), phase, last))
        for _ in range(2):
            self.episodes = int(self.algorithm.train()["env_runners"]["num_episodes_lifetime"])
        self.seconds = dict(last)  # how long each phase takes where nothing happens

    def _observed(self, call: Callable[..., Any], phase: str, last: dict[str, float]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            self.begun[phase].set()
            try:
                return call(*args, **kwargs)
            finally:
                self.begun[phase].clear()
                last[phase] = time.monotonic() - started

        return observed

    def fault(self, fault: Fault) -> str:
        """Makes one fault happen; what was wrong afterwards, or an empty string."""
        struck, over = threading.Event(), False
        rng = random.Random(f"{fault.seed}.{fault.number}")  # by itself, so that a round can be made in pieces
        moment = rng.uniform(0, self.seconds[fault.phase])
        stopped_s = rng.uniform(*STOPPED_S)
        running = processes(self.algorithm)
        victims = [rng.choice(running[kind]) for kind in fault.kinds]

        def run() -> None:
            self.begun[fault.phase].wait()
            time.sleep(moment)
            if not over:
                struck.set()
                strike(victims, signal.Signals[fault.signal], stopped_s)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while True:
                over = struck.is_set()  # the iteration after the fault is judged too
                result = self.algorithm.train()
                trouble = verdict(result, self.episodes) or wrong_evaluation(result) or wrong_weights(self.algorithm)
                self.episodes = int(result["env_runners"]["num_episodes_lifetime"])
                if trouble or over:
                    break
        except Exception as error:
            over = True
            if struck.is_set():
                thread.join()
            self.algorithm.stop()
            self.start()
            return f"{type(error).__name__}: {error}"
        over = True
        if struck.is_set():
            thread.join()
        return trouble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one round of twenty faults for each")
    parser.add_argument("--record", type=Path, help="file of verdicts: what it holds is not made again, and counts")
    parser.add_argument("--again", action="store_true", help="make those once more that were not survived")
    parser.add_argument("--most", type=int, help="end after so many faults")
    arguments = parser.parse_args()
    known = read_record(arguments.record) if arguments.record else {}
    done = [fault for fault, trouble in known.items() if not (trouble and arguments.again)]
    left = [fault for seed in arguments.seed for fault in faults_of(seed) if fault not in done][: arguments.most]
    if left:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        attack = Attack()
        for fault in left:
            started = time.monotonic()
            trouble = attack.fault(fault)
            known[fault] = trouble
            if arguments.record:
                write_record(arguments.record, fault, trouble)
            what = f"{fault.seed}.{fault.number:<3d} {fault.signal} {' + '.join(fault.kinds)}"
            print(f"{what:56s} {fault.phase:11s} {trouble or 'survived'} {time.monotonic() - started:6.1f} s", flush=True)
        attack.algorithm.stop()
        ray.shutdown()
    print(*summary(known), sep="\n", flush=True)
    sys.exit(any(known.values()))


if __name__ == "__main__":
    main()
