"""Transitions of the record as TensorBoard text, beside the curves that Tune writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rllib_nlac.diagnostics.in_words import is_refined, transition_parts
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
        if self._writer is None or not lines:
            return
        line = next((each for each in lines if is_refined(each)), lines[0])
        with self._tolerant():
            self._writer.add_text("transition", fenced_parts(transition_parts(line)), iteration)
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            with self._tolerant():
                self._writer.close()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            logger.warning("no more transitions are shown in TensorBoard: cannot write to %s: %s", self._logdir, error)
