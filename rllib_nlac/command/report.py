"""The report at the end of a trial: what is known of it is brought together, written, and told in a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rllib_nlac.command.experiment import Experiment, config_keys, trainable_of
from rllib_nlac.command.failures import lines_of
from rllib_nlac.reporting.report import summary, write_report
from rllib_nlac.reporting.results import Run, differing, read_examples, read_results


def tell(trial: Any, experiment: Experiment, is_interrupted: bool, error: str = "", restored: Path | None = None) -> list[str]:
    """Writes the report of a trial, and returns what the screen shows of it; no error of this ends a run.

    Args:
        trial: Tune's.
        experiment: Which it belongs to.
        is_interrupted: Whether the command was.
        error: Why it failed, as a traceback; empty where it did not.
        restored: The checkpoint that it began with.
    """
    try:
        if not Path(trial.path).is_dir():
            return [f"Report:      none, as {trial.path} is no folder of this machine"]
        run = run_of(trial, experiment, is_interrupted, error, restored)
        return [*summary(run), f"Report:      {write_report(run)}"]
    except Exception as problem:  # whatever it is: the run has ended as it ended
        return [f"Report:      none, as it could not be written: {type(problem).__name__}: {problem}"]


def run_of(trial: Any, experiment: Experiment, is_interrupted: bool, error: str, restored: Path | None) -> Run:
    """What is known of a trial."""
    folder = Path(trial.path)
    results, unreadable = read_results(folder / "result.json")
    default = trainable_of(experiment).get_default_config()
    config = results[-1].get("config") if results else None
    if not isinstance(config, dict):
        config = json.loads(json.dumps(dict(trial.config), default=str))
    done = trial.status == "TERMINATED"
    failed = bool(error) and not (is_interrupted and trial.status != "ERROR")
    return Run(
        folder=folder,
        algorithm=experiment.run,
        results=results,
        settings=differing(config, {key: getattr(default, key) for key in config_keys(default)}),
        examples=read_examples(folder),
        end="failed" if failed else "interrupted" if is_interrupted and not done else "done",
        error="\n".join(lines_of(error, folder / "error.txt")) if failed else "",
        restored=str(restored) if restored is not None else None,
        checkpoint=trial.checkpoint.path if trial.checkpoint else None,
        unreadable=unreadable,
    )
