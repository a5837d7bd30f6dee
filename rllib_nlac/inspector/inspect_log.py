"""Evaluation episodes as logs of Inspect AI, a file an evaluation, in its JSON form, which ``inspect view`` reads beside .eval.

The package inspect_ai is not needed to write them, and it cannot be installed beside this package's pins: it asks for an older
fsspec. Source: the fields of ``EvalLog``, version 2, https://inspect.aisi.org.uk/eval-logs.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rllib_nlac.inspector.run import Run
from rllib_nlac.version import __version__

SCORER = "success"
NO_TIME = "1970-01-01T00-00-00+00-00"  # the record knows iterations and no clock


def logs(run: Run) -> dict[str, dict[str, Any]]:
    """A log of each evaluation, by a name for its file: as Inspect AI names its own, for it lists no other."""
    by_iteration: dict[int, list[dict[str, Any]]] = {}
    for line in run.episodes:
        by_iteration.setdefault(line["iteration"], []).append(line)
    env = re.sub(r"[^A-Za-z0-9]+", "-", str(run.facts.get("env") or "environment"))[:60]
    return {f"{NO_TIME}_{env}_iteration{number:08d}": log(run, number, own) for number, own in sorted(by_iteration.items())}


def log(run: Run, iteration: int, episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """One evaluation's recorded episodes; only some of those that it played."""
    facts, when = run.facts, datetime.fromtimestamp(0, UTC).isoformat()
    model, env = f"rllib_nlac/{facts.get('language_model') or 'model'}", str(facts.get("env") or "environment")
    won = sum(line["success"] for line in episodes)
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": f"{run.name}-{iteration}",
            "run_id": run.name,
            "created": when,
            "task": env,
            "task_id": f"{env}-{iteration}",
            "task_version": 0,
            "dataset": {"name": env, "samples": len(episodes), "sample_ids": [_id(i) for i in range(len(episodes))]},
            "model": model,
            "model_args": {},
            "task_args": facts.get("env_config") or {},
            "config": {},
            "packages": {"rllib_nlac": str(facts.get("version") or __version__)},
            "metadata": {"algorithm": facts.get("algorithm"), "iteration": iteration},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(episodes),
            "completed_samples": len(episodes),
            "scores": [
                {
                    "name": SCORER,
                    "scorer": SCORER,
                    "params": {},
                    "metrics": {"mean": {"name": "mean", "value": won / max(len(episodes), 1), "params": {}}},
                }
            ],
        },
        "stats": {"started_at": when, "completed_at": when, "model_usage": {}},
        "samples": [_sample(number, line, model) for number, line in enumerate(episodes)],
    }


def _id(number: int) -> int:
    return number + 1


def _sample(number: int, line: Mapping[str, Any], model: str) -> dict[str, Any]:
    messages = [_message(each, f"{number}-{at}", model) for at, each in enumerate(line["messages"])]
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    last = answers[-1] if answers else ""
    reply = {"role": "assistant", "content": last, "source": "generate", "model": model}
    return {
        "id": _id(number),
        "epoch": 1,
        "input": next((each["content"] for each in messages if each["role"] == "user"), ""),
        "target": "",
        "messages": messages,
        "output": {"model": model, "choices": [{"message": reply, "stop_reason": "stop"}], "completion": last},
        "scores": {SCORER: {"value": float(line["success"]), "answer": last}},
        "metadata": {
            name: line[name] for name in ("task", "task_seed", "rewards", "terminated", "truncated", "stop_reason", "version")
        },
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }


def _message(message: Mapping[str, Any], name: str, model: str) -> dict[str, Any]:
    role = message["role"]
    found: dict[str, Any] = {"id": name, "role": "user" if role == "tool" else role, "content": message["content"]}
    if role == "assistant":
        found |= {"source": "generate", "model": model}
    return found
