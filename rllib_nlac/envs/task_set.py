"""Tasks from files: rows of parquet or JSONL with a prompt and a reward style, or with the string of an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rllib_nlac.envs.base import Reply, TaskId, TextEnv
from rllib_nlac.envs.official import BaseEnvironment, make_env, parse_env_str
from rllib_nlac.envs.rows import Row, read_rows, text_field
from rllib_nlac.names import unknown_key
from rllib_nlac.rewards.styles import AGENT_ENV, STYLES, reward


@dataclass(frozen=True)
class TaskRow:
    """A row, read.

    Attributes:
        style: The reward style.
        prompt: The first observation; for ``agent_env`` the environment says it.
        system_prompt: May be empty.
        truth: What is right.
        env_str: For ``agent_env``, the task's environment.
        settings: Of the style, from the row.
    """

    style: str
    prompt: str = ""
    system_prompt: str = ""
    truth: Any = None
    env_str: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class TaskSet(TextEnv[TaskRow]):
    """Tasks from files, with a reward style each or an environment of their own.

    Draws a row and plays it: one answer to a prompt, or a whole episode of the environment that the row names.

    A row has a column ``env_str`` (``agent_env``), or ``prompt`` (a text or a list of messages) with ``reward_model``: a dict
    of ``style`` and ``ground_truth``. A style "rule" takes the row's ``data_source`` as its second half, as in
    ``rule-openai/gsm8k``.

    Args:
        train_files: JSONL or parquet files of the split "train"; patterns such as ``data/*.parquet`` will do.
        val_files: Those of the split "eval".
        prompt_key: Name of the column with the prompt.
        env_key: Name of the column with the environment's string.
        reward_style: The style of rows that name none.
        reward_config: Settings of the styles, such as ``{url: http://localhost:9000/verify, math_verify: true}``.
        max_turns: The most turns of an ``agent_env`` row.
        split: "train" or "eval".

    Raises:
        ValueError: There is no file, or a row is malformed; its file and line are named.
    """

    def __init__(
        self, train_files: str | Sequence[str] = (), val_files: str | Sequence[str] = (), prompt_key: str = "prompt",
        env_key: str = "env_str", reward_style: str | None = None, reward_config: Mapping[str, Any] | None = None,
        max_turns: int = 30, split: str = "train",
    ) -> None:  # fmt: skip
        super().__init__(max_turns=max_turns, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; TaskSet knows 'train' and 'eval'")
        files = train_files if split == "train" else val_files
        key = "train_files" if split == "train" else "val_files"
        if not files:
            raise ValueError(f"env_config.{key} is empty, and the split is {split!r}")
        names = (files,) if isinstance(files, str) else tuple(files)
        self._rows = load_tasks(names, prompt_key, env_key, reward_style)
        self._settings = dict(reward_config or {})
        self._inner: BaseEnvironment | None = None

    @property
    def system_prompt(self) -> str:
        assert self._current is not None
        return self._inner.system_prompt if self._inner is not None else self._current.task.system_prompt

    def sample_task(self, spec: str | None) -> TaskId[TaskRow]:
        index = int(self.np_random.integers(len(self._rows))) if spec is None else int(spec) if str(spec).isdigit() else -1
        if not 0 <= index < len(self._rows):
            raise ValueError(f"task {spec!r} does not exist; tasks are the rows 0 to {len(self._rows) - 1}")
        row = self._rows[index]
        self._seed = int(self.np_random.integers(2**31))
        return TaskId(str(index), row, {"ground_truth": row.truth, "env_str": row.env_str})

    def begin(self, task: TaskRow) -> str:
        if task.style != AGENT_ENV:
            self._inner = None
            return task.prompt
        prefix, arguments = parse_env_str(task.env_str)
        self._inner = make_env(
            task.env_str if "seed" in arguments or not _is_ours(prefix) else _seeded(task.env_str, self._seed)
        )
        return self._inner.prompt

    def reply(self, task: TaskRow, action: str) -> Reply:
        if self._inner is None:
            value = reward(task.style, action, task.truth, **{"prompt": task.prompt, **self._settings, **task.settings})
            return Reply("", value, success=value >= 1.0)
        before = self._inner.reward
        _, output = self._inner.step(action)
        value = self._inner.reward
        return Reply(output, value - before, success=value >= 1.0 if self._inner.finished else None)


def _is_ours(prefix: str) -> bool:
    from rllib_nlac.envs import registry

    return prefix in registry.ENVIRONMENTS


def _seeded(env_str: str, seed: int) -> str:
    """The same string with a seed, so that the row's task depends on the reset's seed and on nothing else."""
    prefix, arguments = parse_env_str(env_str)
    return f"{prefix}@{json.dumps({**arguments, 'seed': seed})}"


@lru_cache(maxsize=8)
def load_tasks(files: tuple[str, ...], prompt_key: str, env_key: str, reward_style: str | None) -> tuple[TaskRow, ...]:
    """All rows of files; the slots of an EnvRunner share them.

    Raises:
        ValueError: A row is malformed, or there is none.
    """
    rows = tuple(parse_task(row, prompt_key, env_key, reward_style) for row in read_rows(files))
    if not rows:
        raise ValueError(f"{', '.join(files)}: no rows")
    return rows


def parse_task(row: Row, prompt_key: str = "prompt", env_key: str = "env_str", reward_style: str | None = None) -> TaskRow:
    """Reads a row.

    Raises:
        ValueError: Something is missing or malformed; the row's place is named.
    """
    if row.fields.get(env_key):
        env_str = text_field(row, env_key)
        try:
            parse_env_str(env_str)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        return TaskRow(AGENT_ENV, env_str=env_str)
    model = row.fields.get("reward_model") or {}
    if not isinstance(model, Mapping):
        raise ValueError(f"{row.place}: reward_model must be a dict of style and ground_truth, and it is {model!r:.80}")
    style = model.get("style") or reward_style
    if style == "rule":
        style = f"rule-{row.fields.get('data_source')}"
    if style == AGENT_ENV:
        raise ValueError(f"{row.place}: the reward style {style!r} needs the environment's string, in the column {env_key!r}")
    if style not in STYLES:
        problem = unknown_key(str(style), STYLES) if style else "no reward style: set reward_model.style or reward_style"
        raise ValueError(f"{row.place}: {problem}")
    truth = model.get("ground_truth", row.fields.get("ground_truth"))
    if truth is None and style != "verifier_service":
        raise ValueError(f"{row.place}: no ground_truth in reward_model, nor in a column of its own")
    system, prompt = _prompt(row, prompt_key)
    extra = {key: value for key, value in model.items() if key not in ("style", "ground_truth") and value is not None}
    return TaskRow(style, prompt, system, truth, settings=extra)


def _prompt(row: Row, key: str) -> tuple[str, str]:
    value = row.fields.get(key)
    if not isinstance(value, list):
        return "", text_field(row, key)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in value]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"{row.place}: {key!r} must be a text, or one user message after at most one system message; it has {roles}"
        )
    texts = [str(message.get("content") or "") for message in value]
    return ("", texts[0]) if len(texts) == 1 else (texts[0], texts[1])
