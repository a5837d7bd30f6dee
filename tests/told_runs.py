"""Results of a run in three iterations, made up, and what changes one figure of them: for tests of what tells of a run."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

from rllib_nlac.diagnostics.results import Run


def evaluation(success: float, **critic: float) -> dict:
    """An evaluation of 100 tasks or so, with what the critic said."""
    figures = {"num_states": 64.0, "auc": 0.8, "brier": 0.15, "brier_of_base_rate": 0.25, "ece": 0.05}
    figures |= {"predicted_success": success, "success": success, "bias_error": 0.02, "unparsed_rate": 0.0, "one_class": 0.0}
    curve = {"predicted": [0.1, 0.9], "came": [0.2, 0.8], "count": [32, 32]}
    return {
        "env_runners": {
            "success_rate": success,
            "success_low": max(success - 0.08, 0.0),
            "success_high": min(success + 0.08, 1.0),
            "token_entropy": 0.5,
            "action_entropy": 1.5,
            "num_generated_tokens": 500,
        },
        "repeated": {"success_rate": success, "pass_at_1": success, "pass_at_4": min(success + 0.1, 1), "num_tasks": 50},
        "critic": {**figures, **critic, "reliability": curve},
    }


def result(iteration: int, success: float = 0.5, evaluated: dict | None = None, interval: int | None = 1, **more) -> dict:
    stages = {"verdict_yes_rate": 0.4, "policy_trained_rate": 1.0, "num_generated_tokens": 4000}
    return {
        "training_iteration": iteration,
        "time_this_iter_s": 10.0,
        "seconds": {"play": 2.0, "waves": 4.0, "wave_1": 4.0, "learner": 2.0, "evaluation": 1.0, "evaluation_critic": 0.5},
        "env_runners": {
            "success_rate": success,
            "num_episodes": 32,
            "num_episodes_lifetime": 32.0 * iteration,
            "num_generated_tokens": 1000,
            "num_env_steps_sampled": 100,
            "action_parse_failures": 0,
        },
        "learners": {"default_policy": {"critic_loss": 1.0, "num_tokens_trained": 9000, "num_stopped_steps": 0}},
        "language_stages": stages,
        "config": {
            "env": "TwentyQuestions",
            "language_model": "tiny",
            "evaluation_interval": interval,
            "evaluation_duration": 128,
        },
        **({"evaluation": evaluated} if evaluated else {}),
        **more,
    }


def run_of(*results: dict, tmp_path=None, **fields) -> Run:
    return Run(folder=tmp_path or SimpleNamespace(name="trial"), algorithm="NLAC", results=results, **fields)  # type: ignore[arg-type]


GOOD = run_of(
    result(1, 0.25, evaluation(0.3)),
    result(2, 0.5, evaluation(0.6)),
    result(3, 0.75, evaluation(0.98)),
    checkpoint="trial/checkpoint_000000",
)


def changed(run: Run, path: str, value, place: int = -1) -> Run:
    """The run with another figure in one of its results."""
    results = copy.deepcopy(list(run.results))
    *keys, last = path.split("/")
    inner = results[place]
    for key in keys:
        inner = inner.setdefault(key, {})
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
    return replace(run, results=results)
