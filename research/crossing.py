"""Rooms with four doors each, one of which leads on: a small world in which parts of different dialogues can be joined.

Two ways lead to one room, the crossing: a long one from the near entrance, a short one from the far entrance. Behind it lies
the crown. A dialogue that begins at one entrance never comes to the rooms before the other. So a log may hold wins from the far
entrance alone, and yet all that is needed to win from the near one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from rllib_nlac.envs.base import MAX_TURNS, Reply, TaskId, TextEnv, check_number
from rllib_nlac.envs.registry import register

NAMES = ("kitchen", "cellar", "attic", "library", "garage", "bedroom", "hall", "garden")
DOORS = ("red", "blue", "green", "black")
# Rooms by their place: three before the crossing, two behind it, the far entrance, and a dead end.
CROSSING, LAST, FAR, DEAD_END = 3, 5, 6, 7
TRAP, CROWN = -1, -2  # where a door leads that ends the episode
MAX_LAYOUT = 9_999_999
ENTRANCES = {"near": 0, "far": FAR}
GOAL, LOST, WON, WHAT = "Find the crown.", "trap.", "crown.", "what."


@dataclass(frozen=True)
class Layout:
    """What is where.

    Attributes:
        names: Name of each room, an index into ``NAMES``.
        doors: Where each door of each room leads: a room, ``TRAP`` or ``CROWN``.
        right: Door that leads on, for each room but the dead end.
    """

    names: tuple[int, ...]
    doors: tuple[tuple[int, ...], ...]
    right: tuple[int, ...]

    def name(self, room: int) -> str:
        return NAMES[self.names[room]]


@lru_cache(maxsize=4096)
def make_layout(seed: int) -> Layout:
    """Draws names and doors. Of a room's doors one leads on, one to the dead end and two into a trap; there all four do.

    Both ways come to the crossing by a door of the same colour, so that it looks the same from either.
    """
    rng = np.random.default_rng((seed, 43))
    names = tuple(int(name) for name in rng.permutation(len(NAMES)))
    right = [int(door) for door in rng.integers(len(DOORS), size=DEAD_END)]
    right[FAR] = right[CROSSING - 1]
    doors = []
    for room, door in enumerate(right):
        leads = [TRAP] * len(DOORS)
        leads[(door + int(rng.integers(1, len(DOORS)))) % len(DOORS)] = DEAD_END
        leads[door] = CROSSING if room == FAR else CROWN if room == LAST else room + 1
        doors.append(tuple(leads))
    return Layout(names, (*doors, (TRAP,) * len(DOORS)), tuple(right))


class Crossing(TextEnv[Layout]):
    """Finding the crown six doors away. Reward 1 for the crown; a trap ends the episode.

    The first reply says where one is, whatever was said, and every later one where a door led. Each names the room and nothing
    else, so that ``history_turns: 1`` loses nothing. ``info["subgoals"]`` says whether the crossing has been reached.

    Args:
        layout: Seed of the one layout of all episodes; None draws a new one for every episode.
        entrance: Where episodes begin: "near", three rooms before the crossing, or "far", beside it.
        max_turns: Turns per episode.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "layout": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LAYOUT},
        "entrance": {"enum": list(ENTRANCES)},
        "max_turns": MAX_TURNS,
    }

    def __init__(self, layout: int | None = None, entrance: str = "near", max_turns: int = 8) -> None:
        super().__init__(max_turns=max_turns)
        if entrance not in ENTRANCES:
            raise ValueError(f"entrance is {entrance!r}; Crossing knows 'near' and 'far'")
        if layout is not None:
            check_number("layout", layout, 0, MAX_LAYOUT, whole=True)
        self.layout, self.entrance = layout, entrance
        self.room: int | None = None  # None before the first turn
        self._crossed = False

    @property
    def system_prompt(self) -> str:
        return (
            f"Find the crown. Each room has four doors: {', '.join(DOORS)}. One leads on, one into a dead end, two into a "
            f"trap. Say 'look' first, and then one door a turn: 'go {DOORS[0]}'."
        )

    def sample_task(self, spec: str | None) -> TaskId[Layout]:
        if spec is None:
            seed = self.layout if self.layout is not None else int(self.np_random.integers(1_000_000))
        else:
            match = re.fullmatch(r"layout-(\d{1,7})", spec)
            if not match:
                raise ValueError(f"no task is called {spec!r}; tasks are called as in 'layout-3'")
            seed = int(match[1])
        return TaskId(f"layout-{seed}", make_layout(seed))

    def begin(self, task: Layout) -> str:
        self.room, self._crossed = None, False
        return GOAL

    def reply(self, task: Layout, action: str) -> Reply:
        if self.room is None:
            self.room = ENTRANCES[self.entrance]
            return Reply(f"{task.name(self.room)}.")
        words = re.findall(r"[a-z]+", action.lower()[:500])
        named = [door for door, colour in enumerate(DOORS) if colour in words]
        if len(named) != 1:
            return Reply(f"{WHAT} {task.name(self.room)}.")
        leads = task.doors[self.room][named[0]]
        if leads == TRAP:
            return Reply(LOST, success=False)
        if leads == CROWN:
            return Reply(WON, 1.0, success=True)
        self.room, self._crossed = leads, self._crossed or leads == CROSSING
        return Reply(f"{task.name(self.room)}.")

    def _info(self) -> dict[str, Any]:
        return {**super()._info(), "subgoals": {"crossing": self._crossed}}

    def expert_action(self) -> str:
        """The way on, which one can know only with the plan in hand."""
        assert self._current is not None
        if self.room is None:
            return "look"
        return f"go {DOORS[0 if self.room == DEAD_END else self._current.task.right[self.room]]}"


register("Crossing", Crossing)
