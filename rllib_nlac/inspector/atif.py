"""Evaluation episodes in the Agent Trajectory Interchange Format, ATIF v1.7: plain JSON, a file an episode.

Source: https://github.com/laude-institute/harbor, docs/rfcs/0001-trajectory-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_nlac.inspector.run import Run
from rllib_nlac.version import __version__

VERSION = "ATIF-v1.7"
SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "user"}


def trajectories(run: Run) -> dict[str, dict[str, Any]]:
    """All recorded episodes, by a name for each one's file."""
    found: dict[str, dict[str, Any]] = {}
    for line in run.episodes:
        name = f"iteration_{line['iteration']:08d}_{len(found):04d}"
        found[name] = trajectory(run, line, name)
    return found


def trajectory(run: Run, line: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One episode: what the environment says to an action is the next step, as the agent reads it."""
    rewards = iter(line["rewards"])
    steps: list[dict[str, Any]] = []
    for message in line["messages"]:
        step = {
            "step_id": len(steps) + 1,
            "source": SOURCES.get(message["role"], "user"),
            "message": message["content"],
        }
        if step["source"] == "agent":
            step["extra"] = {"reward": next(rewards, None)}
        steps.append(step)
    facts = run.facts
    return {
        "schema_version": VERSION,
        "session_id": f"{run.name}-{name}",
        "trajectory_id": name,
        "agent": {
            "name": str(facts.get("algorithm") or "rllib_nlac"),
            "version": str(facts.get("version") or __version__),
            "model_name": str(facts.get("language_model") or ""),
            "extra": {"weight_version": line["version"], "iteration": line["iteration"]},
        },
        "steps": steps,
        "final_metrics": {
            "total_steps": len(steps),
            "extra": {"success": line["success"], "return": sum(r for r in line["rewards"] if r)},
        },
        "extra": {
            "environment": facts.get("env"),
            "env_config": facts.get("env_config"),
            "task": line["task"],
            "task_seed": line["task_seed"],
            "terminated": line["terminated"],
            "truncated": line["truncated"],
        },
    }
