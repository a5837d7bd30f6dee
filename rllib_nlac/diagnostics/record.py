"""The record of a run, for whoever wants to read what the critic thought: JSON lines in the trial's folder ``transitions``.

    run.json                    what the run is: algorithm, environment, model, configuration against the defaults
    iteration_00000012.jsonl    transitions of iteration 12, one object a line
    evaluation_00000012.jsonl   what the evaluation after iteration 12 asked the critic, and some of its episodes

Each file is whole or not there. Where the folder grows too large, every second iteration's file goes, and from then on only
every second is written, and so on: what is left still spans the run. A file that cannot be written is lost, which is said once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.types import BellmanTarget, Future, Generation, Message, Refinement, Transition, Weights

FOLDER = "transitions"
RUN_FILE = "run.json"
ITERATION, EVALUATION = "iteration", "evaluation"
FORMAT = 1
MAX_LINE = 64 << 20  # characters
MAX_BYTES = 256 << 20  # of a run's whole record
Line = dict[str, Any]  # of a file
LOG = "input"  # stands where weights are named, of what nobody here wrote
PACKAGE = "package"  # of a target that no model wrote


@dataclass(frozen=True)
class RecordSettings:
    """How much is recorded; the fields of ``config.record``.

    Attributes:
        transitions: Most transitions of an iteration that are recorded. 0 records nothing.
        tokens: Number of these for which the record has what θ and θ̄ say of each token, which costs a forward pass.
        episodes: Most episodes of an evaluation that are recorded.
    """

    transitions: int = 64
    tokens: int = 4
    episodes: int = 16


@dataclass(frozen=True)
class Learned:
    """What training said of the transitions of a batch; each of shape (N,), NaN where nobody knows, infinite where stopped.

    Attributes:
        critic_loss: L1.
        policy_loss: L2.
        priority: What became the replay priority, before the exponent.
        importance: The importance weight.
    """

    critic_loss: np.ndarray
    policy_loss: np.ndarray
    priority: np.ndarray
    importance: np.ndarray


@dataclass(frozen=True)
class Said:
    """What the critic said of a batch.

    Attributes:
        targets: Bellman target of each transition.
        refinements: Likewise.
        answered_by: Which weights answered each role.
        raw: Answers that did not parse, with their roles, by the transition's id.
        strips: What is known of each token of some texts, by the place in the batch.
        version: Version of the weights that answered.
    """

    targets: Sequence[BellmanTarget]
    refinements: Sequence[Refinement]
    answered_by: Mapping[str, Weights]
    raw: Mapping[int, Sequence[tuple[str, str]]]
    strips: Mapping[int, Mapping[str, Any]]
    version: int


class Record:
    """Writes the record.

    Args:
        folder: The trial's.
        settings: How much is written.
        say: Hears what a person should know: a text when a file could not be written, None when one could.
    """

    def __init__(self, folder: Path, settings: RecordSettings, say: Callable[[str | None], None]) -> None:
        self.folder = folder / FOLDER
        self.settings = settings
        self._say = say
        self._sizes: dict[str, int] = {}
        with contextlib.suppress(OSError):
            self._sizes = {file.name: file.stat().st_size for file in self.folder.glob("*_[0-9]*.jsonl")}
        self._stride = _stride_of([_number(name) for name in self._sizes if name.startswith(ITERATION)])

    def takes(self, iteration: int) -> bool:
        """Whether an iteration's transitions are recorded."""
        return self.settings.transitions > 0 and iteration % self._stride == 0

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """What the run is."""
        if self.settings.transitions:
            self._put(RUN_FILE, json.dumps({"format": FORMAT, **plain(facts)}, indent=1))

    def write(self, kind: str, iteration: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """A file of its own for an iteration or an evaluation, in place of one of the same name, as after a restart."""
        name = f"{kind}_{iteration:08d}.jsonl"
        text = "".join(json.dumps(plain(line), separators=(",", ":")) + "\n" for line in lines)
        if self._put(name, text):
            self._sizes[name] = len(text)
            self._thin_out()

    def _put(self, name: str, text: str) -> bool:
        unfinished = self.folder / f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("w", encoding="ascii") as file:  # json escapes all else, lone surrogates too
                file.write(text)
            unfinished.replace(self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            why = os.strerror(error.errno) if error.errno else str(error)
            self._say(f"the record for rllib inspect has a gap: cannot write to {self.folder}: {why}. The run goes on without")
            return False
        self._say(None)
        return True

    def _thin_out(self) -> None:
        """Takes from the kind that takes most, spread over the run, until all is small enough or one file of each is left."""
        while sum(self._sizes.values()) > MAX_BYTES:
            kinds = [sorted(n for n in self._sizes if n.startswith(kind)) for kind in (ITERATION, EVALUATION)]
            several = [names for names in kinds if len(names) > 1]
            if not several:
                return
            names = max(several, key=lambda own: sum(self._sizes[name] for name in own))
            if names[0].startswith(ITERATION):
                self._stride *= 2
                gone = [name for name in names if _number(name) % self._stride] or names[:-1]
            else:
                gone = [_least_missed(names)]
            for name in gone:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)
                del self._sizes[name]


def _least_missed(names: Sequence[str]) -> str:
    """The file whose neighbours are closest to each other; neither the first nor the last of three or more."""
    gaps = {names[i]: _number(names[i + 1]) - _number(names[i - 1]) for i in range(1, len(names) - 1)}
    return min(gaps, key=gaps.__getitem__) if gaps else names[0]


def _number(name: str) -> int:
    return int(name.rpartition("_")[2].partition(".")[0])


def _stride_of(numbers: Sequence[int]) -> int:
    """The largest power of two that divides all iterations that are there; 1 where that may be chance."""
    common = math.gcd(*numbers) if len(numbers) > 2 else 1
    return max(common & -common, 1)


def transition_lines(iteration: int, said: Said, learned: Learned | None, count: int) -> list[Line]:
    """Lines of the first transitions of a batch, each once.

    Args:
        iteration: Which.
        said: What the critic said.
        learned: What training said; None where nothing was learned.
        count: The most lines.
    """
    lines = []
    for place in places(said.targets, count):
        target, refinement = said.targets[place], said.refinements[place]
        t, judged = target.transition, refinement.transition
        line = {
            "kind": "transition",
            "iteration": iteration,
            **moment(t),
            **opinion(refinement),
            "judged": judged.action if judged.action != t.action else None,
            "next_action": target.next_action,
            "next_future": target.next_future,
            "target": future(target.future),
            "version": said.version,
            "age": age(t, said.version),
            "by": _by(t, target, refinement, said),
            "unparsed": [{"role": role, "text": text} for role, text in said.raw.get(t.id, ())],
            "tokens": said.strips.get(place),
        }
        if learned is not None:
            line |= {name: _known(getattr(learned, name)[place]) for name in vars(learned)}
            line["stopped"] = bool(np.isinf(learned.critic_loss[place]) or np.isinf(learned.policy_loss[place]))
        lines.append(line)
    return lines


def places(targets: Sequence[BellmanTarget], count: int) -> list[int]:
    """Where in a batch the first so many different transitions stand."""
    first: dict[int, int] = {}
    for place, target in enumerate(targets):
        first.setdefault(target.transition.id, place)
    return list(first.values())[:count]


def moment(t: Transition) -> Line:
    """What was played: the dialogue, the action and what came of it."""
    return {
        "id": t.id,
        "env": t.env,
        "episode": t.episode,
        "turn": t.turn,
        "task_seed": t.task_seed,
        "state": messages(t.state),
        "action": t.action,
        "observation": t.observation,
        "reward": t.reward,
        "return_to_go": t.returns_to_go,
        "ended": "terminated" if t.terminated else "truncated" if t.truncated else None,
        "success": bool(t.episode_success),
    }


def opinion(refinement: Refinement) -> Line:
    """What the critic said, and what the policy is taught."""
    critique = refinement.critique
    return {
        "futures": [future(each) for each in refinement.futures],
        "predicted": predicted_success(refinement.futures),
        "critique": asdict(critique) if critique else None,
        "refined": refinement.action,
        "reason": refinement.reason,
        "trained": refinement.generation is not None,
        "weight": refinement.weight,
    }


def messages(state: Sequence[Message]) -> list[dict[str, str]]:
    """A dialogue as chat JSON."""
    return [message.row for message in state]


def future(each: Future | None) -> dict[str, Any] | None:
    """A description with its outcome."""
    return {"text": each.text, "success": each.success} if each else None


def _by(t: Transition, target: BellmanTarget, refinement: Refinement, said: Said) -> dict[str, list]:
    """Which weights wrote each part, and their version: of ids that are kept what the engine said, else what was asked."""
    by = {role: [w.value, 0 if w is Weights.INITIAL else said.version] for role, w in said.answered_by.items()}
    known: dict[str, Generation | None] = {"target": target.generation} if "target" in by else {}
    if not refinement.kept:
        known["refinement"] = refinement.generation
    by |= {role: [g.weights.value, g.weight_version] for role, g in known.items() if g is not None}
    return {"target": [PACKAGE, 0], **by, "action": author(t)}


def author(t: Transition) -> list:
    """Which weights wrote the action, and their version: nobody's where it was read from a log."""
    return [LOG, 0] if is_logged(t) else [t.generation.weights.value, t.generation.weight_version]


def age(t: Transition, version: int) -> int | None:
    """How many versions old the weights are that wrote the action; None where it was read from a log."""
    return None if is_logged(t) else version - t.generation.weight_version


def is_logged(t: Transition) -> bool:
    """Whether it was read from a log: no environment of ours was reset for it."""
    return t.task_seed is None


def token_texts(
    targets: Sequence[BellmanTarget], refinements: Sequence[Refinement], count: int
) -> list[tuple[int, str, Any, Any]]:
    """Whose tokens are looked at: the place in the batch, which text, its prompt's ids and its generation."""
    found: list[tuple[int, str, Any, Any]] = []
    for place in places(targets, count):
        target, refinement = targets[place], refinements[place]
        played = target.transition.generation
        texts = [("action", played.prompt_ids, played), ("target", target.prompt_ids, target.generation)]
        if refinement.generation is not None and not refinement.kept:
            texts.append(("refined", played.prompt_ids, refinement.generation))
        found += [(place, name, prompt, g) for name, prompt, g in texts if g is not None and g.token_ids and prompt]
    return found


def read_lines(path: Path) -> tuple[list[Line], int]:
    """The objects of a file of JSON lines, and how many lines are none; the last may be half written."""
    found: list[Line] = []
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line) if len(line) <= MAX_LINE else None
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    found.append(value)
                elif line.endswith("\n") and line.strip():
                    bad += 1
    except OSError:
        pass
    return found, bad


def plain(value: Any) -> Any:
    """What JSON can say: numbers rounded to six digits, None for those that are not finite, text for anything strange."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, (np.bool_, np.integer, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return str(value)


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
