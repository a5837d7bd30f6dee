"""What a run's time and tokens went to, by stage of the data path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rllib_nlac.diagnostics.results import Run, figure, has_evaluation
from rllib_nlac.engine.token_usage import PROMPT_TOKENS, TOKENS

# Stages of an iteration as ``seconds`` has them, as a person calls them. The other names there are parts of these.
STAGES = {
    "play": "episodes",
    "branches": "rollouts from the middle",
    "waves": "language stages",
    "learner": "learner",
    "evaluation": "evaluation",
    "sync": "weights to the engines",
    "replay": "replay",
    "logprob_gap": "comparing engine and learner",
}
ASKED = ("play", "branches", "evaluation")  # under their own names as roles


@dataclass(frozen=True)
class Stage:
    """A stage's cost.

    Attributes:
        name: As a person calls it.
        seconds: Seconds of the whole run; NaN where nobody measured it.
        tokens: Generated there, or trained on by the learner; NaN where there are none, or nobody counted.
    """

    name: str
    seconds: float
    tokens: float


@dataclass(frozen=True)
class Role:
    """What a role cost in a whole run, in tokens, as the engines counted.

    Attributes:
        name: As the results have it.
        generated: Tokens of its answers.
        prompts: Tokens of its prompts.
    """

    name: str
    generated: float
    prompts: float


def roles(run: Run) -> list[Role]:
    """The roles that were asked, the dearest first; none of a run whose engines do not count."""
    names = {name for r in run.results if isinstance(known := r.get(TOKENS), Mapping) for name in known}
    found = [Role(name, run.total(f"{TOKENS}/{name}"), run.total(f"{PROMPT_TOKENS}/{name}")) for name in names]
    return sorted((each for each in found if each.generated or each.prompts), key=lambda each: (-each.generated, each.name))


def stages(run: Run) -> list[Stage]:
    """The stages that took time, and what is left of the iterations; nothing of a run without results."""
    total = run.total("time_this_iter_s")
    if not total:
        return []
    evaluations = [r for r in run.results if has_evaluation(r)]
    parts = ("env_runners", "repeated")
    tokens = {
        "play": run.total("env_runners/num_generated_tokens"),
        "waves": run.total("language_stages/num_generated_tokens"),
        "learner": run.total("learners/default_policy/num_tokens_trained"),
        "evaluation": sum(run.total(f"evaluation/{part}/num_generated_tokens", evaluations) for part in parts),
    }
    if counted := {each.name: each.generated for each in roles(run)}:  # what the runners count is of all their episodes
        tokens |= {key: counted.get(key, 0.0) for key in ASKED}
    seconds = {key: run.total(f"seconds/{key}") for key in STAGES}
    seconds["evaluation"] += run.total("seconds/evaluation_before")
    found = [
        Stage(name, seconds[key] or math.nan, tokens.get(key) or math.nan)
        for key, name in STAGES.items()
        if seconds[key] or tokens.get(key)
    ]
    rest = total - sum(seconds.values())
    measured = any(not math.isnan(figure(r, "seconds/play")) for r in run.results)
    return [*found, Stage("all else" if measured else "training, not measured by stage", max(rest, 0.0), math.nan)]
