"""Runs as the page takes them: as columns, and every text once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rllib_nlac.diagnostics.record import plain
from rllib_nlac.inspector.run import Lines, Run, finite

MOST = 10_000  # transitions of a run
KINDS = ("transition", "state", "prediction")
NUMBERS = (
    "iteration",
    "id",
    "turn",
    "task_seed",
    "reward",
    "return_to_go",
    "predicted",
    "weight",
    "version",
    "age",
    "critic_loss",
    "policy_loss",
    "priority",
    "importance",
    "number",
)
TEXTS = ("env", "episode", "action", "observation", "judged", "refined", "reason", "next_action", "next_future", "ended")
FLAGS = ("success", "trained", "stopped")


class Texts:
    """Every different text once, by its number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: Any) -> int | None:
        """Number of a text; None if there is no text."""
        if text is None:
            return None
        text = text if isinstance(text, str) else json.dumps(plain(text))
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            # A browser would stop at half a surrogate pair.
            self.all.append(text.encode("utf-8", "replace").decode())
        return self._numbers[text]


def bundle(runs: Sequence[Run], most: int = MOST) -> dict[str, Any]:
    """One or two runs.

    Args:
        runs: What was read.
        most: The most transitions of each.
    """
    texts = Texts()
    return {"runs": [_run(run, texts, most) for run in runs], "texts": texts.all}


def _run(run: Run, texts: Texts, most: int) -> dict[str, Any]:
    kept = thinned(run.lines, most)
    return {
        "name": run.name,
        "facts": plain(run.facts),
        "iterations": run.iterations,
        "curves": run.curves,
        "sums": run.sums,
        "evaluations": run.evaluations,
        "notices": run.notices,
        "rows": columns(kept, texts),
        "left_out": len(run.lines) - len(kept),
        "episodes": [_episode(line, texts) for line in run.episodes],
        "unread": run.unread,
    }


def thinned(lines: Lines, most: int) -> Lines:
    """At most so many transitions, as many of each iteration as there is room for, spread over it; the other kinds all stay."""
    by_iteration: dict[Any, Lines] = {}
    for line in lines:
        if line.get("kind") == "transition":
            by_iteration.setdefault(line.get("iteration"), []).append(line)
    if sum(map(len, by_iteration.values())) <= most:
        return lines
    share = 0
    while sum(min(len(own), share + 1) for own in by_iteration.values()) <= most:
        share += 1
    if not share:  # not even one of each
        numbers = list(by_iteration)
        by_iteration = {number: by_iteration[number] for number in numbers[:: -(-len(numbers) // most)]}
        share = 1
    chosen = {id(line) for own in by_iteration.values() for line in _spread(own, min(share, len(own)))}
    return [line for line in lines if line.get("kind") != "transition" or id(line) in chosen]


def _spread(lines: Lines, count: int) -> Lines:
    return [lines[i * len(lines) // count] for i in range(count)]


def columns(lines: Lines, texts: Texts) -> dict[str, Any]:
    """Transitions, states and predictions, one entry of each column a line; texts by their numbers."""
    table: dict[str, list] = {name: [] for name in ("kind", *NUMBERS, *TEXTS, *FLAGS)}
    nested = ("state", "futures", "critique", "target", "by", "unparsed", "tokens")
    table |= {name: [] for name in nested}
    for line in lines:
        table["kind"].append(KINDS.index(line["kind"]))
        for name in NUMBERS:
            table[name].append(finite(line.get(name)))
        for name in TEXTS:
            table[name].append(texts.number(line.get(name)))
        for name in FLAGS:
            value = line.get(name)
            table[name].append(None if value is None else int(bool(value)))
        critique, target = _object(line.get("critique")), _object(line.get("target"))
        table["state"].append(dialogue(line.get("state"), texts))
        table["futures"].append(
            [
                part
                for each in _objects(line.get("futures"))
                for part in (texts.number(each.get("text")), int(bool(each.get("success"))))
            ]
        )
        table["critique"].append(
            critique
            and [
                texts.number(critique.get("text")),
                int(bool(critique.get("optimal"))),
                *map(texts.number, (critique.get("reason"), critique.get("fix"))),
            ]
        )
        table["target"].append(target and [texts.number(target.get("text")), int(bool(target.get("success")))])
        table["by"].append(texts.number(_object(line.get("by"))))
        table["unparsed"].append(
            [texts.number(each.get(name)) for each in _objects(line.get("unparsed")) for name in ("role", "text")]
        )
        table["tokens"].append(_tokens(line.get("tokens"), texts))
    return table


def dialogue(messages: Any, texts: Texts) -> list[int | None]:
    """A dialogue as numbers of roles and contents in turn."""
    return [texts.number(str(each.get(name, ""))) for each in _objects(messages) for name in ("role", "content")]


def _tokens(strips: Any, texts: Texts) -> dict[str, Any] | None:
    found = {}
    for name, strip in (_object(strips) or {}).items():
        if isinstance(strip, dict) and isinstance(strip.get("text"), list):
            numbers = {
                key: list(map(finite, value)) for key, value in strip.items() if key != "text" and isinstance(value, list)
            }
            found[name] = {"text": [texts.number(str(each)) for each in strip["text"]], **numbers}
    return found or None


def _episode(line: dict[str, Any], texts: Texts) -> dict[str, Any]:
    return {
        **{name: line[name] for name in ("iteration", "version", "task", "task_seed", "success")},
        "messages": dialogue(line["messages"], texts),
        "rewards": [each or 0 for each in line["rewards"]],
        "ended": texts.number(line["stop_reason"] or ("terminated" if line["terminated"] else "truncated")),
        "episode": texts.number(line["episode"]),
    }


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
