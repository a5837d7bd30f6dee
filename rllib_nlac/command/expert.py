"""``rllib env expert``: an expert, or a larger model, plays, and what it said becomes a file of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rllib_nlac
from rllib_nlac.activity import EPISODES, activity
from rllib_nlac.command.terminal import Terminal
from rllib_nlac.envs import registry
from rllib_nlac.envs.base import TextEnv
from rllib_nlac.inputs.endpoint import endpoint_from
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.names import unknown_key
from rllib_nlac.sampling.expert import ROLES, Episode, Expert, Teacher


def write_conversations(
    name: str,
    config: Mapping[str, Any],
    out: Path,
    episodes: int,
    skill: float,
    prompts: str,
    roles: Sequence[str],
    teacher: Mapping[str, Any] | None,
    seed: int,
    terminal: Terminal,
) -> None:
    """Plays an environment and writes a file of conversations, which is complete or not there.

    Args:
        name: Registered name of the environment, or ``module:Class``.
        config: ``env_config`` of the environment.
        out: The file; it must end in .jsonl.
        episodes: Number of episodes.
        skill: Share of turns that are the expert's.
        prompts: Prompt set that words the roles.
        roles: Which roles to write; a role that is named twice is written at two turns. None named: all.
        teacher: An endpoint in the expert's place.
        seed: Seeds tasks and mistakes.
        terminal: Where to report.

    Raises:
        ValueError: An argument is wrong, or the environment has no scripted expert.
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"--out must be a file that ends in .jsonl, and it is {str(out)!r}")
    roles = roles or ROLES
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"--roles: {unknown_key(role, ROLES, 'role')}")
    rllib_nlac.load()
    words = load_prompts(prompts, name)
    env = registry.make(name, dict(config))
    try:
        if teacher is not None:
            player: Expert = Teacher(env, name, words, endpoint_from(teacher, "--teacher"), seed)
        else:
            if not isinstance(env.unwrapped, TextEnv) or type(env.unwrapped).expert_action is TextEnv.expert_action:
                raise ValueError(f"{name} has no scripted expert: give --teacher, a larger model that plays in its place")
            player = Expert(env, name, words, skill, seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        before: Episode | None = None
        unfinished, rows = out.with_suffix(".unfinished"), 0
        try:
            with unfinished.open("w", encoding="utf-8") as file, activity.stage("playing", episodes, EPISODES):
                for episode in player.episodes(episodes):
                    for row in player.rows(episode, roles, other=before):
                        row["group"] = player.counts["episodes"]
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                        rows += 1
                    before = episode
                    activity.advance(EPISODES)
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    finally:
        env.close()
    counts = dict(player.counts)
    won = counts.pop("won", 0) / max(counts.pop("episodes", 0), 1)
    written = ", ".join(f"{name} {number}" for name, number in counts.items())
    terminal.say(f"{out}: {rows} conversations, {won:.0%} of the episodes were won; {written}")
