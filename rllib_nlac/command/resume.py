"""Makes an interrupted experiment ready for Tune to go on with: each trial's last whole checkpoint is where Tune looks."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, fs
from ray import tune
from ray.tune import ExperimentAnalysis

from rllib_nlac.checkpoints.checkpoint import (
    MANIFEST,
    NAMED_FILES,
    PROMPTS,
    CheckpointError,
    DamagedCheckpoint,
    examine,
    last_whole,
    read_manifest,
    remove_unfinished,
)
from rllib_nlac.checkpoints.named_files import changes, named_files
from rllib_nlac.checkpoints.start import starting_point
from rllib_nlac.command.experiment import Experiment, ExperimentError, checkpoint_config, trainable_of
from rllib_nlac.command.search import varied

SAMPLES = "--num-samples"
STATE = "experiment_state-"  # begins the name of what Tune knows of an experiment


def those_begun(experiments: Sequence[Experiment]) -> list[str]:
    """Names of those that Tune can go on with; the others of a file never began.

    Raises:
        ExperimentError: There is none.
    """
    begun = [experiment.name for experiment in experiments if _has_state(experiment)]
    if not begun:
        where = " or ".join(experiment.place for experiment in experiments)
        raise ExperimentError(
            f"nothing to resume: {where} holds no experiment. Give the --storage-path of the interrupted run, or leave out "
            "--resume to start anew"
        )
    return begun


def _has_state(experiment: Experiment, since: float = 0.0) -> bool:
    if experiment.folder is not None:
        return any(file.stat().st_mtime >= since for file in experiment.folder.glob(f"{STATE}*.json"))
    try:
        system, path = fs.FileSystem.from_uri(experiment.place)
        found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except (ArrowException, OSError):  # a storage that Ray may know all the same, and then says what is wrong
        return True
    return any(file.base_name.startswith(STATE) for file in found)


def check_unchanged(experiment: Experiment, trials: Sequence[Any], restore: Path | None = None) -> None:
    """Tune goes on with what a trial was begun with, whatever the file says by now.

    Args:
        experiment: As the file has it.
        trials: Tune's, as they were begun.
        restore: The checkpoint that is asked for beside.

    Raises:
        ExperimentError: Something else is asked for.
    """
    free = varied(experiment.config, experiment.tune.get("scheduler"), experiment.name)
    failures = experiment.tune.get("max_failures", 0)
    for trial in trials:
        if restore is not None and trial.restore_path != str(restore.absolute()):
            began = f"with --restore {trial.restore_path}" if trial.restore_path else "without --restore"
            raise ExperimentError(
                f"{experiment.name}: --resume goes on from the run's own last checkpoint, and this run was begun {began}. "
                f"Leave out --restore; or leave out --resume to begin another run with {restore}, with another --storage-path"
            )
        config, kept = ({key: of[key] for key in of.keys() - free} for of in (experiment.config, trial.config))
        asked = {
            "run": tune.Experiment.get_trainable_name(trainable_of(experiment)),
            "max_failures": trial.max_failures if failures is None else failures,  # what none means is Tune's
        }
        both = checkpoint_config(experiment), trial.run_metadata.checkpoint_manager.checkpoint_config
        now, then = ({key: value for key, value in vars(each).items() if value} for each in both)
        changes = [
            *_differences(asked, {"run": trial.trainable_name, "max_failures": trial.max_failures}),
            *_differences(experiment.stop or {}, trial.stopping_criterion or {}, "stop."),
            *_differences(now, then, "checkpoint_config."),
            *_differences(config, kept, "config."),
        ]
        if changes:
            found = last_whole(Path(trial.path))
            raise ExperimentError(
                f"{experiment.name}: --resume goes on with what the run was begun with, and now something else is asked for: "
                f"{'; '.join(changes)}. Take that back, or begin another run with it from a checkpoint: --restore "
                f"{found or 'CHECKPOINT'}, in place of --resume, with another --storage-path"
            )


def check_named_files(experiment: Experiment, trial: Any) -> None:
    """A trial reads the files that its configuration names anew, and goes on with what it learned from the former.

    Args:
        experiment: As the file has it.
        trial: Tune's, with the checkpoint from which it goes on.

    Raises:
        ExperimentError: A file is not what it was.
    """
    path = own_checkpoint(trial)
    if path is None or not (path / MANIFEST).exists():  # it begins anew, or is one of RLlib's own
        return
    then = read_manifest(path, contents=False).get(NAMED_FILES)
    config = trainable_of(experiment).get_default_config().update_from_dict(dict(trial.config))
    config.language_model = starting_point(config.language_model)  # whose size chooses the prompts
    if changed := changes(then, named_files(config)):
        raise ExperimentError(
            f"{experiment.name}: --resume goes on with what the run was begun with, and files that it reads are not what they "
            f"were: {changed}. Put them back as they were (the prompts of then are in {path / PROMPTS}), or begin another run "
            f"with what they are now: --restore {path}, in place of --resume, with another --storage-path"
        )


def _differences(asked: Mapping[str, Any], kept: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key in sorted({*asked, *kept}):
        now, then = (json.dumps(values.get(key), sort_keys=True, default=str) for values in (asked, kept))
        if now != then:
            yield f"{where}{key} was {then if key in kept else 'not set'} and is {now if key in asked else 'not set'}"


def make_resumable(experiment: Experiment, restore: Path | None = None) -> list[str]:
    """Removes checkpoints whose writing was interrupted, and puts back those that Tune remembers and that are gone.

    Tune copies a checkpoint, deletes the oldest and writes down what it has one after the other, so a process that is killed
    in between leaves a half copy, or a memory of a checkpoint that no longer exists. A checkpoint that is whole and damaged is
    put aside, never removed.

    Args:
        experiment: One that was begun. In a storage that is no folder of this machine all is left as it is.
        restore: The checkpoint that is asked for beside: the one that it was begun with, or none.

    Returns:
        A line for each thing that was put right.

    Raises:
        ExperimentError: It was begun with other settings, or files that it reads have changed.
        CheckpointError: A trial has checkpoints, and none of them can be used.
    """
    if experiment.folder is None:
        return []
    lines = []
    trials = ExperimentAnalysis(str(experiment.folder)).trials
    check_unchanged(experiment, trials, restore)
    for trial in trials:
        lines += _put_right(Path(trial.path), own_checkpoint(trial))
        check_named_files(experiment, trial)
    return lines


def own_checkpoint(trial: Any) -> Path | None:
    """The last checkpoint that a trial of Tune's wrote itself; until then Tune names the one that it was restored from."""
    path = Path(trial.checkpoint.path) if trial.checkpoint else None
    return path if path is not None and path.parent == Path(trial.path) else None


def kept_checkpoint(trial: Any) -> Path | None:
    """The best of a trial's own checkpoints where they are kept by a score, else its last one."""
    manager = trial.run_metadata.checkpoint_manager
    score = manager.checkpoint_config.checkpoint_score_attribute
    scored = [result for result in manager.best_checkpoint_results if score in result.metrics]
    return Path(scored[-1].checkpoint.path) if scored else own_checkpoint(trial)


def _put_right(where: Path, recorded: Path | None) -> list[str]:
    """Reads one trial's folder; ``recorded`` is the checkpoint from which Tune will go on."""
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
            aside, numbers = path.with_name(f"damaged_{path.name}"), count(2)
            while aside.exists():
                aside = path.with_name(f"damaged_{path.name}_{next(numbers)}")
            path.replace(aside)
            lines.append(f"{path}: {refused}; put aside as {aside.name}")
            continue
        if path != recorded:
            shutil.copytree(path, recorded)
            lines.append(f"{recorded}: gone; {path.name} takes its place")
        return lines
    if refused:
        raise CheckpointError(f"no checkpoint in {where} can be used: {refused}")
    return lines


def how_to_go_on(experiment: Experiment, since: float = 0.0) -> list[str]:
    """What a person should know who has interrupted an experiment.

    Args:
        experiment: The one.
        since: When it began; what was written before is another run's.
    """
    folder = experiment.folder
    if folder is not None and not _has_state(experiment, since):
        return ["Interrupted before anything was begun: there is nothing to go on with."]
    where = (
        "from the last checkpoint of each trial"
        if folder is None or any(last_whole(trial) for trial in folder.glob("*/") if trial.stat().st_mtime >= since)
        else "from the beginning, as no checkpoint was written yet (in a new run checkpoint_config: {checkpoint_frequency: 1} "
        "writes them)"
    )
    return [
        f"Interrupted. Go on by: {command_to_resume()}",
        f"                       {where}; all is in {experiment.place}",
    ]


def command_to_resume() -> str:
    """The command that was given, as it must be typed to go on: the number of samples is what the run was begun with."""
    given = sys.argv[1:]
    is_left_out = [each.split("=")[0] == SAMPLES or before == SAMPLES for before, each in pairwise(["", *given])]
    arguments = [each for each, left_out in zip(given, is_left_out, strict=True) if not left_out]
    return shlex.join(["rllib", *arguments, *([] if "--resume" in arguments else ["--resume"])])
