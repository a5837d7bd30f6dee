"""Messages of logged dialogues and of conversations: what is read of them, and what is only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from rllib_nlac.envs.answers import TOOL_NAME, check_tools
from rllib_nlac.envs.rows import Row
from rllib_nlac.envs.spaces import MAX_TEXT_LENGTH
from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.texts import readable
from rllib_nlac.types import TOOL, TOOLS, Message

ROLES = ("system", "user", "tool", "assistant")
CALLS = ("tool_calls", "function_call")
THOUGHT = "reasoning_content"
REPLACED = "characters that no tokenizer reads were replaced"
TOO_LONG = "rows exceed the context and are left out"
UNLEARNED = "rows have no turn that is learned from and are left out"
CALLING = "turns of the assistant call tools: they are not learned from, and of them the text alone stays in the history"
NOTES = 20  # the most kinds of notes in a notice: names of keys are whatever a file says


class Said(NamedTuple):
    """One message, read.

    Attributes:
        message: The message; its content stands behind the thought where a model thinks in a block.
        learned: Whether it is a turn of the assistant that is learned from.
    """

    message: Message
    learned: bool


def read_messages(row: Row, thinks: bool = False, has_tools: bool = False) -> tuple[list[Said], Counter[str]]:
    """Reads the messages of a row.

    Args:
        row: The row.
        thinks: Whether the model thinks in a block of its own, where ``reasoning_content`` then goes.
        has_tools: Whether the row has schemas of tools. Without them the result of a tool is the user's text.

    Returns:
        The messages, and notes: how often something was not read as it stands, by what it was.

    Raises:
        ValueError: A message is malformed; file and line are named.
    """
    given = row.fields.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError(f"{row.place}: 'messages' must be a list of messages, and it is {given!r:.60}")
    notes: Counter[str] = Counter()
    read = [_read(f"{row.place}: message {n}", message, thinks, has_tools, notes) for n, message in enumerate(given)]
    return read, notes


def tools_of(row: Row) -> tuple[dict[str, Any], ...]:
    """The schemas of tools in a row's column ``tools``, a list or its JSON.

    Raises:
        ValueError: It holds something else; file and line are named.
    """
    value = row.fields.get(TOOLS) or ()
    try:
        value = plain_json.loads(value) if isinstance(value, str) else value
        check_tools(value)
    except ValueError as error:
        raise ValueError(f"{row.place}, column 'tools': {error}") from None
    return tuple(value)


def add_message(messages: list[Message], message: Message) -> None:
    """Adds a message; of two of the user's that follow each other one is made."""
    if messages and messages[-1].role == message.role == "user":
        before = messages.pop().content
        message = Message("user", f"{before}\n{message.content}" if before else message.content)
    messages.append(message)


def notice(notes: Counter[str]) -> str | None:
    """What is said of the notes of all rows; None where there are none."""
    texts = [f"{count} {what}" for what, count in notes.most_common(NOTES)]
    left = len(notes) - len(texts)
    return f"config.input_: {'; '.join(texts)}{f'; and {left} kinds more' if left else ''}" if texts else None


def _read(where: str, message: Any, thinks: bool, has_tools: bool, notes: Counter[str]) -> Said:
    given = message if isinstance(message, Mapping) else {}
    fields = {key: value for key, value in given.items() if value not in (None, "", [], {})}  # parquet fills up with nulls
    role, content = fields.pop("role", None), given.get("content")
    fields.pop("content", None)
    if role not in ROLES:
        raise ValueError(f"{where} must have a role of {', '.join(ROLES)}, and it has {role!r:.60}")
    names = [fields.pop(key, "") for key in ("name", "tool_call_id")] if role == TOOL else []
    learned, calls, thought = role == "assistant", [], ""
    if role == "assistant":
        learned = _weight(where, fields.pop("weight", None))
        calls = [fields.pop(key) for key in CALLS if key in fields]
        if thinks and THOUGHT in fields:
            thought = _text(where, THOUGHT, fields.pop(THOUGHT), notes)
    for key in fields:
        notes[f"messages have {key!r:.40}, which is not read"] += 1
    if calls:
        notes[CALLING] += 1
        content, learned = content or "", False
    text = _text(where, "content", content, notes)
    text = f"<think>\n{thought}\n</think>\n\n{text}" if thought and "</think>" not in text else text
    if role == TOOL and not has_tools:
        return Said(Message("user", text), False)
    return Said(Message(role, text, *(n if isinstance(n, str) and TOOL_NAME.fullmatch(n) else "" for n in names)), learned)


def _text(where: str, key: str, value: Any, notes: Counter[str]) -> str:
    if isinstance(value, list):  # parts, as of a model that reads pictures too
        texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in value]
        value = "".join(texts) if all(isinstance(text, str) for text in texts) else value  # type: ignore[arg-type]
    if not isinstance(value, str):
        raise ValueError(f"{where} must have a {key} that is a text, not {value!r:.60}")
    if len(value) > MAX_TEXT_LENGTH:
        raise ValueError(f"{where} has {len(value)} characters, and may have {MAX_TEXT_LENGTH}")
    text, replaced = readable(value)
    if replaced:
        notes[REPLACED] += replaced
    return text


def _weight(where: str, weight: Any) -> bool:
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"{where} has the weight {weight!r:.60}, and it must be 0 or 1")
    return weight != 0
