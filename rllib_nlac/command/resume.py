"""Makes an interrupted experiment ready for Tune to go on with: each trial's last whole checkpoint is where Tune looks."""

from __future__ import annotations

import shutil
from pathlib import Path

from ray.tune import ExperimentAnalysis

from rllib_nlac.checkpoints.checkpoint import CheckpointError, DamagedCheckpoint, examine, last_whole, remove_unfinished
from rllib_nlac.command.experiment import Experiment, ExperimentError
from rllib_nlac.command.interrupts import command_to_resume


def make_resumable(folder: Path) -> list[str]:
    """Removes checkpoints whose writing was interrupted, and puts back those that Tune remembers and that are gone.

    Tune copies a checkpoint, deletes the oldest and writes down what it has one after the other, so a process that is killed
    in between leaves a half copy, or a memory of a checkpoint that no longer exists. A checkpoint that is whole and damaged is
    put aside, never removed.

    Args:
        folder: The experiment's folder, with Tune's state and a folder for each trial.

    Returns:
        A line for each thing that was put right.

    Raises:
        ExperimentError: There is no experiment to go on with.
        CheckpointError: A trial has checkpoints, and none of them can be used.
    """
    if not any(folder.glob("experiment_state-*.json")):
        raise ExperimentError(
            f"nothing to resume: {folder} holds no experiment. Give the --storage-path of the interrupted run, or leave out "
            "--resume to start anew"
        )
    lines = []
    for trial in ExperimentAnalysis(str(folder)).trials:
        recorded = Path(trial.checkpoint.path) if trial.checkpoint else None
        lines += _put_right(Path(trial.path), recorded)
    return lines


def _put_right(where: Path, recorded: Path | None) -> list[str]:
    """Of one trial's folder; ``recorded`` is the checkpoint from which Tune will go on."""
    lines, refused = [], ""
    for path in sorted(where.glob("checkpoint_[0-9]*")):
        if remove_unfinished(path):
            lines.append(f"{path}: its writing was interrupted; removed")
    if recorded is None:
        return lines
    for path in sorted(where.glob("checkpoint_[0-9]*"), key=lambda path: (path == recorded, path.name), reverse=True):
        try:
            examine(path)
        except DamagedCheckpoint as error:
            refused = str(error)
            path.replace(path.with_name(f"damaged_{path.name}"))
            lines.append(f"{path}: {refused}; put aside as damaged_{path.name}")
            continue
        if path != recorded:
            shutil.copytree(path, recorded)
            lines.append(f"{recorded}: gone; {path.name} takes its place")
        return lines
    if refused:
        raise CheckpointError(f"no checkpoint in {where} can be used: {refused}")
    return lines


def folder_of(experiment: Experiment) -> Path:
    """Where an experiment's trials are."""
    storage = experiment.tune.get("storage_path")
    return (Path(storage).expanduser().absolute() if storage else Path.home() / "ray_results") / experiment.name


def how_to_go_on(experiment: Experiment) -> list[str]:
    """What a person should know who has interrupted an experiment."""
    folder = folder_of(experiment)
    storage = experiment.tune.get("storage_path") or ""
    if "://" not in storage and not any(folder.glob("experiment_state-*.json")):
        return ["Interrupted before anything was begun: there is nothing to go on with."]
    has_whole = any(last_whole(trial) for trial in folder.glob("*/"))
    since = (
        "from the last checkpoint of each trial"
        if has_whole or "://" in storage
        else ("from the beginning, as no checkpoint was written yet (checkpoint_config: {checkpoint_frequency: 1})")
    )
    return [f"Interrupted. Go on by: {command_to_resume()}", f"                       {since}; all is in {folder}"]
