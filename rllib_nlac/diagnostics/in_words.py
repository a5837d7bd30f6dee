"""A line of the record in words, part by part.

Anybody may have written the record: a value that is no text is shown as if it were missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_nlac.diagnostics.record import Line
from rllib_nlac.diagnostics.results import figure


def is_refined(line: Line) -> bool:
    """Whether the critique parsed, and refinement gave another action."""
    return bool(line.get("critique") and line.get("refined")) and line.get("reason") in ("refined", "rejected")


def transition_parts(line: Line, limit: int | None = None) -> dict[str, str]:
    """What was learned from a transition.

    Args:
        line: The record's line of it.
        limit: Characters of each text; None keeps all.

    Returns:
        Texts by their headings, in the order in which they are read.
    """
    state, futures = (found if isinstance(found := line.get(name), list) else [] for name in ("state", "futures"))
    dialogue = "\n".join(f"{_text(m.get('role'))}: {_text(m.get('content'))}" for m in state if isinstance(m, Mapping))
    described = "\n".join(f"{number}. {_text_of(each)}" for number, each in enumerate(futures, start=1))
    action, judged = _text(line.get("action")), _text(line.get("judged"))
    reward, ended = figure(line, "reward"), _text(line.get("ended")) or "goes on"
    came = f"{_cut(_text(line.get('observation')), limit)}   [reward {reward:g}, {_cut(ended, limit)}]"
    following = (_cut(_text(line.get(name)) or "-", limit) for name in ("next_action", "next_future"))
    return {
        "State": _cut(dialogue, limit, keep_end=True),
        "Action": _cut(f"{action}\n(judged instead: {judged})" if judged else action, limit),
        "Futures that the critic reads": _cut(described, limit) or "(none parsed)",
        "Critique": _cut(_text_of(line.get("critique")), limit) or "(did not parse)",
        "Refined action": f"{_cut(_text(line.get('refined')) or '(none)', limit)}   [{_cut(_text(line.get('reason')), limit)}]",
        "What came next": came,
        "Next action and its future": "\n".join(following),
        "Bellman target": _cut(_text_of(line.get("target")), limit) or "(did not parse)",
    }


def _text_of(described: Any) -> str:
    return _text(described.get("text")) if isinstance(described, Mapping) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str, limit: int | None, keep_end: bool = False) -> str:
    if limit is None or len(text) <= limit:
        return text
    left = len(text) - limit
    return f"[{left} characters before] {text[-limit:]}" if keep_end else f"{text[:limit]} [{left} more characters]"
