"""Figures of speed beside their goals, in one table: ``make bench``, or

    python -m benchmarks.bench [--only NAME ...]

Runs one benchmark after the other, each in a process of its own and of a size by which all together take less than ten minutes
on two cores that have nothing else to do. Their own text goes to stderr as they print it; the table to stdout, as Markdown. One
that fails or does not end is named with its last lines, and the others go on; then the exit code is 1. A goal that is missed is
no failure: figures depend on the machine, so its cores and its load stand above the table.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, read

LIMIT_S = 600.0  # of one benchmark
FAREWELL_S = 20.0  # for one that is too late to stop what it started
LAST_LINES = 20
COLUMNS = ("what", "measured", "goal", "reached", "seconds", "command")


@dataclass(frozen=True)
class Benchmark:
    """One of the table: its module's name, and the options that make it short: less of the same."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", f"benchmarks.{self.name}", *self.options])


@dataclass(frozen=True)
class Outcome:
    """What came of a benchmark.

    Attributes:
        figures: What it handed over, also before a failure.
        seconds: That it took, its start included.
        failure: Why it failed; empty where it did not.
        last_lines: Last lines that it printed.
    """

    figures: tuple[Figure, ...]
    seconds: float
    failure: str = ""
    last_lines: str = ""


BENCHMARKS = (
    Benchmark("environments"),
    Benchmark("engine"),
    Benchmark("learner", ("--budgets", "2048")),
    Benchmark("sync", ("--rank", "0")),
    Benchmark("browser", ("--episodes", "100", "--seeds", "5")),
    Benchmark("inspector"),
)


def stop(process: subprocess.Popen) -> None:
    """Ends a process, which may first end those that it started."""
    process.terminate()
    try:
        process.wait(FAREWELL_S)
    except subprocess.TimeoutExpired:
        process.kill()


def run(command: Sequence[str], limit: float = LIMIT_S) -> Outcome:
    """Runs a benchmark, and passes on what it prints.

    Args:
        command: Its words; ``--figures FILE`` is added.
        limit: Seconds after which it is stopped.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench_") as scratch:
        figures, log = Path(scratch) / "figures.jsonl", Path(scratch) / "log.txt"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # By way of a file: a pipe would be held open by whatever a benchmark that was stopped leaves behind.
        with log.open("wb") as out, log.open(encoding="utf-8", errors="replace") as text:
            words = [*command, "--figures", str(figures)]
            with subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
                while process.poll() is None and time.monotonic() - started < limit:
                    print(text.read(), end="", file=sys.stderr, flush=True)
                    time.sleep(0.1)
                is_late = process.poll() is None
                if is_late:
                    stop(process)
            print(text.read(), end="", file=sys.stderr, flush=True)
        found = read(figures)
        last_lines = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
    if is_late:
        failure = f"did not end within {limit:.0f} s"
    elif process.returncode:
        failure = f"exit code {process.returncode}"
    else:
        failure = "" if found else "it handed over no figures"
    return Outcome(found, time.monotonic() - started, failure, last_lines)


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def fields(figure: Figure) -> list[str]:
    """The first four columns of its row."""
    goal = "-" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {number(figure.goal)} {figure.unit}"
    reached = {None: "-", True: "yes", False: "no"}[figure.is_reached]
    return [figure.name, f"{number(figure.value)} {figure.unit}".rstrip(), goal.rstrip(), reached]


def table(outcomes: dict[Benchmark, Outcome]) -> str:
    """All figures as Markdown; seconds and command stand in the first row of a benchmark."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for benchmark, outcome in outcomes.items():
        rows = [fields(figure) for figure in outcome.figures]
        if outcome.failure:
            rows.append([f"**{benchmark.name} failed**: {outcome.failure}", "-", "-", "no"])
        for place, row in enumerate(rows):
            row += [f"{outcome.seconds:.0f}", f"`{benchmark.command}`"] if place == 0 else ["", ""]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Prints all of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    arguments = parser.parse_args(words)
    load = os.getloadavg()[0]
    outcomes: dict[Benchmark, Outcome] = {}
    for benchmark in BENCHMARKS:
        if benchmark.name in arguments.only:
            print(f"\n{benchmark.command}", file=sys.stderr, flush=True)
            outcomes[benchmark] = run([sys.executable, "-m", f"benchmarks.{benchmark.name}", *benchmark.options])
    failed = {benchmark.name: outcome for benchmark, outcome in outcomes.items() if outcome.failure}
    for name, outcome in failed.items():
        print(f"\n{name} failed: {outcome.failure}. Its last lines:\n{outcome.last_lines}", file=sys.stderr)
    print(file=sys.stderr, flush=True)
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    print(f"{os.cpu_count()} cores, load {load:.1f} before the first began, {seconds:.0f} s in all\n\n{table(outcomes)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
