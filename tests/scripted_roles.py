"""A transition of twenty questions, and a script that answers in all roles of the compact prompts."""

from __future__ import annotations

import numpy as np
from scripted_engine import last_message

from rllib_nlac.language.settings import Sampling, StageSettings
from rllib_nlac.types import Generation, Message, Transition, Weights

REFINED, NEXT, FRESH = "Is it alive?", "Can it fly?", "Can it swim?"
THOUGHT = "<think>\nhm\n</think>\n\n"
SETTINGS = StageSettings(*[Sampling(24)] * 5)
NO = "Optimal: No\nReason: it leads to failure.\nFix: Is it alive?"
YES = "Optimal: Yes\nReason: it leads to success."


def transition(id: int = 1, ended: bool = False, truncated: bool = False, action: str = "Is it big?") -> Transition:
    return Transition(
        id=id,
        env="TwentyQuestions",
        state=(Message("user", "Guess my object."),),
        action=action,
        generation=Generation((3, 4), (5, 6), np.zeros(2, np.float32), True, 0),
        observation="No.",
        reward=0.0,
        terminated=ended,
        truncated=truncated,
        episode_success=False,
        returns_to_go=0.0,
    )


def script(verdict: str = NO, future: str = "Future: No. few left. FAILURE", **by_role: str | None):
    """Answers by role; ``verdict`` for the evaluator, ``future`` for the successor model."""

    def answer(prompt: str, weights: Weights) -> str | None:
        instruction = last_message(prompt)
        if instruction == "Predict.":
            return by_role.get("predict", future)
        if instruction.startswith("Backup."):
            return by_role.get("backup", "Future: No. many left, then few left. FAILURE")
        if instruction.startswith("Evaluate."):
            return by_role.get("evaluate", verdict)
        if instruction.startswith("Refine."):
            return by_role.get("refine", "Is it alive?")
        return by_role.get("policy", "Can it fly?")

    return answer


def role_of(prompt: str) -> str:
    """Whose prompt this is; d' and d are told apart by the action that ``thinking`` gives in s'."""
    instruction = last_message(prompt)
    action = prompt.rsplit("<|assistant|>", 2)[-2].split("<|end|>")[0]
    if "Write only the reasoning." in instruction or "Write only the reasoning." in prompt:
        return "rethink"
    if instruction.startswith("Predict."):
        return "d'" if action.endswith(NEXT) else "d"
    if instruction.startswith("Evaluate."):
        return "critique"
    return "y" if instruction.startswith("Backup.") else "a_r" if instruction.startswith("Refine.") else "a'"


def thinking(prompt: str, weights: Weights) -> str | None:
    """A thinking model: its target and its refined action reason first, so the correction is asked for, too."""
    if role_of(prompt) == "rethink":
        return "If no, few are left."
    if role_of(prompt) == "a'" and last_message(prompt) != "No.":  # in s, and not in s'
        return FRESH
    return script(verdict=NO, backup=f"{THOUGHT}Future: No. few left. FAILURE", refine=f"{THOUGHT}{REFINED}", policy=NEXT)(
        prompt, weights
    )
