"""Tasks from files: rows of parquet or JSONL with a prompt and a reward style, or with the string of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rllib_nlac.envs.base import Reply, TaskId
from rllib_nlac.envs.mcp_server import McpServer
from rllib_nlac.envs.rows import Row, all_rows, files_of, prompt_of, text_field
from rllib_nlac.envs.task_strings import AGENT_ENV, GymTask, check_row, parse_env_str, row_env
from rllib_nlac.envs.tools import ToolEnv
from rllib_nlac.episode import ENVIRONMENT
from rllib_nlac.names import unknown_key
from rllib_nlac.rewards.math_verify_worker import UnreadableTruth
from rllib_nlac.rewards.row_rewards import check_settings, check_truth
from rllib_nlac.rewards.styles import SOURCES, STYLES, reward, style_of
from rllib_nlac.types import ANSWER

REWARD_KEYS = ("url", "timeout_s", "max_retries", "verifiers", "math_verify")
VERIFIER_KEYS = ("url", "timeout_s", "max_retries")
NO_TEXT = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class TaskRow:
    """A row, read.

    Attributes:
        place: Its file and line.
        style: The reward style.
        prompt: The first observation; for ``agent_env`` the environment says it.
        system_prompt: May be empty.
        truth: What is right.
        env_str: For ``agent_env``, the task's environment.
        settings: Settings of the style, from the row.
    """

    place: str
    style: str
    prompt: str = ""
    system_prompt: str = ""
    truth: Any = None
    env_str: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class TaskSet(ToolEnv[TaskRow]):
    """Tasks from files, with a reward style each or an environment of their own.

    Draws a row and plays it: an answer to a prompt, before which ``tools`` may be called, or a whole episode of the environment
    that the row names.

    A row has a column ``env_str`` (``agent_env``), or ``prompt`` (a text or a list of messages) with ``reward_model``: a dict
    of ``style`` and ``ground_truth``. Where the style is none of ``STYLES``, as "rule" and "model" in files for verl, the row's
    ``data_source`` decides, by ``data_sources`` and then ``SOURCES``.

    A row is data, whoever wrote it: it may choose among registered environments and set the plain values that they declare in
    ``row_schema``. What names files, addresses, keys or code comes from this configuration: ``environments``, ``tools`` and
    ``reward_config``. Everything else that a row holds is an error with its file and line.

    Args:
        train_files: JSONL or parquet files of the split "train"; patterns such as ``data/*.parquet`` will do.
        val_files: Those of the split "eval".
        data_sources: Styles of data sources by their names or patterns, such as ``{my/sums: rule-openai/gsm8k, "mine_*":
            verifier_service}``.
        reward_config: Settings of the styles, such as ``{url: http://localhost:9000/verify, math_verify: true}``. Under
            ``verifiers`` there can be several by name, ``{strict: {url: ...}}``, of which a row chooses by
            ``reward_model.verifier``.
        environments: Settings of the rows' environments by their names, which rows may add to, such as
            ``{TwentyQuestions: {oracle: {kind: endpoint, base_url: ..., model: ...}}}``. One that has no ``row_schema`` must
            be named here before a row may choose it.
        tools: ``{mcp: {...}}``, with the keys of ``McpServer``: its tools are those of all rows with a reward style.
        trusted: Whether the files are your own and may do all that this configuration may. Whoever writes a row of them can
            then run code, read files and send secrets wherever they like.
        max_turns: The most turns of a row with an environment or tools.
        split: "train" or "eval"; also of the rows' environments that have splits, unless a row or ``environments`` sets it.

    Raises:
        ValueError: There is no file, or a row is malformed; its file and line are named.
    """

    def __init__(
        self,
        train_files: str | Sequence[str] = (),
        val_files: str | Sequence[str] = (),
        reward_config: Mapping[str, Any] | None = None,
        environments: Mapping[str, Mapping[str, Any]] | None = None,
        tools: Mapping[str, Any] | None = None,
        trusted: bool = False,
        max_turns: int = 30,
        split: str = "train",
        data_sources: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; TaskSet knows 'train' and 'eval'")
        names = files_of(split, train_files, val_files)
        self._settings = dict(reward_config or {})
        self._verifiers = dict(self._settings.pop("verifiers", None) or {})
        _check_reward_config(self._settings, self._verifiers)
        for name, style in (data_sources or {}).items():
            if style not in STYLES:
                raise ValueError(f"env_config.data_sources, {name!r:.80}: {unknown_key(style, STYLES, 'reward style')}")
        self._environments = {name: dict(settings or {}) for name, settings in (environments or {}).items()}
        self._trusted = trusted
        may = May(trusted, tuple(self._environments), tuple(self._verifiers))
        self._rows = load_tasks(names, may, tuple((data_sources or {}).items()))
        self._inner: GymTask | None = None
        self._server = McpServer.of(tools) if tools is not None else None

    def _info(self) -> dict[str, Any]:
        """Also the environment that a row plays, whose prompts are the right ones, and its sub-goals."""
        info = super()._info()
        if self._current is not None and self._current.task.env_str:
            info[ENVIRONMENT] = parse_env_str(self._current.task.env_str)[0]
        if self._inner is not None and "subgoals" in self._inner.info:
            info["subgoals"] = self._inner.info["subgoals"]
        return info

    @property
    def system_prompt(self) -> str:
        assert self._current is not None
        own = self._current.task.system_prompt
        return own or (self._inner.system_prompt if self._inner is not None else "")

    @property
    def tools(self) -> list[dict[str, Any]]:
        if self._inner is None:
            return self._server.tools if self._server is not None else []
        return self._inner.info.get("tools") or []

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._server is not None
        return self._server.call(name, arguments)

    def sample_task(self, spec: str | None) -> TaskId[TaskRow]:
        index = int(self.np_random.integers(len(self._rows))) if spec is None else int(spec) if str(spec).isdigit() else -1
        if not 0 <= index < len(self._rows):
            raise ValueError(f"task {spec!r} does not exist; tasks are the rows 0 to {len(self._rows) - 1}")
        row = self._rows[index]
        self._seed = int(self.np_random.integers(2**31))
        return TaskId(str(index), row, {"ground_truth": row.truth, "env_str": row.env_str})

    def begin(self, task: TaskRow) -> str:
        self._close_inner()
        if task.style != AGENT_ENV:
            if self._server is not None:
                if self._server.per_episode:
                    self._server.stop()
                self._server.start()
            return task.prompt
        try:
            self._inner = row_env(task.env_str, self._environments, self._seed, self._trusted, self.split)
        except ValueError as error:
            raise ValueError(f"{task.place}: {error}") from error
        texts = [text for text in dict.fromkeys((task.prompt, self._inner.prompt)) if text]
        if not texts:
            raise ValueError(f"{task.place}: neither the row nor its environment has a prompt, so the agent would read nothing")
        return "\n\n".join(texts)

    def reply(self, task: TaskRow, action: str) -> Reply:
        if self._inner is None:
            return super().reply(task, action) if self._server is not None else self.answer(task, action)
        before = self._inner.reward
        output = self._inner.step(action)
        value = self._inner.reward - before
        if not self._inner.finished:
            return Reply(output, value, messages=self._inner.info.get(ANSWER) or ())
        return Reply(output, value, self._inner.success, self._inner.truncated, self._inner.info.get("stop_reason"))

    def answer(self, task: TaskRow, action: str) -> Reply:
        try:
            value = reward(task.style, action, task.truth, **{"prompt": task.prompt, **self._settings_of(task)})
        except UnreadableTruth as error:
            raise ValueError(f"{task.place}: {error}") from None
        return Reply("", value, success=value >= 1.0)

    def close(self) -> None:
        self._close_inner()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _close_inner(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _settings_of(self, task: TaskRow) -> dict[str, Any]:
        settings = {**self._settings, **task.settings}
        return {**settings, **self._verifiers.get(settings.pop("verifier", ""), {})}


def _check_reward_config(settings: Mapping[str, Any], verifiers: Mapping[str, Any]) -> None:
    for key in settings:
        if key not in REWARD_KEYS:
            raise ValueError(f"env_config.reward_config: {unknown_key(key, REWARD_KEYS)}")
    for name, verifier in verifiers.items():
        for key in verifier:
            if key not in VERIFIER_KEYS:
                raise ValueError(f"env_config.reward_config.verifiers.{name}: {unknown_key(key, VERIFIER_KEYS)}")


@dataclass(frozen=True)
class May:
    """What rows may do.

    Attributes:
        anything: They are trusted.
        environments: They may choose these, too, although they have no ``row_schema``.
        verifiers: They may name these.
    """

    anything: bool = False
    environments: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()


@lru_cache(maxsize=8)
def load_tasks(
    files: tuple[str, ...],
    may: May,
    data_sources: tuple[tuple[str, str], ...],
) -> tuple[TaskRow, ...]:
    """All rows of files; the slots of an EnvRunner share them.

    Raises:
        ValueError: A row is malformed, or there is none.
    """
    return tuple(parse_task(row, may, dict(data_sources)) for row in all_rows(files))


def parse_task(
    row: Row,
    may: May | None = None,
    data_sources: Mapping[str, str] | None = None,
) -> TaskRow:
    """Reads a row.

    Raises:
        ValueError: Something is missing, malformed or more than a row may do; the row's place is named.
    """
    may = may or May()
    for key in NO_TEXT:
        if row.fields.get(key) not in (None, "", [], {}):
            raise ValueError(
                f"{row.place}: the column {key!r} holds something, and tasks are of text alone: take out such rows, or the "
                "column if the text alone makes a task"
            )
    if row.fields.get("env_str"):
        env_str = text_field(row, "env_str")
        try:
            if may.anything:
                parse_env_str(env_str)
            else:
                check_row(env_str, dict.fromkeys(may.environments))
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        system, prompt = prompt_of(row) if row.fields.get("prompt") else ("", "")
        return TaskRow(row.place, AGENT_ENV, prompt, system, env_str=env_str)
    model = row.fields.get("reward_model") or {}
    if not isinstance(model, Mapping):
        raise ValueError(f"{row.place}: reward_model must be a dict of style and ground_truth, and it is {model!r:.80}")
    style = _style(row, model, data_sources or {})
    if style == AGENT_ENV:
        raise ValueError(f"{row.place}: the reward style {style!r} needs the environment's string, in the column 'env_str'")
    truth = model.get("ground_truth", row.fields.get("ground_truth"))
    if truth is None and style != "verifier_service":
        raise ValueError(f"{row.place}: no ground_truth in reward_model, nor in a column of its own")
    settings = {key: value for key, value in model.items() if key not in ("style", "ground_truth") and value is not None}
    system, prompt = prompt_of(row)
    try:
        check_truth(style, truth)
        if not may.anything:
            check_settings(style, settings, dict.fromkeys(may.verifiers))
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None
    return TaskRow(row.place, style, prompt, system, truth, settings=settings)


def _style(row: Row, model: Mapping[str, Any], data_sources: Mapping[str, str]) -> str:
    named, source = model.get("style"), row.fields.get("data_source")
    is_foreign = isinstance(named, str) and (named == "model" or named.startswith("rule"))
    style = named
    if not named or (is_foreign and named not in STYLES):
        style = (style_of(source, data_sources) if isinstance(source, str) else None) or named
    if isinstance(style, str) and style in STYLES:
        return style
    if is_foreign:
        near = unknown_key(source, {*data_sources, *SOURCES}, "data_source")
        raise ValueError(
            f"{row.place}: the reward style {named!r:.80} leaves it to the data_source: {near}. Name its style, as in "
            f"env_config: {{data_sources: {{{source!s:.80}: rule-lighteval/MATH}}}}; styles are {', '.join(STYLES)}"
        )
    problem = unknown_key(str(style), STYLES) if style else "no reward style: set reward_model.style"
    raise ValueError(f"{row.place}: {problem}")
