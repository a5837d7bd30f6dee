"""How a model is spoken to where a configuration leaves it open: the prompts and token limits that suit it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from rllib_nlac.engine.shapes import UnknownShape, shape_of

SMALL = 3_000_000_000  # parameters, below which a model gets the prompt set "small"


@dataclass(frozen=True)
class ModelDefaults:
    """Prompts and token limits that suit a model. They fill the keys that a configuration leaves at None.

    Attributes:
        prompts: A prompt set, see ``load_prompts``.
        max_action_tokens: The most tokens of a turn.
        max_future_tokens: The most tokens of a future or a Bellman target.
        max_critique_tokens: The most tokens of a critique.
        structured_answers: Whether an engine enforces the form of futures and critiques.
        folder: Folder of a model shipped with this package, below ``tiny/``.
        why: Which prompt set was chosen, and why, for the log; empty where a configuration or a shipped model names one.
    """

    prompts: str | dict[str, Any] = "default"
    max_action_tokens: int = 128
    max_future_tokens: int = 192
    max_critique_tokens: int = 192
    structured_answers: bool = True
    folder: str | None = None
    why: str = field(default="", compare=False)


# They were taught their forms, so that nothing needs to be enforced.
SHIPPED_MODELS = {
    "tiny": ModelDefaults("compact", 12, 24, 32, False, "model"),
    "tiny_house": ModelDefaults("compact", 12, 48, 40, False, "house_model"),
}


@functools.lru_cache(maxsize=64)
def defaults_for(model: str) -> ModelDefaults:
    """How a pretrained model, by its folder or its name on the hub, is spoken to: the fewer parameters, the shorter."""
    try:
        size = shape_of(model).parameters
    except (UnknownShape, OSError, ValueError):
        return ModelDefaults("default", why="prompt set default: nothing here says how large the model is")
    name, than = ("small", "less") if size < SMALL else ("default", "not less")
    return ModelDefaults(
        name, why=f"prompt set {name}: the model has {size / 1e6:,.0f} million parameters, {than} than {SMALL // 10**9} billion"
    )
