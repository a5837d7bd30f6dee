"""A text house: rooms, keys and locked chests. One chest holds the treasure; its key lies in another chest, and so on.

Nothing is paid before the treasure is found, but every reply says what was achieved: a critic that reads can tell progress from
the lack of it, where one that sees rewards alone cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rllib_nlac.envs.base import Reply, TaskId, TextEnv

ROOMS = ("kitchen", "cellar", "attic", "library", "garage", "bedroom", "hall", "garden")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
MATERIALS = ("oak", "iron", "stone", "brass")
TREASURES = ("crown", "map", "pearl", "book")


@dataclass(frozen=True)
class House:
    """What is where. All indices are into the tuples above.

    Attributes:
        chest_rooms: Room of each chest.
        key_of_chest: Key that opens each chest.
        key_places: Of each key its room, or -1 - c where chest c holds it.
        treasure_of_chest: What else each chest holds, and what a goal can name.
    """

    chest_rooms: tuple[int, ...]
    key_of_chest: tuple[int, ...]
    key_places: tuple[int, ...]
    treasure_of_chest: tuple[int, ...]

    def chain(self, chest: int) -> list[int]:
        """The chests to open in turn until ``chest`` is open, itself the last."""
        place = self.key_places[self.key_of_chest[chest]]
        return [*(self.chain(-1 - place) if place < 0 else []), chest]


@lru_cache(maxsize=4096)
def make_house(seed: int, depth: int) -> House:
    """A house with a chest ``depth`` locks deep: its key is in a chest whose key is in a chest, and so on.

    Args:
        seed: Of everything in it.
        depth: Locks on the way to the deepest chest, 1 to 4. Every smaller depth occurs too.
    """
    rng = np.random.default_rng((seed, depth, 41))
    chests = [int(c) for c in rng.permutation(len(MATERIALS))]  # the first ones form the chain
    keys = [int(k) for k in rng.permutation(len(COLOURS))]
    places = [int(room) for room in rng.integers(len(ROOMS), size=len(COLOURS))]
    key_of_chest = dict(zip(chests, keys, strict=False))
    for outer, inner in pairwise(chests[:depth]):
        places[key_of_chest[inner]] = -1 - outer
    treasures = [int(t) for t in rng.permutation(len(TREASURES))]
    rooms = tuple(int(room) for room in rng.integers(len(ROOMS), size=len(MATERIALS)))
    return House(rooms, tuple(key_of_chest[c] for c in range(len(MATERIALS))), tuple(places), tuple(treasures))


@dataclass(frozen=True)
class HouseTask:
    """A house, and the chest that holds what is looked for."""

    house: House
    chest: int


class TextHouse(TextEnv[HouseTask]):
    """Finding a treasure behind ``depth`` locks. Reward 1 for the treasure and nothing before.

    Commands: "go to the cellar", "take the red key", "open the oak chest with the red key". The reply to the last one says
    whether the chest opened and what was in it. ``info["subgoals"]`` says of each chest on the way whether it is open.

    Args:
        depth: Locks between the agent and the treasure, 1 to 4.
        house: Seed of the one house of all episodes; None draws a new one for every episode.
        vary_goal: Another treasure of the house every episode, instead of the deepest one.
        memory: Observations end with the keys in hand and the tries that failed, so that nothing need be looked up.
        max_turns: Commands per episode.
        split: With ``house: None``, houses of "train" and "eval" are different ones.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, depth: int = 2, house: int | None = None, vary_goal: bool = False, memory: bool = False, max_turns: int = 30,
        split: str = "train",
    ) -> None:  # fmt: skip
        super().__init__(max_turns=max_turns, split=split)
        if not 1 <= depth <= len(MATERIALS):
            raise ValueError(f"depth is {depth}, and a house has 1 to {len(MATERIALS)} locks")
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; TextHouse knows 'train' and 'eval'")
        self.depth, self.house, self.vary_goal, self.memory = depth, house, vary_goal, memory
        self._room = 0
        self._keys: set[int] = set()
        self._open: set[int] = set()
        self._failed: list[tuple[int, int]] = []

    @property
    def system_prompt(self) -> str:
        assert self._current is not None
        goal = TREASURES[self._current.task.house.treasure_of_chest[self._current.task.chest]]
        return (
            f"Find the {goal} in this house. Rooms: {', '.join(ROOMS)}. Some hold a locked chest ({', '.join(MATERIALS)}) or a "
            f"key ({', '.join(COLOURS)}); keys are in chests, too. Each chest has one key. Say one command a turn: 'go to the "
            f"{ROOMS[0]}', 'take the {COLOURS[0]} key', 'open the {MATERIALS[0]} chest with the {COLOURS[0]} key'."
        )

    def sample_task(self, spec: str | None) -> TaskId[HouseTask]:
        if spec is None:
            drawn = 2 * int(self.np_random.integers(500_000)) + (self.split == "eval")
            seed = self.house if self.house is not None else drawn
            goals = self._goals(make_house(seed, self.depth))
            goal = int(self.np_random.integers(len(goals))) if self.vary_goal else len(goals) - 1
        else:
            match = re.fullmatch(r"house-(\d{1,7})-goal-(\d)", spec)
            if not match:
                raise ValueError(f"no task is called {spec!r}; tasks are called as in 'house-3-goal-0'")
            seed, goal = int(match[1]), int(match[2])
        house = make_house(seed, self.depth)
        goals = self._goals(house)
        if goal >= len(goals):
            raise ValueError(f"task {spec!r}: a house of depth {self.depth} has the goals 0 to {len(goals) - 1}")
        task = HouseTask(house, goals[goal])
        return TaskId(f"house-{seed}-goal-{goal}", task, {"chests": [MATERIALS[c] for c in house.chain(task.chest)]})

    def _goals(self, house: House) -> list[int]:
        """The chests on the way to the deepest one, the shallowest first."""
        return house.chain(max(range(len(MATERIALS)), key=lambda chest: len(house.chain(chest))))

    def begin(self, task: HouseTask) -> str:
        self._room, self._keys, self._open, self._failed = ROOMS.index("hall"), set(), set(), []
        return self._with_memory(self._look(task.house))

    def reply(self, task: HouseTask, action: str) -> Reply:
        words = set(re.findall(r"[a-z]+", action.lower()[:500]))
        rooms, keys, chests = (
            [index for index, name in enumerate(names) if name in words] for names in (ROOMS, COLOURS, MATERIALS)
        )
        if chests and keys and words & {"open", "try", "unlock", "use"}:
            if len(chests) > 1 or len(keys) > 1:
                return Reply(self._with_memory("One chest and one key at a time."))
            return self._try(task, chests[0], keys[0])
        if len(rooms) == 1 and words & {"go", "walk", "enter"}:
            self._room = rooms[0]
            return Reply(self._with_memory(self._look(task.house)))
        if len(keys) == 1 and words & {"take", "get", "grab", "pick"}:
            return Reply(self._with_memory(self._take(task.house, keys[0])))
        return Reply(self._with_memory("That is no command."))

    def _take(self, house: House, key: int) -> str:
        if key in self._keys:
            return f"You have the {COLOURS[key]} key already."
        if house.key_places[key] != self._room:
            return f"There is no {COLOURS[key]} key here."
        self._keys.add(key)
        return f"You have the {COLOURS[key]} key now."

    def _try(self, task: HouseTask, chest: int, key: int) -> Reply:
        house, names = task.house, (COLOURS[key], MATERIALS[chest])
        if key not in self._keys:
            return Reply(self._with_memory(f"You do not have the {names[0]} key."))
        if house.chest_rooms[chest] != self._room:
            return Reply(self._with_memory(f"There is no {names[1]} chest here."))
        if chest in self._open:
            return Reply(self._with_memory(f"The {names[1]} chest is open already."))
        if house.key_of_chest[chest] != key:
            self._failed.append((key, chest))
            return Reply(self._with_memory(f"The {names[0]} key does not fit the {names[1]} chest."))
        self._open.add(chest)
        inside = [key for key, place in enumerate(house.key_places) if place == -1 - chest]
        self._keys |= set(inside)
        found = [f"the {TREASURES[house.treasure_of_chest[chest]]}", *(f"the {COLOURS[key]} key" for key in inside)]
        text = f"The {names[1]} chest opens. You take {' and '.join(found)}."
        if chest == task.chest:
            return Reply(text, 1.0, success=True)
        return Reply(self._with_memory(text))

    def _look(self, house: House) -> str:
        here = [f"the {MATERIALS[c]} chest" for c, room in enumerate(house.chest_rooms) if room == self._room]
        here += [
            f"the {COLOURS[k]} key" for k, room in enumerate(house.key_places) if room == self._room and k not in self._keys
        ]
        return f"You are in the {ROOMS[self._room]}. Here: {', '.join(here) or 'nothing'}."

    def _with_memory(self, text: str) -> str:
        if not self.memory:
            return text
        held = ", ".join(COLOURS[key] for key in sorted(self._keys)) or "none"
        failed = ", ".join(f"{COLOURS[key]} on {MATERIALS[chest]}" for key, chest in dict.fromkeys(self._failed)) or "none"
        return f"{text} Keys: {held}. Failed: {failed}."

    def _info(self) -> dict:
        info = super()._info()
        assert self._current is not None
        chain = self._current.task.house.chain(self._current.task.chest)
        info["subgoals"] = {f"chest_{number}": chest in self._open for number, chest in enumerate(chain, start=1)}
        return info

    def expert_action(self) -> str:
        """The shortest way, which one can know only with the house's plan in hand."""
        assert self._current is not None
        house = self._current.task.house
        chest = next(c for c in house.chain(self._current.task.chest) if c not in self._open)
        key = house.key_of_chest[chest]
        if key not in self._keys:
            room = house.key_places[key]
            return f"take the {COLOURS[key]} key" if room == self._room else f"go to the {ROOMS[room]}"
        if house.chest_rooms[chest] != self._room:
            return f"go to the {ROOMS[house.chest_rooms[chest]]}"
        return f"open the {MATERIALS[chest]} chest with the {COLOURS[key]} key"
