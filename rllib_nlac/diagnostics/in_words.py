"""A transition in words, part by part, with all that the critic and the refinement said of it."""

from __future__ import annotations

from rllib_nlac.types import BellmanTarget, Refinement


def transition_parts(target: BellmanTarget, refinement: Refinement, limit: int | None = None) -> dict[str, str]:
    """What was learned from a transition.

    Args:
        target: What the critic learned.
        refinement: What the policy learned.
        limit: Characters of each text; None keeps all.

    Returns:
        Texts by their headings, in the order in which they are read.
    """
    t = target.transition
    ended = "terminated" if t.terminated else "truncated" if t.truncated else "goes on"
    return {
        **_judged(refinement, t.action, limit),
        "What came next": f"{_cut(t.observation, limit)}   [reward {t.reward:g}, {ended}]",
        "Next action and its future": f"{_cut(target.next_action or '-', limit)}\n{_cut(target.next_future or '-', limit)}",
        "Bellman target": _cut(target.future.text, limit) if target.future else "(did not parse)",
    }


def state_parts(refinement: Refinement) -> dict[str, str]:
    """What the critic says today of a state and an action that it is asked about in every evaluation."""
    t = refinement.transition
    return {
        **_judged(refinement, t.action, None),
        "What came next": f"{t.observation}   [the episode ended in {'success' if t.episode_success else 'failure'}]",
    }


def _judged(refinement: Refinement, played: str, limit: int | None) -> dict[str, str]:
    judged = refinement.transition.action
    futures = "\n".join(f"{i}. {future.text}" for i, future in enumerate(refinement.futures, start=1))
    return {
        "State": _cut("\n".join(f"{m.role}: {m.content}" for m in refinement.transition.state), limit, keep_end=True),
        "Action": _cut(played if judged == played else f"{played}\n(judged instead: {judged})", limit),
        "Futures that the critic reads": _cut(futures, limit) or "(none parsed)",
        "Critique": _cut(refinement.critique.text, limit) if refinement.critique else "(did not parse)",
        "Refined action": f"{_cut(refinement.action or '(none)', limit)}   [{refinement.reason}]",
    }


def _cut(text: str, limit: int | None, keep_end: bool = False) -> str:
    if limit is None or len(text) <= limit:
        return text
    left = len(text) - limit
    return f"[{left} characters before] {text[-limit:]}" if keep_end else f"{text[:limit]} [{left} more characters]"
