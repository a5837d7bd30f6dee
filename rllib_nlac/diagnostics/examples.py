"""Three transitions in words that a run keeps for its report: of a success, of a failure, and what surprised most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_nlac.diagnostics.in_words import transition_parts
from rllib_nlac.inputs import plain_json
from rllib_nlac.language.prediction import predicted_success
from rllib_nlac.types import BellmanTarget, Refinement

EXAMPLES = "examples.json"  # in the trial's folder
MAX_CHARACTERS = 4000  # of each text
KINDS = ("success", "failure", "surprise")


class Examples:
    """Keeps the latest of each kind in one small file, also of what the run did before it was resumed.

    Args:
        folder: The trial's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = {example["kind"]: example for example in read_examples(folder)}

    def keep(self, iteration: int, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]) -> None:
        """Takes those of a batch; a kind that it lacks stays as it was.

        Raises:
            OSError: The file cannot be written.
        """
        for kind, place in chosen(refinements).items():
            self._kept[kind] = {"kind": kind, "iteration": iteration, **_record(targets[place], refinements[place])}
        if self._kept:
            file = self._folder / EXAMPLES
            beside = file.with_suffix(".part")
            beside.write_text(json.dumps([self._kept[kind] for kind in KINDS if kind in self._kept]), encoding="utf-8")
            beside.replace(file)


def read_examples(folder: Path) -> list[dict[str, Any]]:
    """What a run keeps in its folder; of a file that is missing or damaged nothing."""
    try:
        found = plain_json.loads((folder / EXAMPLES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict) and row.get("kind") in KINDS]


def chosen(refinements: Sequence[Refinement]) -> dict[str, int]:
    """By kind the place of a transition, of those that were judged, each once.

    The most surprising one is where the futures' share of success is farthest from what the episode came to. Of the others
    those with a refined action are told first.
    """
    judged = [i for i, r in enumerate(refinements) if r.reason != "not_judged"]
    told = sorted(judged, key=lambda i: not (refinements[i].critique and refinements[i].action and not refinements[i].kept))
    chances = {i: chance for i in judged if (chance := predicted_success(refinements[i].futures)) is not None}
    distances = {i: abs(chance - refinements[i].transition.episode_success) for i, chance in chances.items()}
    places: dict[str, int] = {}
    if distances and (largest := max(distances.values())) > 0:
        places["surprise"] = next(i for i in told if distances.get(i) == largest)
    taken = refinements[places["surprise"]].transition.id if places else None
    for kind, won in (("success", True), ("failure", False)):
        own = [i for i in told if refinements[i].transition.episode_success is won]
        others = [i for i in own if refinements[i].transition.id != taken]
        if place := (others or own)[:1]:
            places[kind] = place[0]
    return places


def _record(target: BellmanTarget, refinement: Refinement) -> dict[str, Any]:
    return {
        "episode_success": target.transition.episode_success,
        "predicted_success": predicted_success(refinement.futures),
        "optimal": refinement.critique.optimal if refinement.critique else None,
        "parts": transition_parts(target, refinement, MAX_CHARACTERS),
    }
