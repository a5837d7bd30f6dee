"""What a person reads in a terminal: every command prints through here, and no text can do more than be read.

Error texts, names of files and trials, and what environments and models say come from elsewhere. Brackets in them are no
markup, ``:smile:`` is no picture, and what would move the cursor, change the window's title or turn the direction of writing
is shown as an escape.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rllib_nlac.activity import Doing, activity, read_from_ray
from rllib_nlac.inputs.foreign import visible

INTERVAL_S = 0.5  # between two looks at what goes on
MOST_TRIALS = 16  # more than a line shows
QUIET_S = 10.0  # where nothing can be rewritten, what goes on is printed after so long a silence
BAR_CELLS = 10
RATE_S = 300.0  # the rate of a stage is its mean over so long
_ERASE = "\r\x1b[2K"


class Terminal:
    """Prints plain texts and small tables, and below them one line that is rewritten, where the terminal can do that.

    Args:
        stderr: Whether to the standard error, in place of the standard output.
    """

    def __init__(self, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr)
        self._lock = threading.RLock()
        self._line = ""  # that is rewritten, as it stands there
        self._printed = time.monotonic()
        self.may_rewrite = True  # False where others print, too, as workers do with --verbose

    def say(self, text: object = "", style: str = "") -> None:
        """Prints a text as it is, in lines as long as they are.

        Args:
            text: Anything; what is no text is printed as ``str`` has it.
            style: One of rich's, as "red" or "bold".
        """
        with self.aside():
            self._console.print(self._text(text, style), soft_wrap=True, highlight=False)

    def status(self, text: str, is_news: bool = False) -> None:
        """Shows what goes on: in the last line, which is rewritten, or in a line of its own where that cannot be.

        Args:
            text: What goes on; empty where nothing does.
            is_news: Whether it is worth a line of its own at once; else one is printed when nothing was for ten seconds.
        """
        with self._lock:
            if self.rewrites:
                self._rewrite(text)
            elif text and (is_news or time.monotonic() - self._printed > QUIET_S):
                self.say(text, "dim")

    @property
    def rewrites(self) -> bool:
        """Whether there is a person before it, and not a file or a pipe."""
        isatty = getattr(self._console.file, "isatty", None)
        return self.may_rewrite and isatty is not None and bool(isatty()) and not self._console.is_dumb_terminal

    @property
    def encoding(self) -> str:
        """Name of the encoding of what is printed."""
        return self._console.encoding

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within it others may print: the line that is rewritten stands below what they did."""
        with self._lock:
            line = self._line
            self._rewrite("")
            try:
                yield
            finally:
                self._printed = time.monotonic()
                self._rewrite(line)

    def _rewrite(self, text: str) -> None:
        line = " ".join(visible(text, self._console.encoding).split())
        width = max(self._console.width - 1, 0)
        line = line if cell_len(line) <= width else set_cell_size(line, width).rstrip()
        if line != self._line:
            self._console.file.write(f"{_ERASE}{line}\r")  # what another prints begins at its beginning
            self._console.file.flush()
            self._line = line

    def rule(self, title: str) -> None:
        """Prints a line with a title in it."""
        with self.aside():
            self._console.rule(self._text(title))

    def rows(self, rows: Sequence[Sequence[str]], head: Sequence[str] = (), title: str = "") -> None:
        """Prints a table: with a head it has no lines, without it is a box with a title."""
        if head:
            table = Table(box=None, pad_edge=False)
            for name in head:
                table.add_column(self._text(name))
        else:
            table = Table(title=self._text(title) if title else None, show_header=False)
        for row in rows:
            table.add_row(*map(self._text, row))
        with self.aside():
            self._console.print(table)

    def _text(self, text: object, style: str = "") -> Text:
        return Text(visible(str(text), self._console.encoding), style=style)


class Waiting:
    """While it is entered, the terminal's last line says what goes on: in this process, and in the trials that run.

    What is counted has a bar, where the line can be rewritten, a rate and the time left. The estimates are rich's.

    Args:
        terminal: Where to say it.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._sweep: Doing | None = None
        self._trials: dict[str, str] = {}  # the folder of each that runs, and how to call it beside others
        self._since: dict[str, tuple[str, float]] = {}  # of each the stage, and when it was seen first
        # It turns a bar into a text, of characters that the terminal has.
        paper = io.TextIOWrapper(io.BytesIO(), encoding=terminal.encoding)
        self._drawn = Console(file=paper, width=BAR_CELLS, color_system=None)
        self._progress = Progress(console=self._drawn, auto_refresh=False, speed_estimate_period=RATE_S)
        self._tasks: dict[str, Task] = {}  # of each what its stage counts
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * INTERVAL_S)
        activity.turn_to("")
        self._terminal.status("")

    def turn_to(self, stage: str) -> None:
        """Says what this process does; empty where it waits for trials."""
        activity.turn_to(stage)
        self._show(is_news=True)

    def watch(self, trials: Mapping[str, str], sweep: Doing | None = None) -> None:
        """Which trials run or are about to, from now on.

        Args:
            trials: The folder of each, and how to call it beside others.
            sweep: How many trials of a sweep have ended; None where there is one trial.
        """
        self._trials, self._sweep = dict(trials), sweep

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # what cannot be shown is not worth a run
            while not self._ended.wait(INTERVAL_S):
                self._show()

    def _show(self, is_news: bool = False) -> None:
        with self._lock:
            trials, own = self._trials, activity.now
            if own.stage or not trials:
                self._terminal.status(self._timed("", own) if own.stage else "", is_news)
            else:
                self._show_trials(trials)

    def _show_trials(self, trials: Mapping[str, str]) -> None:
        known = {folder: read_from_ray(folder) for folder in list(trials)[:MOST_TRIALS]}
        doing = {folder: now for folder, now in known.items() if now is not None and now.stage}
        if not doing:  # the first of them
            doing = {folder: Doing("loading the libraries in the trial's process") for folder in list(trials)[:1]}
        is_news = len(doing) == 1 and any(
            not now.iteration and self._since.get(folder, ("", 0.0))[0] != _name(now) for folder, now in doing.items()
        )
        sweep = self._sweep
        texts = [self._timed(folder, now, has_bar=sweep is None and len(trials) == 1) for folder, now in doing.items()]
        if len(trials) > 1 or sweep is not None:
            texts = [f"{trials[folder]} {text}" for folder, text in zip(doing, texts, strict=True)]
        if sweep is not None:
            texts.insert(0, self._timed("the sweep", sweep))
        if not self._ended.is_set():
            self._terminal.status(" | ".join(texts), is_news)

    def _timed(self, who: str, doing: Doing, has_bar: bool = True) -> str:
        """A stage, with a bar where it counts and can have one, and the seconds that it has taken and will take."""
        stage, now = _name(doing), time.monotonic()
        before, since = self._since.get(who, ("", now))
        if before != stage or who not in self._tasks:
            since = now
            self._since[who] = (stage, since)
            if who in self._tasks:
                self._progress.remove_task(self._tasks[who].id)
            self._progress.add_task("", total=None)
            self._tasks[who] = self._progress.tasks[-1]
        task = self._tasks[who]
        self._progress.update(task.id, completed=doing.done, total=doing.total or None)
        seconds, notes = int(now - since), []
        if seconds >= 2:
            notes.append(f"{seconds} s")
        if doing.total and task.speed:
            notes += [f"{task.speed:.3g}/s", f"{TimeRemainingColumn(compact=True).render(task)} left"]
        bar = f"{self._bar(task)} " if has_bar and doing.total and self._terminal.rewrites else ""
        return f"{bar}{doing} ..." + (f" ({', '.join(notes)})" if notes else "")

    def _bar(self, task: Task) -> str:
        with self._drawn.capture() as captured:
            self._drawn.print(BarColumn(BAR_CELLS).render(task), end="")
        return captured.get().strip().ljust(BAR_CELLS, ".")


def _name(doing: Doing) -> str:
    return f"{doing.iteration} {doing.stage}"


class VisibleHandler(logging.StreamHandler):
    """Logs to the standard error, above the line that a terminal rewrites; control characters are written out."""

    def __init__(self, beside: Terminal) -> None:
        super().__init__()
        self._beside = beside

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        with self._beside.aside():
            super().emit(record)


terminal = Terminal()
