"""Transitions in words, as Markdown that no text of theirs can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllib_nlac.inputs.foreign import code, fenced_parts, visible

TITLES = {"success": "Of an episode that was won", "failure": "Of one that was lost", "surprise": "The most surprising one"}


def transitions(examples: Sequence[Mapping[str, Any]]) -> str:
    """Each under its own heading, with a sentence of what was predicted and what came."""
    shown = [each for each in examples if each.get("kind") in TITLES and isinstance(each.get("parts"), Mapping)]
    if not shown:
        return "None were kept: only an algorithm with a critic in words keeps them, from its first iteration on."
    return "\n\n".join(_transition(each) for each in shown)


def _transition(example: Mapping[str, Any]) -> str:
    parts = {_name(name): visible(str(text)) for name, text in example["parts"].items()}
    return f"### {TITLES[example['kind']]}\n\n{_sentence(example)}\n\n{fenced_parts(parts)}"


def _sentence(example: Mapping[str, Any]) -> str:
    chance, optimal = example.get("predicted_success"), example.get("optimal")
    came = "was won" if example.get("episode_success") else "was lost"
    if isinstance(chance, (int, float)):
        said = f"of the futures that the critic reads {chance:.0%} end in success, and the episode {came}"
    else:
        said = f"no future parsed, and the episode {came}"
    judged = (
        "The critique finds the action the best one."
        if optimal is True
        else ("The critique would rather do otherwise." if optimal is False else "The critique did not parse.")
    )
    return f"Iteration {code(example.get('iteration'))}: {said}. {judged}"


def _name(name: object) -> str:
    """A heading of ours; the file may have been changed by others."""
    return "".join(c for c in str(name) if c.isalpha() or c == " ")[:60]
