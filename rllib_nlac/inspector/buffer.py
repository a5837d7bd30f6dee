"""What a checkpoint's replay buffer holds, as lines of the record that nobody was asked about."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllib_nlac.algorithm.replay import REPLAY_BUFFER
from rllib_nlac.checkpoints.checkpoint import CONSTRUCTOR, opened
from rllib_nlac.diagnostics.record import FOLDER, age, author, moment
from rllib_nlac.diagnostics.results import RESULTS
from rllib_nlac.inspector.run import Run, read_run
from rllib_nlac.replay.buffer import MAX_EPISODE_LENGTH, STATE_FILE, TextReplayBuffer, transition_at


def read_checkpoint(path: Path) -> Run:
    """The transitions of a checkpoint's buffer, and the curves of its run where they lie beside it.

    Raises:
        CheckpointError, FileNotFoundError: It cannot be read.
        ValueError: It holds no buffer.
    """
    with opened(path) as verified:
        folder = verified.folder / REPLAY_BUFFER
        if not folder.is_dir():
            raise ValueError(
                f"{path} holds no replay buffer: replay_buffer_config has in_checkpoints: false, or the algorithm has none. "
                f"Inspect its run, {path.parent}"
            )
        env, config = _environment(verified.folder / CONSTRUCTOR)
        lines = _lines(folder, env, int(verified.manifest.get("weight_version") or 0))
    run = read_run(path.parent) if (path.parent / RESULTS).is_file() or (path.parent / FOLDER).is_dir() else Run("")
    facts = run.facts or {"algorithm": verified.manifest.get("algorithm"), "env": env, "env_config": config}
    name = f"{path.parent.name}/{path.name}"
    return replace(run, name=name, facts=facts, lines=lines, episodes=[], is_buffer=True)


def _environment(constructor: Path) -> tuple[str, dict[str, Any]]:
    with constructor.open("rb") as file:
        info = pickle.load(file)
    given = info["ctor_args_and_kwargs"][0][0]
    given = given if isinstance(given, dict) else given.to_dict()
    return str(given.get("env")), dict(given.get("env_config") or {})


def _lines(folder: Path, env: str, version: int) -> list[dict[str, Any]]:
    with (folder / STATE_FILE).open("rb") as file:
        state = pickle.load(file)
    buffer = TextReplayBuffer(env=env, capacity=state["capacity"], alpha=state["alpha"])
    buffer.load(folder)
    lines: list[dict[str, Any]] = []
    for (index, t), priority in buffer.places():
        episode = buffer.episodes[index - buffer.num_evicted]
        transition = transition_at(env, episode, t, index * MAX_EPISODE_LENGTH)
        line = {"kind": "transition", "iteration": 0, **moment(transition), "priority": priority}
        lines.append({**line, "age": age(transition, version), "by": {"action": author(transition)}})
    return json.loads(json.dumps(lines))
