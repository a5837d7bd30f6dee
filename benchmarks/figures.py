"""What benchmarks hand over to ``make bench``, and the goals: the one place that holds them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple


class Goal(NamedTuple):
    """What a figure is to reach: the last two fields of a ``Figure``."""

    goal: float
    at_least: bool


ENV_RUNNER = Goal(0.9, at_least=True)  # of the speed of bare vLLM that holds as many sequences
SYNC = Goal(3.0, at_least=False)  # copies of the model's bytes in memory, for both weight sets across processes
LEARNER = Goal(1.35, at_least=True)  # times plain torch, with 2,048 tokens a micro-batch
TRL = Goal(2.0, at_least=True)  # times its SFTTrainer, as many tokens a micro-batch; where TRL is installed
EPISODE_MS = Goal(50.0, at_least=False)  # of a scripted episode
ENV_STEPS = Goal(1000.0, at_least=True)  # a second of one core, with an engine that costs nothing
BROWSER_STEPS = Goal(20.0, at_least=True)  # a second, on four browsers
BROWSER_TASKS = Goal(44.0, at_least=True)  # which their scripts always do
LEFT_BEHIND = Goal(0.0, at_least=False)  # processes and open files
RECORDING = Goal(2.0, at_least=False)  # % of an iteration
FIRST_PAINT_MS = Goal(1000.0, at_least=False)
FILTER_MS = Goal(100.0, at_least=False)
PAGE_MB = Goal(5.0, at_least=False)


@dataclass(frozen=True)
class Figure:
    """One figure of a benchmark.

    Attributes:
        name: What was measured, as the table says it.
        value: A ratio, or a number of ``unit``.
        unit: Empty for a ratio.
        goal: What ``value`` is to reach; None where nothing was promised.
        at_least: Whether ``value`` reaches the goal from above, or stays at or below it.
    """

    name: str
    value: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = True

    @property
    def is_reached(self) -> bool | None:
        """None without a goal; a value that is not a number reaches none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def add_option(parser: argparse.ArgumentParser) -> None:
    """Gives a benchmark the option ``--figures``."""
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="append the figures of the table of make bench, as JSON lines"
    )


def hand_over(file: Path | None, *figures: Figure) -> None:
    """Appends figures to what ``--figures`` named; without it nothing is written."""
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(asdict(figure)) + "\n" for figure in figures)


def read(file: Path) -> tuple[Figure, ...]:
    """The figures that were handed over, in their order; none where there is no file."""
    if not file.exists():
        return ()
    return tuple(Figure(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())
