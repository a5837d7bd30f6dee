"""The report at the end of a trial: what is known of it is brought together, written, and told in a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rllib_nlac.checkpoints.checkpoint import last_whole
from rllib_nlac.command.errors import lines_of, text_of
from rllib_nlac.command.experiment import Experiment, config_keys, trainable_of
from rllib_nlac.command.resume import own_checkpoint
from rllib_nlac.diagnostics.results import RESULTS, Run, differing, read_results
from rllib_nlac.reporting.report import summary, write_report
from rllib_nlac.reporting.transitions import read_examples


def tell(trial: Any, experiment: Experiment, is_interrupted: bool, error: str = "", restored: Path | None = None) -> list[str]:
    """Writes the report of a trial, and returns what the screen shows of it; no error of this ends a run.

    Args:
        trial: Tune's.
        experiment: Which it belongs to.
        is_interrupted: Whether the command was.
        error: Why it failed, as a traceback; empty where it did not.
        restored: The checkpoint that it began with.
    """
    failed = bool(error) and not (is_interrupted and trial.status != "ERROR")
    end = "failed" if failed else "interrupted" if is_interrupted else "done"
    checkpoint = own_checkpoint(trial)
    return _tell(Path(trial.path), experiment, end, error if failed else "", restored, str(checkpoint) if checkpoint else None)


def tell_of_failure(folder: Path, experiment: Experiment, error: Exception, since: float, restored: Path | None) -> list[str]:
    """The same where Tune itself has failed, of the trials that their folders tell of.

    Args:
        folder: The experiment's.
        experiment: The experiment.
        error: What ended it.
        since: When it began; what was written before is another run's.
        restored: The checkpoint that it began with.
    """
    lines = []
    for file in sorted(folder.glob(f"*/{RESULTS}")):
        if file.stat().st_mtime >= since:
            whole = last_whole(file.parent)
            lines += _tell(file.parent, experiment, "failed", text_of(error), restored, str(whole) if whole else None)
    return lines


def _tell(
    folder: Path, experiment: Experiment, end: str, error: str, restored: Path | None, checkpoint: str | None
) -> list[str]:
    try:
        if not folder.is_dir():
            return [f"Report:      none, as {folder} is no folder of this machine"]
        results, unreadable = read_results(folder / RESULTS)
        default = trainable_of(experiment).get_default_config()
        config = results[-1].get("config") if results else None
        if not isinstance(config, dict):
            config = json.loads(json.dumps(experiment.config, default=str))
        run = Run(
            folder=folder,
            algorithm=experiment.run,
            results=results,
            settings=differing(config, {key: getattr(default, key) for key in config_keys(default)}),
            examples=read_examples(folder),
            # Tune ends interrupted trials in order; its own word is true where one had come to its end before.
            end="done" if end == "interrupted" and results and results[-1].get("done") is True else end,
            error="\n".join(lines_of(error, folder / "error.txt")) if error else "",
            restored=str(restored) if restored is not None else None,
            checkpoint=checkpoint,
            unreadable=unreadable,
        )
        return [*summary(run), f"Report:      {write_report(run)}"]
    except Exception as problem:  # whatever it is: the run has ended as it ended
        return [f"Report:      none, as it could not be written: {type(problem).__name__}: {problem}"]
