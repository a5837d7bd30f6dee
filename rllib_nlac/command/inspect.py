"""``rllib inspect``: what a run recorded, as a page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from rllib_nlac.checkpoints.storage import reason
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.inspector.bundle import bundle
from rllib_nlac.inspector.page import packed, render
from rllib_nlac.inspector.run import read_run, trial_of


def inspect(paths: list[Path], output: Path | None, open_: bool, most: int, terminal: Terminal) -> None:
    """Reads one or two runs and writes a page of what they recorded.

    Raises:
        FileNotFoundError, ValueError: A path is no run, or the page cannot be written.
    """
    runs = [read_run(trial_of(path.absolute())) for path in paths]
    title = " and ".join(run.name for run in runs)
    page = render(packed(bundle(runs, most)), title)
    file = output or Path(f"{title.replace(' and ', '-and-').replace('/', '-')}.html")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {reason(error)}. Give another --output") from error
    terminal.say(f"Page:        {file} ({len(page) / 1e6:.1f} MB)")
    for run in runs:
        count = sum(line["kind"] == "transition" for line in run.lines)
        terminal.say(
            f"             {run.name}: {count} transitions recorded, {sum(number > 0 for number in run.iterations)} iterations"
        )
    if open_:
        webbrowser.open(file.absolute().as_uri())
