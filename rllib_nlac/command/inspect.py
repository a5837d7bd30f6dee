"""``rllib inspect``: what a run recorded, as a page, followed while it goes on, or in other programs' formats."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_nlac.checkpoints.storage import reason
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.inspector.bundle import bundle
from rllib_nlac.inspector.page import packed, render
from rllib_nlac.inspector.run import Run, RunReader, trial_of

FORMATS = ("html", "atif", "inspect")


def inspect(
    paths: list[Path], output: Path | None, kind: str, open_: bool, follow: bool, port: int, most: int, terminal: Terminal
) -> None:
    """Reads one or two runs or checkpoints and writes or serves what they recorded.

    Raises:
        FileNotFoundError, ValueError: A path is no run, or the options do not go together.
        CheckpointError: A checkpoint is damaged.
    """
    if kind not in FORMATS:
        raise ValueError(f"--format is {kind!r} and must be one of {', '.join(FORMATS)}")
    if kind != "html" and (follow or open_ or len(paths) > 1):
        raise ValueError(f"--format {kind} writes the episodes of one run: leave out --follow, --open and the second run")
    if follow and output is not None:
        raise ValueError("--follow serves the page and writes none: leave out --output")
    readers = [reader_of(path) for path in paths]
    if kind != "html":
        _export(readers[0][1](), kind, output, terminal)
        return
    title = " and ".join(name for name, _, _ in readers)
    if follow:
        _follow(readers, title, open_, port, most, terminal)
        return
    runs = [read() for _, read, _ in readers]
    page = render(packed(bundle(runs, most)), title)
    file = output or Path(f"{title.replace(' and ', '-and-').replace('/', '-')}.html")
    _write(file, page)
    terminal.say(f"Page:        {file} ({len(page) / 1e6:.1f} MB)")
    for run in runs:
        told = "of the replay buffer" if run.is_buffer else "recorded"
        count = sum(line["kind"] == "transition" for line in run.lines)
        terminal.say(f"             {run.name}: {count} transitions {told}, {len(run.iterations)} iterations")
    if open_:
        webbrowser.open(file.absolute().as_uri())


def reader_of(path: Path) -> tuple[str, Callable[[], Run], Callable[[], str]]:
    """A run's name, what reads it and what tells that there is news: of a checkpoint or of a trial."""
    if (path / "rllib_checkpoint.json").is_file():
        from rllib_nlac.inspector.buffer import read_checkpoint  # RLlib, which takes ten seconds

        return f"{path.absolute().parent.name}/{path.name}", lambda: read_checkpoint(path.absolute()), lambda: ""
    reader = RunReader(trial_of(path.absolute()))
    return reader.folder.name, reader.read, reader.stamp


def _follow(
    readers: list[tuple[str, Callable[[], Run], Callable[[], str]]],
    title: str,
    open_: bool,
    port: int,
    most: int,
    terminal: Terminal,
) -> None:
    from rllib_nlac.inspector.follow import Server, Source

    source = Source(
        lambda: " ".join(["of", *(stamp() for *_, stamp in readers)]),
        lambda: packed(bundle([read() for _, read, _ in readers], most)),
        title,
    )
    with Server(source, port) as server:
        terminal.say(f"Page:        {server.address}   (Ctrl+C ends it)")
        if open_:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _export(run: Run, kind: str, output: Path | None, terminal: Terminal) -> None:
    """Writes the recorded evaluation episodes into a folder."""
    if not run.episodes:
        raise ValueError(
            f"{run.name} recorded no evaluation episodes: train with evaluation_interval and record: {{episodes: ...}}"
        )
    if kind == "atif":
        from rllib_nlac.inspector.atif import trajectories as files_of
    else:
        from rllib_nlac.inspector.inspect_log import logs as files_of
    files: dict[str, dict[str, Any]] = files_of(run)
    folder = output or Path(f"{run.name}-{kind}")
    for name, content in files.items():
        _write(folder / f"{name}.json", json.dumps(content, indent=1, allow_nan=False).encode())
    terminal.say(f"Written:     {len(files)} files of {len(run.episodes)} episodes in {folder}")
    if kind == "inspect":
        terminal.say(f"Read them:   inspect view --log-dir {folder}   (in an environment of its own: pip install inspect_ai)")


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {reason(error)}. Give another --output") from error
