"""Environments whose agent calls tools: the methods of a class, or whatever answers a call by its name and arguments."""

from __future__ import annotations

import abc
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jsonschema.exceptions
import referencing

from rllib_nlac.envs.answers import AnswerError, check_tools
from rllib_nlac.envs.base import EpisodeLost, Reply, Task, TaskId, TextEnv
from rllib_nlac.envs.rows import Row, all_rows, files_of, prompt_of
from rllib_nlac.inputs.endpoint import EndpointError
from rllib_nlac.inputs.tool_calls import Call, ToolError, read_calls
from rllib_nlac.names import attribute_of

logger = logging.getLogger(__name__)
_LATER = re.compile(r'```(?:json)?\s*\{|\{\s*"(?:name|arguments)"\s*:')  # where a call begins after other text
IN_PLAIN_TEXT = 'A tool call is one JSON object and nothing else, as in {"name": "TOOL", "arguments": {...}}.'
NO_TOOLS = ("reset", "get_reward")  # of a class whose other public methods are tools


class ToolEnv(TextEnv[Task]):
    """Base class of environments with tools, which are by default the public methods of the subclass.

    Each needs type hints and a Google docstring. A turn that calls tools is answered with a message for each result; what a
    tool raises, and what is wrong with a call, is such a result too. A turn without a call goes to ``answer``.
    """

    @property
    def toolset(self) -> Any:
        """The object whose public methods are the tools."""
        return self

    @property
    def tools(self) -> list[dict[str, Any]]:
        kind: Any = type(self.toolset)
        return schemas_of(kind)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Makes a call that fits its schema. The result is told as it is where it is a text, and else as JSON."""
        return getattr(self.toolset, name)(**arguments)

    def answer(self, task: Task, action: str) -> Reply:
        """The answer to a turn without a call. By default it ends the episode, with success for a reward of 1 or more."""
        reward = float(self.get_reward())
        return Reply("", reward, success=reward >= 1.0)

    def get_reward(self) -> float:
        """What an episode is worth when it ends; 0 by default."""
        return 0.0

    def reply(self, task: Task, action: str) -> Reply:
        calls = read_calls(action)[1]
        if not calls:
            return self.answer(task, action)
        results = [self._result(call) for call in calls]
        reward = float(self.get_reward()) if self._turn >= self.max_turns else 0.0
        return Reply("", reward, success=True if reward >= 1.0 else None, messages=results)

    def _result(self, call: Call | str) -> dict[str, Any]:
        known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}
        name = {"name": call.name} if isinstance(call, Call) and call.name in known else {}
        try:
            if isinstance(call, str):
                raise ToolError(call)
            check_call(call.name, call.arguments, known)
            result = self.call(*call)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (EndpointError, EpisodeLost):
            raise
        except Exception as error:
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            return {"role": "tool", **name, "content": f"Error: {kind}{error}", "error": True}
        return {"role": "tool", **name, "content": text}


class ForeignToolEnv(TextEnv[Task]):
    """Base class of environments whose tools are another package's or a server's, with one call a turn at most.

    Their owner says what is wrong with a call, in a text that begins with "Error: "; nothing is held against the schemas here.

    Args:
        max_turns: Actions per episode.
        split: Which tasks are drawn.
        plain_text: Whether the system prompt lists the tools, and results are texts of the user's.
    """

    errors: ClassVar[tuple[str, ...]] = ("Error: ",)  # what results begin with where the call failed
    has_tools = True  # False: no turn is read as a call

    def __init__(self, max_turns: int, split: str, plain_text: bool = False) -> None:
        super().__init__(max_turns=max_turns, split=split)
        self._plain_text = plain_text
        self._schemas: list[dict[str, Any]] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [] if self._plain_text else self._schemas

    @abc.abstractmethod
    def act(self, task: Task, action: str, call: Call | None) -> Reply:
        """The answer to one action, and to the call in it.

        Raises:
            ToolError: It cannot be made.
        """

    def offer(self, schemas: list[dict[str, Any]]) -> None:
        """Takes the schemas of the tools. If chat templates cannot show one, all are told in plain text from here on."""
        self._schemas = schemas
        try:
            check_tools(schemas)
        except AnswerError as error:
            if not self._plain_text:
                logger.warning("%s: its tools are told in plain text: %s", type(self).__name__, error)
            self._plain_text = True

    def with_tools(self, prompt: str) -> str:
        """A system prompt, and in plain text also how a call is written and what can be called."""
        if not self._plain_text:
            return prompt
        return "\n".join([f"{prompt} {IN_PLAIN_TEXT}\n\nTools:", *(json.dumps(tool["function"]) for tool in self._schemas)])

    def reply(self, task: Task, action: str) -> Reply:
        name = "" if self.has_tools else None  # None: the turn calls nothing
        try:
            call = parse_tool_call(action) if self.has_tools else None
            name = call.name if call is not None else None
            answer = self.act(task, action, call)
        except ToolError as error:
            answer = Reply(f"Error: {error!s:.1000}")
        if name is None or self._plain_text:
            return answer
        known = {"name": name} if any(tool["function"]["name"] == name for tool in self._schemas) else {}
        failed = {"error": True} if answer.text.startswith(self.errors) else {}
        return replace(answer, text="", messages=[{"role": "tool", **known, "content": answer.text, **failed}])


def check_call(name: str, arguments: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]) -> None:
    """Holds a call against the schemas of the tools.

    Raises:
        ToolError: There is no such tool, or an argument is missing, unknown or of the wrong kind.
    """
    if name not in schemas:
        raise ToolError(f"there is no tool {name!r:.80}; tools are {', '.join(schemas)}")
    # As transformers writes an argument that may be None, which JSON Schema does not know.
    own: Mapping[str, Any] = schemas[name].get("properties") or {}
    may_be_none = [key for key, value in own.items() if isinstance(value, Mapping) and value.get("nullable")]
    schema = {**schemas[name], "properties": {**own, **{key: {"anyOf": [own[key], {"type": "null"}]} for key in may_be_none}}}
    # Not jsonschema.validate, which holds the schema against its own each time: that takes longer than the rest of a step.
    # With a registry of its own, for the default one fetches what a "$ref" names.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    if (error := jsonschema.exceptions.best_match(validator.iter_errors(arguments))) is not None:
        where = f", at {'.'.join(map(str, error.absolute_path))}" if error.absolute_path else ""
        raise ToolError(f"{name}: {error.message:.200}{where}")


def parse_tool_call(action: str) -> Call | None:
    """The call in an action, or None where the action is text for the user.

    Text may stand before a call. A tool without arguments needs no ``arguments``.

    Raises:
        ToolError: It looks like a call and is none, or there are several.
    """
    calls = read_calls(action)[1]
    if not calls and (start := _LATER.search(action)):
        calls = read_calls(action[start.start() :])[1]
    if not calls and action.strip().startswith("{"):
        raise ToolError("a tool call must be one JSON object and nothing else")
    if not calls:
        return None
    if len(calls) > 1 or isinstance(calls[0], str):
        raise ToolError(calls[0] if isinstance(calls[0], str) else "one call at a time")
    return calls[0]


@functools.cache
def schemas_of(kind: type) -> list[dict[str, Any]]:
    """Schemas of the public methods of a class.

    Raises:
        ValueError: A method has no docstring, or an argument of it no type hint or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    found = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in NO_TOOLS or (issubclass(kind, ToolEnv) and hasattr(ToolEnv, name)):
            continue
        try:
            schema = get_json_schema(method)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"{kind.__name__}.{name} is a public method and so a tool, and its schema cannot be made ({error!s:.200}): "
                "give it type hints and a Google docstring, or begin its name with _"
            ) from None
        schema["function"].pop("return", None)  # templates would print it, and endpoints do not take it
        found.append(schema)
    return found


@functools.lru_cache(maxsize=8)
def _load(files: tuple[str, ...]) -> list[tuple[Row, str, str]]:
    """All rows with their system prompts and prompts; the slots of an EnvRunner share them."""
    return [(row, *prompt_of(row)) for row in all_rows(files)]


class ToolTasks(ToolEnv[Row]):
    """Tasks from files, and a class whose public methods are the tools, as TRL's ``environment_factory`` takes it.

    An episode begins with ``reset`` of the class, if it has one, which is given the columns of the row that it names, or all of
    them; a text that it returns is added to the prompt. It ends with the first turn that calls nothing.

    Args:
        toolset: The class, or "my_module:MyTools".
        train_files: JSONL or parquet files of the split "train", whose column ``prompt`` is a text or a list of messages.
        val_files: Those of the split "eval".
        reward: A reward function of TRL's kind, or "my_module:function": it is given lists of one, ``prompts``,
            ``completions``, ``environments`` and the other columns. None: the class has ``get_reward``.
        max_turns: Turns per episode.
        split: "train" or "eval".

    Raises:
        ValueError: There is no file, class or reward, or a row or a method is malformed.
    """

    def __init__(
        self,
        toolset: str | type,
        train_files: str | Sequence[str] = (),
        val_files: str | Sequence[str] = (),
        reward: str | Callable[..., Sequence[float]] | None = None,
        max_turns: int = 10,
        split: str = "train",
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        made = attribute_of(toolset, "env_config.toolset", "my_module:MyTools") if isinstance(toolset, str) else toolset
        self._toolset = made()
        example = "my_module:reward_function"
        self._reward = attribute_of(reward, "env_config.reward", example) if isinstance(reward, str) else reward
        if self._reward is None and not hasattr(self._toolset, "get_reward"):
            raise ValueError(f"env_config.reward is missing, and {made.__name__} has no get_reward(): name a reward function")
        self._rows = _load(files_of(split, train_files, val_files))
        self._system = self._answer = ""

    @property
    def toolset(self) -> Any:
        return self._toolset

    @property
    def system_prompt(self) -> str:
        return self._system

    def sample_task(self, spec: str | None) -> TaskId[Row]:
        index = int(self.np_random.integers(len(self._rows))) if spec is None else int(spec) if spec.isdigit() else -1
        if not 0 <= index < len(self._rows):
            raise ValueError(f"task {spec!r} does not exist; tasks are the rows 0 to {len(self._rows) - 1}")
        return TaskId(str(index), self._rows[index][0])

    def begin(self, task: Row) -> str:
        assert self._current is not None
        _, self._system, prompt = self._rows[int(self._current.id)]
        self._answer = ""
        if (reset := getattr(self._toolset, "reset", None)) is None:
            return prompt
        names = inspect.signature(reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        told = reset(**{key: value for key, value in task.fields.items() if takes_all or key in names})
        return f"{prompt}{told}" if isinstance(told, str) else prompt

    def answer(self, task: Row, action: str) -> Reply:
        self._answer = action
        return super().answer(task, action)

    def get_reward(self) -> float:
        if self._reward is None:
            return float(self._toolset.get_reward())
        assert self._current is not None
        columns = {f"{key}s" if key == "prompt" else key: [value] for key, value in self._current.task.fields.items()}
        said = [[{"role": "assistant", "content": self._answer}]]
        return float(self._reward(**columns, completions=said, environments=[self._toolset])[0])
