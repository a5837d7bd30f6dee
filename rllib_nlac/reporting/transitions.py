"""Three transitions of a run's record in words, as Markdown that no text of theirs can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rllib_nlac.diagnostics.in_words import is_refined, transition_parts
from rllib_nlac.diagnostics.record import FOLDER, ITERATION, Line, read_lines
from rllib_nlac.inputs.foreign import code, fenced_parts, visible

MAX_CHARACTERS = 4000  # of each text
TITLES = {"success": "Of an episode that was won", "failure": "Of one that was lost", "surprise": "The most surprising one"}


def read_examples(folder: Path) -> dict[str, Line]:
    """The latest transition of each kind of ``TITLES`` in the record of a trial; a kind that it lacks is left out."""
    found: dict[str, Line] = {}
    for file in sorted((folder / FOLDER).glob(f"{ITERATION}_*.jsonl"), reverse=True):
        found = chosen([line for line in read_lines(file)[0] if line.get("kind") == "transition"]) | found
        if found.keys() == TITLES.keys():
            break
    return found


def chosen(lines: Sequence[Line]) -> dict[str, Line]:
    """A transition of each kind, of those of an iteration that were judged, each once.

    The most surprising one is where the futures' share of success is farthest from what the episode came to. Of the others
    those with a refined action are told first.
    """
    told = sorted((line for line in lines if line.get("reason") != "not_judged"), key=lambda line: not is_refined(line))
    found: dict[str, Line] = {}
    if told and _surprise(farthest := max(told, key=_surprise)) > 0:
        found["surprise"] = farthest
    for kind, won in (("success", True), ("failure", False)):
        own = [line for line in told if line.get("success") is won]
        others = [line for line in own if line is not found.get("surprise")]
        if others or own:
            found[kind] = (others or own)[0]
    return found


def _surprise(line: Line) -> float:
    chance, success = line.get("predicted"), line.get("success")
    return abs(chance - success) if isinstance(chance, float) and isinstance(success, bool) else 0.0


def transitions(examples: Mapping[str, Line]) -> str:
    """Each under its own heading, with a sentence of what was predicted and what came."""
    if not examples:
        return "None were recorded: only an algorithm with a critic in words records them, unless record has transitions: 0."
    return "\n\n".join(_transition(TITLES[kind], examples[kind]) for kind in TITLES if kind in examples)


def _transition(title: str, line: Line) -> str:
    parts = {name: visible(text) for name, text in transition_parts(line, MAX_CHARACTERS).items()}
    return f"### {title}\n\n{_sentence(line)}\n\n{fenced_parts(parts)}"


def _sentence(line: Line) -> str:
    chance, critique = line.get("predicted"), line.get("critique")
    came = "was won" if line.get("success") else "was lost"
    if isinstance(chance, float):
        said = f"of the futures that the critic reads {chance:.0%} end in success, and the episode {came}"
    else:
        said = f"no future parsed, and the episode {came}"
    optimal = critique.get("optimal") if isinstance(critique, Mapping) else None
    judged = (
        "The critique finds the action the best one."
        if optimal is True
        else ("The critique would rather do otherwise." if optimal is False else "The critique did not parse.")
    )
    return f"Iteration {code(line.get('iteration'))}: {said}. {judged}"
