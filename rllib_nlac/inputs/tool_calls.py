"""Tool calls in the text of a turn: one reader for environments, metrics and endpoints.

A turn is what was sampled, and its calls are a reading of that text. Models of Qwen's and Hermes' kind write
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, those of Llama's kind the object alone, with ``parameters``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.texts import readable
from rllib_nlac.types import TOOL, TOOLS, Message, turns_of

MALFORMED = 'a tool call must look like {"name": "TOOL", "arguments": {...}}'
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s(.*)```", re.DOTALL)
_BARE = re.compile(r'[\[\s]*\{\s*"(?:name|type|function)"\s*:')


class ToolError(ValueError):
    """A call that cannot be made, or failed; the text goes back to the agent."""


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        """The call as ``read_calls`` reads it."""
        return f"<tool_call>\n{json.dumps(self._asdict(), ensure_ascii=False)}\n</tool_call>"


def tools_message(tools: Sequence[Any]) -> Message:
    """The schemas of what an agent may call, as the first message of a dialogue."""
    return Message(TOOLS, readable(json.dumps(tools, ensure_ascii=False))[0])


def read_calls(text: str) -> tuple[str, list[Call | str]]:
    """What a turn says beside its calls, and the calls in their order; in the place of one that cannot be read is why.

    Calls stand in ``<tool_call>`` tags, or the whole turn is one as a JSON object, or a list of such.
    """
    if "<tool_call>" in text:
        return _TAGGED.sub("", text).strip(), [_read(body) for body in _TAGGED.findall(text)]
    fenced = _FENCED.fullmatch(text.strip())
    bare = fenced[1] if fenced else text
    if not _BARE.match(bare):
        return text.strip(), []
    try:
        value = plain_json.loads(bare)
    except ValueError as error:
        return "", [f"a tool call must be one JSON object and nothing else: {error}"]
    return "", [call_of(each) for each in (value if isinstance(value, list) else [value])]


def _read(body: str) -> Call | str:
    try:
        return call_of(plain_json.loads(body))
    except ValueError as error:
        return f"a tool call must be one JSON object: {error}"


def call_of(value: Any) -> Call | str:
    """The call in a JSON object, be it OpenAI's with ``function``, or why it is none."""
    value = value.get("function", value) if isinstance(value, Mapping) else None
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str):
        return MALFORMED
    arguments = value.get("arguments", value.get("parameters"))
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):  # as OpenAI's API has it
        try:
            arguments = plain_json.loads(arguments or "{}")
        except ValueError as error:
            return f"the arguments of {name:.80} must be a JSON object: {error}"
    return Call(name, arguments) if isinstance(arguments, dict) else MALFORMED


def for_endpoint(messages: Sequence[Message]) -> dict[str, Any]:
    """A dialogue as the ``messages`` and ``tools`` of a request to an OpenAI-compatible endpoint.

    A turn is sent with ``tool_calls`` where all of its calls can be read and each has a result, which endpoints insist on, and
    else as its text.
    """
    tools = json.loads(messages[0].content) if messages and messages[0].role == TOOLS else []
    rows: list[dict[str, Any]] = [dict(message.row) for message in messages if message.role != TOOLS]
    if not tools:
        return {"messages": rows}
    messages = messages[1:]
    for place in turns_of(messages):
        content, calls = read_calls(messages[place].content)
        following = rows[place + 1 :]
        count = next((i for i, row in enumerate(following) if row["role"] != TOOL), len(following))
        if calls and len(calls) == count and all(isinstance(call, Call) for call in calls):
            ids = [row.setdefault("tool_call_id", f"call_{place}_{i}") for i, row in enumerate(following[:count])]
            functions = [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls if isinstance(c, Call)]
            made = [{"id": id, "type": "function", "function": f} for id, f in zip(ids, functions, strict=True)]
            rows[place] |= {"content": content, "tool_calls": made}
        else:
            for row in following[:count]:
                row["role"] = "user"
    return {"messages": rows, TOOLS: tools}
