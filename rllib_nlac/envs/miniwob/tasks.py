"""The tasks of MiniWoB++ that can be done by reading and writing text, in groups."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_nlac.names import unknown_key

GROUPS: dict[str, tuple[str, ...]] = {
    "click": (
        "click-test",
        "click-test-2",
        "click-button",
        "click-button-sequence",
        "click-link",
        "click-dialog",
        "click-dialog-2",
        "click-checkboxes",
        "click-checkboxes-large",
        "click-option",
        "click-tab",
        "click-tab-2",
        "click-widget",
        "click-collapsible",
        "click-collapsible-2",
    ),
    "enter": (
        "enter-text",
        "enter-text-2",
        "enter-text-dynamic",
        "enter-password",
        "enter-date",
        "enter-time",
        "focus-text",
        "focus-text-2",
        "login-user",
        "login-user-popup",
    ),
    "choose": ("choose-list", "click-scroll-list", "choose-date", "use-autocomplete"),
    "think": ("simple-arithmetic", "simple-algebra", "odd-or-even", "guess-number", "find-word", "read-table", "read-table-2"),
    "browse": (
        "search-engine",
        "navigate-tree",
        "email-inbox",
        "social-media",
        "social-media-some",
        "phone-book",
        "multi-layouts",
        "book-flight",
    ),
}
TASKS = tuple(name for group in GROUPS.values() for name in group)


def tasks_of(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The tasks that are meant, each once, in the order of ``TASKS``.

    Args:
        names: Tasks and groups; None is all.

    Raises:
        ValueError: There is no such task or group; the nearest one is named.
    """
    if names is None:
        return TASKS
    wanted: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        if name in GROUPS:
            wanted.update(GROUPS[name])
        elif name in TASKS:
            wanted.add(name)
        else:
            raise ValueError(f"env_config.tasks: {unknown_key(name, [*GROUPS, *TASKS], 'task or group')}")
    if not wanted:
        raise ValueError("env_config.tasks is empty: leave it out for all tasks")
    return tuple(name for name in TASKS if name in wanted)
