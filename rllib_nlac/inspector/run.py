"""Reads what a run left in its folder. Anybody may have written the files: a line that is not what it should be is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_nlac.diagnostics.record import EVALUATION, FOLDER, ITERATION, RUN_FILE, plain, read_lines
from rllib_nlac.diagnostics.results import RESULTS, one_branch, with_beginning

PARAMETERS = "params.json"
# Of the results only what a reader asks about; the rest are timers and the configuration once more.
TOLD = (
    "env_runners",
    "evaluation",
    "learners",
    "language_stages",
    "seconds",
    "replay_buffer",
    "collection",
    "sync",
    "faults",
    "kl_to_base",
    "logprob_gap",
    "num_env_steps_sampled_lifetime",
    "time_total_s",
)
CALIBRATION = "evaluation/critic/"
STOPPED = "learners/default_policy/num_stopped_steps"
MAX_ROWS = 2000  # of the curves
MAX_ITERATION = 10**9  # no run has more
LARGEST = 1e300  # of a number; NaN is no smaller
EXACT = 1 << 53  # beyond it a browser rounds whole numbers
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        name: For a person.
        facts: ``run.json``: algorithm, env, env_config, language_model, config as {key: [value, default]}.
        iterations: Iteration of each row of the curves.
        curves: By name, one number a row, None where there is none.
        sums: By name, over all results and not the rows alone: the seconds of each part, and the gradient steps that were
            stopped.
        evaluations: What each evaluation says of critic and policy, nested, with its ``iteration``.
        notices: Iteration and text of what the run said to a person.
        lines: Lines of the record: transitions, states and predictions.
        episodes: Episodes of the evaluations; every field is there and of its type.
        unread: Lines that could not be read.
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    iterations: list[int] = field(default_factory=list)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    evaluations: Lines = field(default_factory=list)
    notices: list[tuple[int, str]] = field(default_factory=list)
    lines: Lines = field(default_factory=list)
    episodes: Lines = field(default_factory=list)
    unread: int = 0


def trial_of(path: Path) -> Path:
    """The trial's folder that a path means: itself, that of a checkpoint, or the only trial of an experiment.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no run at {path}: the folder does not exist")
    if _is_trial(path):
        return path
    if (path / "rllib_checkpoint.json").is_file():
        return trial_of(path.parent)
    trials = sorted(each for each in path.iterdir() if each.is_dir() and _is_trial(each))
    if not trials:
        raise FileNotFoundError(
            f"{path} is no run: neither {RESULTS} nor {FOLDER}/ is there. Give the folder of a trial, which rllib train prints "
            "as Results, or one of its checkpoints"
        )
    if len(trials) > 1:
        raise ValueError(f"{path} has {len(trials)} trials: give one of them, such as {trials[-1]}, or two to compare")
    return trials[0]


def _is_trial(path: Path) -> bool:
    return (path / RESULTS).is_file() or (path / FOLDER).is_dir()


def read_run(folder: Path) -> Run:
    """Reads a trial's folder."""
    rows, unread = read_lines(folder / RESULTS)
    results = with_beginning(one_branch(filter(_iteration, rows), _iteration))
    unread += sum(not _iteration(row) for row in rows)
    last = _iteration(results[-1]) if results else 0
    lines: Lines = []
    episodes: Lines = []
    for path in (path for kind in (ITERATION, EVALUATION) for path in sorted((folder / FOLDER).glob(f"{kind}_*.jsonl"))):
        if _is_abandoned(path, folder / RESULTS, last):
            continue
        own, bad = read_lines(path)
        unread += bad
        for line in own:
            kind = line.get("kind")
            if kind == "episode" and (played := _episode(line)):
                episodes.append(played)
            elif kind in ("transition", "state", "prediction"):
                lines.append(line)
            else:
                unread += 1
    iterations, curves = curves_of(results)
    return Run(
        folder.name,
        _facts(folder, results),
        iterations,
        curves,
        sums_of(results),
        evaluations_of(results),
        [(_iteration(row), line) for row in results for line in str(row.get("notices") or "").splitlines()],
        lines,
        episodes,
        unread,
    )


def _is_abandoned(path: Path, results: Path, last: int) -> bool:
    """Whether a file of the record is of an iteration after the last result and older: the run went on from before it."""
    number = path.stem.rpartition("_")[2]
    return 0 < last < (int(number) if number.isdecimal() else 0) and _changed(path) < _changed(results)


def _facts(folder: Path, results: Lines) -> dict[str, Any]:
    facts = _read_object(folder / FOLDER / RUN_FILE)
    if facts:
        return facts
    given = _read_object(folder / PARAMETERS)
    last = results[-1] if results else {}
    name = folder.name.split("_")[0] if last.get("trial_id") else ""
    config = {key: [value, None] for key, value in given.items() if key not in ("env", "env_config")}
    return {"algorithm": name, "env": given.get("env"), "env_config": given.get("env_config") or {}, "config": config}


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = plain(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _iteration(row: Mapping[str, Any], key: str = "training_iteration") -> int:
    """Its number; 0 where there is none."""
    number = row.get(key)
    return number if type(number) is int and 0 < number <= MAX_ITERATION else 0


def _episode(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """All fields of an episode, each of its kind; None of what is no episode."""
    iteration, messages, rewards = _iteration(line, "iteration"), line.get("messages"), line.get("rewards")
    is_known = iteration > 0 or (type(line.get("iteration")) is int and line["iteration"] == 0)  # 0: before training
    if not (is_known and isinstance(messages, list) and isinstance(rewards, list) and all(map(_is_message, messages))):
        return None
    if not all(each is None or isinstance(each, (int, float)) for each in rewards):
        return None
    return {
        "iteration": iteration,
        **{name: finite(line.get(name)) for name in ("version", "task", "task_seed")},
        **{name: text if isinstance(text := line.get(name), str) else None for name in ("episode", "stop_reason")},
        **{name: bool(line.get(name)) for name in ("success", "terminated")},
        "messages": [{"role": each["role"], "content": each["content"]} for each in messages],
        "rewards": list(map(finite, rewards)),
    }


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an evaluation says of critic and policy."""
    own = row.get("evaluation")
    if not isinstance(own, Mapping):
        return None
    parts = {name: own[name] for name in ("critic", "repeated", "env_runners") if isinstance(own.get(name), Mapping)}
    found = {name: _numbers(part) for name, part in parts.items()}
    if all(value is None for part in found.values() for _, value in _leaves(part, "", lambda name: True)):
        return None  # without an evaluation of its own an iteration tells of the last one again, or nothing but NaN
    return {"iteration": _iteration(row), **found}


def evaluations_of(results: Lines) -> Lines:
    """Each evaluation once: the results of the next iteration tell it again."""
    found: Lines = []
    for row in results:
        if (each := _evaluation(row)) is None:
            continue
        config = row.get("config")
        interval = config.get("evaluation_interval") if isinstance(config, Mapping) else None
        is_due = isinstance(interval, int) and interval > 0 and _iteration(row) % interval == 0
        if found and not is_due and _figures(each) == _figures(found[-1]):
            continue
        found.append(each)
    return found


def _figures(evaluation: Mapping[str, Any]) -> tuple[Any, ...]:
    """By which two evaluations are told apart; timers move on by themselves."""
    played = evaluation.get("env_runners") or {}
    return evaluation.get("critic"), *(played.get(name) for name in ("success_rate", "episode_return_mean", "num_tasks"))


def _numbers(value: Any, depth: int = 6) -> Any:
    """What is made of numbers only, None for those that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _numbers(each, depth - 1) for key, each in value.items()} if depth else None
    if isinstance(value, list):
        return [_numbers(each, depth - 1) for each in value] if depth and len(value) <= 1000 else None
    return _number(value)


def _number(value: Any) -> float | None:
    number = finite(value)
    if number is None or (isinstance(number, int) and abs(number) < EXACT):
        return number
    return float(f"{number:.5g}")


def finite(value: Any) -> float | None:
    """A number that a browser reads as one, else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST else None


def curves_of(results: Lines) -> tuple[list[int], dict[str, list[float | None]]]:
    """The numbers of all results by their paths: of at most ``MAX_ROWS`` spread over the run, and of as many evaluations."""
    told = {each["iteration"] for each in _spread(evaluations_of(results))}
    played = {_iteration(row) for row in _spread(results)}
    rows = [row for row in results if _iteration(row) in told | played]
    curves: dict[str, list[float | None]] = {}
    for number, row in enumerate(rows):
        if _iteration(row) not in told:
            row = {key: value for key, value in row.items() if key != "evaluation"}
        for name, value in _leaves(row, "", _is_told):
            if not name.startswith(CALIBRATION) or name.count("/") == 2:
                curves.setdefault(name, [None] * len(rows))[number] = value
    return [_iteration(row) for row in rows], {name: curves[name] for name in sorted(curves)}


def sums_of(results: Lines) -> dict[str, float]:
    """What adds up over a run, of all its results: curves may have a part of them."""

    def adds_up(name: str) -> bool:
        return name.partition("/")[0] == "seconds" or f"{STOPPED}/".startswith(f"{name}/")

    found: dict[str, float] = {}
    for row in results:
        for name, value in _leaves(row, "", adds_up):
            found[name] = found.get(name, 0) + value
    known = {name: _number(found[name]) for name in sorted(found)}
    return {name: value for name, value in known.items() if value is not None}


def _spread(rows: Lines) -> Lines:
    step = -(-len(rows) // MAX_ROWS) or 1
    return rows[(len(rows) - 1) % step :: step]


def _leaves(value: Mapping[str, Any], path: str, told: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    for key, each in value.items():
        name = f"{path}{key}"
        if not told(name):
            continue
        if isinstance(each, Mapping):
            yield from _leaves(each, f"{name}/", told)
        elif (number := _number(each)) is not None:
            yield name, number


def _is_told(name: str) -> bool:
    return name.startswith(TOLD)
