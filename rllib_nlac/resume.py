"""Makes an interrupted experiment ready for Tune to go on with: each trial's last whole checkpoint is where Tune looks."""

from __future__ import annotations

import shutil
from pathlib import Path

from ray.tune import ExperimentAnalysis

from rllib_nlac.checkpoint import MANIFEST, CheckpointError, read_manifest
from rllib_nlac.experiment import Experiment, ExperimentError
from rllib_nlac.interrupts import command_to_resume


def make_resumable(folder: Path) -> list[str]:
    """Removes checkpoints whose writing was interrupted, and puts back those that Tune remembers and that are gone.

    Tune copies a checkpoint, deletes the oldest and writes down what it has one after the other, so a process that is killed
    in between leaves a half copy, or a memory of a checkpoint that no longer exists.

    Args:
        folder: The experiment's folder, with Tune's state and a folder for each trial.

    Returns:
        A line for each thing that was put right.

    Raises:
        ExperimentError: There is no experiment to go on with.
    """
    if not any(folder.glob("experiment_state-*.json")):
        raise ExperimentError(
            f"nothing to resume: {folder} holds no experiment. Give the --storage-path of the interrupted run, or leave out "
            "--resume to start anew"
        )
    lines = []
    for trial in ExperimentAnalysis(str(folder)).trials:
        where = Path(trial.path)
        whole: list[Path] = []
        for path in sorted(where.glob("checkpoint_[0-9]*")):
            if _is_whole(path):
                whole.append(path)
            else:
                shutil.rmtree(path)
                lines.append(f"{path}: its writing was interrupted; removed")
        recorded = Path(trial.checkpoint.path) if trial.checkpoint else None
        if recorded is not None and whole and not recorded.exists():
            shutil.copytree(whole[-1], recorded)
            lines.append(f"{recorded}: gone; {whole[-1].name} takes its place")
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
    whole = [path for path in sorted(folder.glob("*/checkpoint_[0-9]*")) if _is_whole(path)]
    since = "from the last checkpoint of each trial" if whole or "://" in storage else (
        "from the beginning, as no checkpoint was written yet (checkpoint_config: {checkpoint_frequency: 1})"
    )  # fmt: skip
    return [f"Interrupted. Go on by: {command_to_resume()}", f"                       {since}; all is in {folder}"]


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint is complete; of RLlib's own algorithms, which write no manifest, as far as can be seen."""
    if not (path / MANIFEST).exists() and (path / "algorithm_state.pkl").exists():
        return True
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True
