"""Messages of logged dialogues and of conversations: what is read of them, and what is only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rllib_nlac.envs.answers import TOOL_NAME, check_tools
from rllib_nlac.envs.rows import Row
from rllib_nlac.envs.spaces import MAX_TEXT_LENGTH
from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.texts import readable
from rllib_nlac.inputs.tool_calls import Call, call_of
from rllib_nlac.types import TOOL, TOOLS, Message

ROLES = ("system", "user", "tool", "assistant")
CALLS = ("tool_calls", "function_call")
THOUGHT = "reasoning_content"
REPLACED = "characters that no tokenizer reads were replaced"
TOO_LONG = "rows exceed the context and are left out"
UNLEARNED = "rows have no turn that is learned from and are left out"
_LEFT = "they are not learned from, and of them the text alone stays in the history"
CALLING = f"turns of the assistant call tools in rows without a column 'tools': {_LEFT}"
UNREADABLE = f"turns of the assistant have calls of tools that cannot be read, for want of a name or a JSON object: {_LEFT}"
UNWRITTEN = f"turns of the assistant call tools as the model's chat template cannot write it: {_LEFT}"
NOTES = 20  # the most kinds of notes in a notice: names of keys are whatever a file says


class Said(NamedTuple):
    """One message, read.

    Attributes:
        message: The message; its content stands behind the thought where a model thinks in a block.
        learned: Whether it is a turn of the assistant that is learned from.
    """

    message: Message
    learned: bool


Write = Callable[[str, Sequence[Call]], str | None]  # text and calls of a turn, as the model writes them; None: it cannot


def read_messages(
    row: Row, thinks: bool = False, has_tools: bool = False, write: Write | None = None
) -> tuple[list[Said], Counter[str]]:
    """Reads the messages of a row.

    Args:
        row: The row.
        thinks: Whether the model thinks in a block of its own, where ``reasoning_content`` then goes.
        has_tools: Whether the row has schemas of tools. Without them the result of a tool is the user's text, and a turn with
            calls is not learned from.
        write: Writes turns with calls; None leaves their texts.

    Returns:
        The messages, and notes: how often something was not read as it stands, by what it was.

    Raises:
        ValueError: A message is malformed; file and line are named.
    """
    given = row.fields.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError(f"{row.place}: 'messages' must be a list of messages, and it is {given!r:.60}")
    notes: Counter[str] = Counter()
    write = write if has_tools else None
    read = [_read(f"{row.place}: message {n}", message, thinks, has_tools, write, notes) for n, message in enumerate(given)]
    return read, notes


def tools_of(row: Row) -> tuple[dict[str, Any], ...]:
    """The schemas of tools in a row's column ``tools``, a list or its JSON.

    Raises:
        ValueError: It holds something else; file and line are named.
    """
    value = row.fields.get(TOOLS) or ()
    try:
        value = plain_json.loads(value) if isinstance(value, str) else _without_nulls(value)
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


def _without_nulls(value: Any) -> Any:
    """A value without the nulls with which parquet fills up objects that have other keys than their neighbours."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _read(where: str, message: Any, thinks: bool, has_tools: bool, write: Write | None, notes: Counter[str]) -> Said:
    given = message if isinstance(message, Mapping) else {}
    fields = {key: value for key, value in given.items() if value not in (None, "", [], {})}  # parquet fills up with nulls
    role, content = fields.pop("role", None), given.get("content")
    fields.pop("content", None)
    if role not in ROLES:
        raise ValueError(f"{where} must have a role of {', '.join(ROLES)}, and it has {role!r:.60}")
    names = [fields.pop(key, "") for key in ("name", "tool_call_id")] if role == TOOL and has_tools else []
    learned, calls, thought = role == "assistant", [], ""
    if role == "assistant":
        learned = _weight(where, fields.pop("weight", None))
        calls = [fields.pop(key) for key in CALLS if key in fields]
        calls = calls[0] if calls and isinstance(calls[0], list) else calls
        if thinks and THOUGHT in fields:
            thought = _text(where, THOUGHT, fields.pop(THOUGHT), notes)
    for key in fields:
        notes[f"messages have {key!r:.40}, which is not read"] += 1
    text = _text(where, "content", content or "" if calls else content, notes)
    if calls:
        found = [call_of(_without_nulls(call)) for call in calls]
        read = [call for call in found if isinstance(call, Call)]
        written = write(text, read) if write is not None and len(read) == len(found) else None
        if written is None:
            notes[CALLING if not has_tools else UNREADABLE if len(read) < len(found) else UNWRITTEN] += 1
            learned = False
        else:
            text = _text(where, "content", written, notes)
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
