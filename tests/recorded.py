"""Runs on disk as ``rllib train`` leaves them, made up: for tests of what reads them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

THINGS = ("owl", "kite", "oven", "horse", "whale", "train", "apple", "chair")


def transition(iteration: int, number: int, turn: int = 0, **fields: Any) -> dict[str, Any]:
    """One line of the record; what it says follows from its numbers."""
    rng, played = random.Random(f"{iteration} {number} {turn}"), random.Random(f"{number} {turn}")
    won, foreseen, optimal = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.4
    action, better = f"Is it a {played.choice(THINGS)}?", f"Is it an {rng.choice(THINGS)}?"
    state = [{"role": "user", "content": "Guess my object."}]
    for asked in range(turn):
        state += [
            {"role": "assistant", "content": f"Question {asked} of {number}?"},
            {"role": "user", "content": played.choice(("Yes.", "No."))},
        ]
    future = {"text": f"{rng.choice(THINGS)} left. {'SUCCESS' if foreseen else 'FAILURE'}", "success": foreseen}
    critique = {"text": f"Optimal: {'Yes' if optimal else 'No'}\nReason: it leads on.", "optimal": optimal}
    strip = {
        "text": ["Is", " it", "?"],
        "policy": [-0.1, -2.0, -0.4],
        "target": [-0.2, -1.0, -0.9],
        "played": [-0.1, -1.5, -0.3],
    }
    line = {
        "kind": "transition",
        "iteration": iteration,
        "id": number * 1_000_000 + turn,
        "env": "TwentyQuestions",
        "episode": f"episode {number}",
        "turn": turn,
        "task_seed": 1000 + number,
        "state": state,
        "action": action,
        "observation": "No.",
        "reward": 0.0,
        "return_to_go": float(won),
        "ended": None,
        "success": won,
        "futures": [future],
        "predicted": float(foreseen),
        "critique": {**critique, "reason": "it leads on.", "fix": "" if optimal else better},
        "refined": action if optimal else better,
        "reason": "yes_skipped" if optimal else "refined",
        "trained": not optimal,
        "weight": 1.0,
        "judged": None,
        "next_action": "Can it fly?",
        "next_future": "one left. FAILURE",
        "target": {"text": "one left. FAILURE", "success": False},
        "version": iteration,
        "age": number % 5,
        "by": {"action": ["policy", iteration - number % 5], "future": ["policy", iteration], "critique": ["initial", 0]},
        "unparsed": [],
        "tokens": {"action": strip, "target": strip} if number % 4 == 0 else None,
        "critic_loss": round(rng.random(), 4),
        "policy_loss": round(rng.random(), 4),
        "priority": round(rng.random(), 4),
        "importance": 0.5,
        "stopped": False,
    }
    return line | fields


def state(number: int, iteration: int, **fields: Any) -> dict[str, Any]:
    """What an evaluation's critic says of a fixed state."""
    line = transition(7, 90 + number, 1)
    said = transition(iteration, number)
    return (
        line
        | {"kind": "state", "number": number, "iteration": iteration, "version": iteration}
        | {name: said[name] for name in ("futures", "critique", "refined")}
        | fields
    )


def episode(iteration: int, task: int, **fields: Any) -> dict[str, Any]:
    """A recorded evaluation episode of two turns."""
    messages = [
        ("system", "Rules."),
        ("user", "Guess."),
        ("assistant", "Owl?"),
        ("user", "No."),
        ("assistant", "Kite?"),
        ("user", "Yes."),
    ]
    return {
        "kind": "episode",
        "iteration": iteration,
        "version": iteration,
        "episode": f"evaluation {task}",
        "task": task,
        "task_seed": task,
        "messages": [{"role": role, "content": text} for role, text in messages],
        "rewards": [0.0, 1.0],
        "terminated": True,
        "truncated": False,
        "success": task % 2 == 0,
        "stop_reason": "success",
    } | fields


def result(iteration: int, evaluated: bool) -> dict[str, Any]:
    """One line of Tune's results."""
    rate = min(0.1 * iteration, 1.0)
    critic = {
        "num_states": 20.0,
        "auc": 0.7,
        "brier": 0.2,
        "brier_of_base_rate": 0.25,
        "ece": 0.1,
        "predicted_success": 0.2,
        "success": rate,
        "bias_error": 0.01,
        "unparsed_rate": 0.0,
        "reliability": {"predicted": [0.0, 0.5, 1.0], "came": [0.1, 0.4, 0.9], "count": [10, 5, 5]},
        "by_turn": {"1": {"num_states": 8.0, "auc": 0.6, "brier": 0.2, "predicted_success": 0.3, "success": 0.4}},
        "refinement": {"num_states": 9.0, "num_decided": 5.0, "win_rate": 0.8, "win_low": 0.4, "win_high": 0.95, "gain": 0.2},
    }
    evaluation = {
        "env_runners": {"success_rate": rate, "success_low": rate - 0.05, "success_high": rate + 0.05},
        "critic": critic,
        "repeated": {"num_tasks": 4.0, "pass_at_1": rate / 2, "pass_at_3": min(rate + 0.3, 1.0)},
    }
    return {
        "training_iteration": iteration,
        "trial_id": "abc",
        "time_total_s": 10.0 * iteration,
        "env_runners": {"success_rate": rate, "num_episodes_lifetime": 32 * iteration},
        "learners": {"default_policy": {"critic_loss": 1 / iteration, "policy_loss": math.nan}},
        "language_stages": {"verdict_yes_rate": 0.4, "future": {"unparsed_answer_rate": 0.6}},
        "seconds": {"play": 1.0, "waves": 6.0, "record": 0.05},
        **({"evaluation": evaluation} if evaluated else {}),
        **({"notices": "most answers do not parse"} if iteration == 2 else {}),
    }


def write_lines(path: Path, lines: list[Any]) -> None:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path, iterations: int = 4, each: int = 10, config: dict | None = None, more: tuple = ()) -> Path:
    """A trial's folder: each iteration's transitions, evaluations after every second."""
    facts = {
        "algorithm": "NLAC",
        "env": "TwentyQuestions",
        "env_config": {"max_turns": 6},
        "language_model": "tiny",
        "config": config or {"lr": [0.001, 1e-06]},
    }
    (folder / "transitions").mkdir(parents=True)
    (folder / "transitions" / "run.json").write_text(json.dumps(facts))
    for iteration in range(1, iterations + 1):
        write_iteration(folder, iteration, each)
        if iteration % 2 == 0:
            lines = [state(number, iteration) for number in (1, 2)]
            lines += [transition(iteration, 50 + i, kind="prediction") for i in range(4)]
            lines += [episode(iteration, task) for task in range(3)]
            write_lines(folder / "transitions" / f"evaluation_{iteration:08d}.jsonl", lines)
    write_lines(folder / "result.json", [result(i, i % 2 == 0) for i in range(1, iterations + 1)])
    if more:
        write_lines(folder / "transitions" / "iteration_00000099.jsonl", list(more))
    return folder


def write_iteration(folder: Path, iteration: int, each: int = 10) -> None:
    """The record of one more iteration."""
    lines = [transition(iteration, number, number % 3) for number in range(each)]
    write_lines(folder / "transitions" / f"iteration_{iteration:08d}.jsonl", lines)
