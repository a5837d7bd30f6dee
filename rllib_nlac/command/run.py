"""Runs experiments through Tune: starts Ray, hands each of them over, and says how its trials ended."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune

from rllib_nlac.checkpoints.checkpoint import check_lora, examine, is_ours, read_manifest
from rllib_nlac.checkpoints.storage import StorageError, check_storage, watched
from rllib_nlac.command.errors import INTERRUPTED, Interrupts, lines_of, write_traceback
from rllib_nlac.command.experiment import (
    Experiment,
    ExperimentError,
    check_resources,
    describe,
    resolve,
    trainable_of,
    tune_arguments,
)
from rllib_nlac.command.progress import ProgressLines
from rllib_nlac.command.report import tell, tell_of_failure
from rllib_nlac.command.resume import how_to_go_on, kept_checkpoint, make_resumable, those_begun
from rllib_nlac.command.search import chosen, num_trials
from rllib_nlac.command.terminal import VisibleHandler, Waiting, terminal
from rllib_nlac.command.tune_keys import MetricCheck
from rllib_nlac.engine.places import nodes_of_cluster
from rllib_nlac.memory.fit import memory_lines

# Ray says at every start that it asks for a token. It is right to: also on this machine alone, whoever else may log in to it
# could run code in a cluster without one. Where there is none Ray says so, too, and that is news.
AUTHENTICATION = "ray._private.authentication.authentication_token_setup"
# What this command says in its own words, or what is as it should be.
NO_NEWS = (
    "Token authentication is enabled",
    "Stop signal received",
    "Experiment has been interrupted",
    "Trials did not complete",
    "Stopping criterion",
)


def dry_run(experiments: Sequence[Experiment], gpu_memory_gib: float | None) -> None:
    """Prints the resolved configurations and the memory that they need."""
    for experiment in experiments:
        terminal.say(describe(experiment))
        for line in memory_lines(resolve(experiment), gpu_memory_gib):
            terminal.say(f"# {line}".rstrip())  # a comment: what is printed stays YAML


def train(experiments: Sequence[Experiment], resume: bool, restore: Path | None, verbose: bool, waiting: Waiting) -> int:
    """Runs experiments one after the other.

    Args:
        experiments: Checked ones.
        resume: Whether those that were begun go on.
        restore: The checkpoint that they begin with.
        verbose: Whether what the workers log is shown.
        waiting: Says what goes on.

    Returns:
        The command's exit code.
    """
    begun = those_begun(experiments) if resume else []
    failed, began = [], time.time()
    with Interrupts(terminal) as interrupts:
        for experiment in experiments:
            if resume and experiment.name not in begun:
                terminal.say(f"{experiment.name}: had not begun, and begins now")
            try:
                ended_well = _run(experiment, experiment.name in begun, restore, verbose, interrupts, waiting)
            except KeyboardInterrupt:
                interrupts.received = True
            if interrupts.received:
                for line in how_to_go_on(experiment, 0.0 if experiment.name in begun else began):
                    terminal.say(line)
                return INTERRUPTED
            if not ended_well:
                failed.append(experiment.name)
    if failed:
        terminal.say(f"failed: {', '.join(failed)}", "red")
    return int(bool(failed))


def start_ray(verbose: bool) -> None:
    """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names."""
    if not (ours := logging.getLogger("rllib_nlac")).handlers:
        ours.addHandler(VisibleHandler(terminal))
    for name in (AUTHENTICATION, "ray.tune.tune", "ray.tune.experiment.trial"):
        logging.getLogger(name).addFilter(_is_news)
    ray.init(
        include_dashboard=False,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        ignore_reinit_error=True,
        configure_logging=verbose,
    )


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NO_NEWS)


def _run(
    experiment: Experiment, resume: bool, restore: Path | None, verbose: bool, interrupts: Interrupts, waiting: Waiting
) -> bool:
    """Runs one experiment through Tune; returns whether every trial ended well."""
    options = tune_arguments(experiment)
    folder = experiment.folder
    if folder is not None:
        check_storage(folder)
    if restore is not None:
        if is_ours(str(restore)):
            check_lora(str(restore), read_manifest(restore), resolve(experiment))
        else:
            examine(restore)
    if resume:
        for line in make_resumable(experiment, restore):
            terminal.say(line)
        if experiment.tune.get("scheduler"):
            terminal.say("the scheduler begins anew: Tune does not keep what it knew of the trials")
    began = time.time()
    metrics = MetricCheck(experiment.metrics, experiment.name)
    total = num_trials(experiment.config, experiment.tune.get("num_samples", 1))
    options["callbacks"] += [ProgressLines(terminal, experiment.stop, waiting, total), metrics]
    try:
        waiting.turn_to("starting Ray")
        start_ray(verbose)
        waiting.turn_to("")
        interrupts.listen()
        check_resources(experiment, nodes_of_cluster())
        with watched(folder) as watch:
            analysis = tune.run(
                trainable_of(experiment),
                name=experiment.name,
                # What the algorithm itself writes, such as one transition an iteration, follows the results.
                sync_config=tune.SyncConfig(sync_artifacts=True),
                verbose=0,
                raise_on_failed_trial=False,
                resume="AUTO+ERRORED" if resume else None,
                restore=str(restore.absolute()) if restore else None,
                **options,
            )
            errors = {trial: _error_of(trial) for trial in analysis.trials if trial.status != "TERMINATED"}
            watch.is_explained = any(StorageError.__name__ in error for error in errors.values())
    except Exception as error:
        problem = ExperimentError(metrics.problem) if isinstance(error, tune.TuneError) and metrics.problem else error
        for line in tell_of_failure(folder, experiment, problem, began, restore) if folder is not None else ():
            terminal.say(line)
        if problem is error:
            raise
        raise problem from None
    finally:
        waiting.watch({})
        ray.shutdown()
    ended_well = True
    for trial in analysis.trials:
        told = tell(trial, experiment, interrupts.received, errors.get(trial, ""), restore)
        if interrupts.received:
            terminal.say("\n".join(("", *told)))
            continue
        if trial.status != "TERMINATED":
            ended_well = False
            _explain(trial, errors[trial])
        where = Path(trial.path)
        lines = [
            "",
            *(told if len(analysis.trials) == 1 else told[-1:]),
            f"Results:     {where}",
            f"Curves:      {shlex.join(['tensorboard', '--logdir', str(where.parent)])}",
        ]
        if any(where.glob("*.transitions")):
            lines.append("             (under Text: one transition per iteration, in words)")
        if any((where / "transitions").glob("*.jsonl")):
            lines.append(f"Read it:     {shlex.join(['rllib', 'inspect', str(where), '--open'])}")
        if (checkpoint := kept_checkpoint(trial)) and checkpoint.exists():
            lines.append(f"Play it:     {shlex.join(['rllib', 'evaluate', str(checkpoint), '--render'])}")
        for line in lines:
            terminal.say(line)
    if interrupts.received:
        return False
    if len(analysis.trials) > 1 and options.get("metric") and (best := analysis.get_best_trial(scope="all")):
        value = best.metric_analysis[options["metric"]][options["mode"]]
        values = chosen(best, experiment.config, experiment.tune.get("scheduler"), experiment.name)
        terminal.say(f"\nBest:        {best}, {options['metric']} {value:.3f}, with {values}")
    return ended_well


def _error_of(trial: Any) -> str:
    """Why a trial did not end well; to be asked before Ray is shut down, which knows where it was written first."""
    first = Path(trial.error_file) if trial.error_file else None  # where the storage cannot be written it stays there
    kept = first.read_text(errors="replace") if first is not None and first.is_file() else None
    return str(trial.get_error() or kept or "Tune recorded no error: it ended before the trial did")


def _explain(trial: Any, text: str) -> None:
    """Says in few lines why a trial did not end well, and which file has all of it."""
    file = Path(trial.path) / "error.txt"
    terminal.say(f"{trial}: {trial.status.lower()}", "red")
    for line in lines_of(text, file if file.is_file() else write_traceback(text)):
        terminal.say(line)
