"""Transitions of the record as TensorBoard text, and how numbers are distributed, beside the curves that Tune writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rllib_nlac.diagnostics.in_words import is_refined, state_parts, transition_parts
from rllib_nlac.diagnostics.record import Line
from rllib_nlac.inputs.foreign import fenced_parts

logger = logging.getLogger(__name__)


class Summaries:
    """Writes a TensorBoard file. One that cannot be written ends the writing, with a warning, and not the run.

    Args:
        logdir: Folder of the trial.
    """

    def __init__(self, logdir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._logdir = logdir
        self._writer: Any = None
        with self._tolerant():
            self._writer = SummaryWriter(logdir, filename_suffix=".transitions")

    def write_transition(self, iteration: int, lines: Sequence[Line]) -> None:
        """Shows the first transition whose action was refined, or else the first."""
        if lines:
            line = next((each for each in lines if is_refined(each)), lines[0])
            self._write_text("transition", iteration, transition_parts(line))

    def write_state(self, name: str, iteration: int, line: Line) -> None:
        """Shows one of the states that every evaluation asks the critic about."""
        self._write_text(f"evaluation/{name}", iteration, state_parts(line))

    def write_histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """Shows how numbers are distributed, by their names; those that are not finite are left out."""
        if self._writer is None:
            return
        with self._tolerant():
            for name, numbers in values.items():
                if (finite := numbers[np.isfinite(numbers)]).size:
                    self._writer.add_histogram(name, finite, iteration)
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            with self._tolerant():
                self._writer.close()

    def _write_text(self, name: str, iteration: int, parts: dict[str, str]) -> None:
        if self._writer is None:
            return
        with self._tolerant():
            self._writer.add_text(name, fenced_parts(parts), iteration)
            self._writer.flush()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            logger.warning("no more transitions are shown in TensorBoard: cannot write to %s: %s", self._logdir, error)
