"""A page as text with references, and actions on it. The other half, in the browser, is ``page.js``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_nlac.envs.miniwob.actions import Action
from rllib_nlac.envs.miniwob.browser import Window

SETTLE_MS = 2000  # of the page's own time, which passes after each action: delays, animations
MAX_TEXT = 20_000  # characters of a page
# Of the DevTools protocol: what a key types, and the code that old handlers read.
KEYS = {
    "Enter": ("\r", 13),
    "Tab": ("", 9),
    "Escape": ("", 27),
    "Backspace": ("", 8),
    "Delete": ("", 46),
    "Space": (" ", 32),
    "Home": ("", 36),
    "End": ("", 35),
    "PageUp": ("", 33),
    "PageDown": ("", 34),
    "ArrowUp": ("", 38),
    "ArrowDown": ("", 40),
    "ArrowLeft": ("", 37),
    "ArrowRight": ("", 39),
}


@dataclass(frozen=True)
class Item:
    """Something on a page.

    Attributes:
        name: Its text, or what it is called.
        kind: "button", "link", "checkbox", "text" and so on; empty for what is just text.
        ref: Its number, None where nothing happens when it is clicked.
        value: What is in a field, or selected in a list.
        options: Options of a list.
        many: Whether several of them can be selected.
        states: As "checked", "selected", "disabled".
        id: The element's id in the page, which is not shown.
    """

    name: str
    kind: str = ""
    ref: int | None = None
    value: str | None = None
    options: tuple[str, ...] = ()
    many: bool = False
    states: tuple[str, ...] = ()
    id: str = ""

    def __str__(self) -> str:
        if self.ref is None:
            return self.name
        parts = [f"[{self.ref}]", self.kind, f'"{self.name}"' if self.kind and self.name else self.name]
        if self.options:
            parts.append(("any of " if self.many else "one of ") + ", ".join(f'"{option}"' for option in self.options))
        if self.value is not None:
            parts.append(f'= "{self.value}"')
        if self.states:
            parts.append(f"({', '.join(self.states)})")
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Page:
    """What a page shows, and how its episode stands.

    Attributes:
        instruction: What is to be done.
        lines: The items of each line.
        done: Whether the episode is over.
        reward: The plain reward, from -1 to 1, which does not shrink with time.
    """

    instruction: str
    lines: tuple[tuple[Item, ...], ...] = ()
    done: bool = False
    reward: float = 0.0

    @classmethod
    def read(cls, data: dict[str, Any]) -> Page:
        """From what ``page.js`` returns."""
        lines = tuple(
            tuple(Item(**{**item, "options": tuple(item.get("options", ())), "states": tuple(item["states"])}) for item in line)
            for line in data["lines"]
        )
        return cls(data["instruction"], lines, bool(data["done"]), float(data["reward"]))

    def items(self) -> Iterator[Item]:
        """All items in the order in which one reads."""
        for line in self.lines:
            yield from line

    def text(self) -> str:
        """As an agent sees it."""
        text = "\n".join(" ".join(map(str, line)) for line in self.lines)
        return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def begin(window: Window, html: Path, name: str, seed: int) -> Page:
    """Loads the page of a task, and begins its episode of that seed. Everything on it follows from the two."""
    window.load((html / "miniwob" / f"{name}.html").as_uri())
    return Page.read(window.call("begin", str(seed)))


def act(window: Window, action: Action) -> tuple[str | None, Page]:
    """Does something on a page.

    Returns:
        What was in its way, None where nothing was; and the page after it.
    """
    complaint = _perform(window, action)
    return complaint, Page.read(window.call("settle", SETTLE_MS))


def _perform(window: Window, action: Action) -> str | None:
    if action.kind == "press":
        _press(window, action.texts[0])
        return None
    if action.kind == "scroll":
        return window.call("scroll", action.ref, 1 if action.texts[0] == "down" else -1).get("complaint")
    if action.kind == "select":
        return window.call("choose", action.ref, list(action.texts)).get("complaint")
    if action.kind == "type":
        found = window.call("prepareTyping", action.ref, action.texts[0])
        if found.get("insert"):
            if action.texts[0]:
                window.send("Input.insertText", text=action.texts[0])
            elif not found["empty"]:
                _press(window, "Backspace")
        return found.get("complaint")
    return _click(window, action.ref)


def _click(window: Window, ref: int | None) -> str | None:
    place: dict[str, Any] = {}
    for _ in range(3):  # what the mouse is over may grow, and move what is below it
        before, place = place, window.call("locate", ref)
        if place == before or "complaint" in place:
            break
        _point(window, "mouseMoved", "none", place)
    if "complaint" not in place:
        _point(window, "mousePressed", "left", place)
        _point(window, "mouseReleased", "left", place)
    # Out of the way: a list that opens below the mouse takes what is there for chosen.
    _point(window, "mouseMoved", "none", {"x": 0, "y": 0})
    return place.get("complaint")


def _point(window: Window, event: str, button: str, place: dict[str, Any]) -> None:
    window.send("Input.dispatchMouseEvent", type=event, button=button, clickCount=int(button == "left"), **place)


def _press(window: Window, key: str) -> None:
    text, code = KEYS[key]
    name = " " if key == "Space" else key
    pressed = {"key": name, "code": key, "windowsVirtualKeyCode": code}
    down = {"type": "keyDown", "text": text, **pressed} if text else {"type": "rawKeyDown", **pressed}
    window.send("Input.dispatchKeyEvent", **down)
    window.send("Input.dispatchKeyEvent", type="keyUp", **pressed)
