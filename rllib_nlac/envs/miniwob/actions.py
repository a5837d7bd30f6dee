"""What a model may do to a page: ``click(3)``, ``type(1, "Nathalie")``, ``select(6, "Kassi")``, ``press(Enter)`` and so on.

The shape is that of BrowserGym's actions. What is no action is answered in words, so that a model can learn from the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LENGTH = 4000  # characters of an action
KEYS = (
    "Enter",
    "Tab",
    "Escape",
    "Backspace",
    "Delete",
    "Space",
    "Home",
    "End",
    "PageUp",
    "PageDown",
    "ArrowUp",
    "ArrowDown",
    "ArrowLeft",
    "ArrowRight",
)
USAGE = {
    "click": "click(3)",
    "type": 'type(3, "text")',
    "select": 'select(3, "option")',
    "press": "press(Enter)",
    "scroll": "scroll(down)",
}
DESCRIPTION = (
    'click(3) clicks what has the number 3. type(3, "text") puts a text into a field, in place of what is in it. '
    'select(3, "option") selects an option of a list, or several: select(3, "one", "two"). press(Enter) presses a key. '
    "scroll(down), scroll(up) or scroll(3, down) scroll."
)
_CALL = re.compile(r"[`\s]*([A-Za-z_]+)\s*\((.*)\)[`\s.;]*", re.DOTALL)
_ARGUMENT = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|\[?([^\s,"'\[\]()]+)\]?)\s*(,|$)""", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t"}


class Malformed(Exception):
    """This is no action; the text says what is wrong, and what would be one."""


@dataclass(frozen=True)
class Action:
    """One action.

    Attributes:
        kind: "click", "type", "select", "press" or "scroll".
        ref: Number of what it is done to, None where there is none.
        texts: The text to type, the options to select, the key to press, or the direction to scroll in.
    """

    kind: str
    ref: int | None = None
    texts: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As a model would say it."""
        quoted = ('"' + re.sub(r'(["\\])', r"\\\1", text).replace("\n", "\\n") + '"' for text in self.texts)
        arguments = self.texts if self.kind in ("press", "scroll") else quoted
        return f"{self.kind}({', '.join([*([str(self.ref)] if self.ref is not None else []), *arguments])})"


def click(ref: int) -> Action:
    """A click on what has this number."""
    return Action("click", ref)


def type_into(ref: int, text: str) -> Action:
    """A text in place of what is in a field."""
    return Action("type", ref, (text,))


def select(ref: int, *options: str) -> Action:
    """Options of a list."""
    return Action("select", ref, options)


def parse(text: str) -> Action:
    """Reads an action.

    Raises:
        Malformed: It is none.
    """
    match = _CALL.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise Malformed(f"That is no action. One action a turn, as in {USAGE['click']} or {USAGE['type']}.")
    kind = match[1].lower()
    if kind not in USAGE:
        raise Malformed(f"There is no action {match[1][:40]}; there are {', '.join(USAGE)}.")
    arguments = _arguments(match[2], kind)
    if kind == "press":
        key = next((key for key in KEYS if len(arguments) == 1 and key.lower() == arguments[0].lower()), None)
        if key is None:
            raise Malformed(f"press takes one key: {', '.join(KEYS)}.")
        return Action(kind, None, (key,))
    if kind == "scroll" and len(arguments) == 1:
        arguments = ["", *arguments]
    ref = int(arguments[0]) if arguments and re.fullmatch(r"[0-9]{1,6}", arguments[0]) else None
    texts = tuple(arguments[1:])
    is_complete = {
        "click": ref is not None and not texts,
        "type": ref is not None and len(texts) == 1,
        "select": ref is not None and len(texts) >= 1,
        "scroll": len(texts) == 1 and texts[0] in ("up", "down") and (ref is not None or arguments[0] == ""),
    }[kind]
    if not is_complete:
        raise Malformed(f"{kind} reads as in {USAGE[kind]}.")
    return Action(kind, ref, texts)


def _arguments(text: str, kind: str) -> list[str]:
    found, place = [], 0
    while text[place:].strip():
        match = _ARGUMENT.match(text, place)
        if match is None or (match[4] == "," and not text[match.end() :].strip()):
            raise Malformed(f"{kind} reads as in {USAGE[kind]}; texts stand in quotes.")
        quoted = match[1] if match[1] is not None else match[2]
        found.append(
            match[3] if quoted is None else re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), quoted, flags=re.DOTALL)
        )
        place = match.end()
    return found
