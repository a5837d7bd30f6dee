"""A text house: rooms, keys and locked chests. One chest holds the treasure; its key lies in another chest, and so on.

Nothing is paid before the treasure is found, but every reply says what was achieved: a critic that reads can tell progress from
the lack of it, where one that sees rewards alone cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv, check_number

ROOMS = ("kitchen", "cellar", "attic", "library", "garage", "bedroom", "hall", "garden")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
MATERIALS = ("oak", "iron", "stone", "brass")
TREASURES = ("crown", "map", "pearl", "book")
MAX_HOUSE = 9_999_999  # a task's name has room for seven digits
# How the house speaks: in sentences, or in as few words as a very small model can get right.
FULL = {
    "goal": "Find the {}.",
    "room": "You are in the {}. Here: {}.",
    "chest": "the {} chest",
    "key": "the {} key",
    "opened": "the open {} chest",
    "thing": "the {}",
    "nothing": "nothing",
    "taken": "You have the {} key now.",
    "held": "You have the {} key already.",
    "no key": "There is no {} key here.",
    "not held": "You do not have the {} key.",
    "no chest": "There is no {} chest here.",
    "open": "The {} chest is open already.",
    "locked": "The {} key does not fit the {} chest.",
    "opens": "The {} chest opens. You take {}.",
    "one": "One chest and one key at a time.",
    "what": "That is no command.",
    "memory": "{} Keys: {}. Opened: {}. Failed here: {}.",
    "try": "{} on {}",
    "none": "none",
    "go": "go to the {}",
    "take": "take the {} key",
    "use": "open the {1} chest with the {0} key",
}
BRIEF = {
    "goal": "Find {}.",
    "room": "{}: {}.",
    "chest": "{} chest",
    "key": "{} key",
    "thing": "{}",
    "nothing": "nothing",
    "opened": "open {} chest",
    "taken": "{} taken.",
    "held": "held.",
    "no key": "no key.",
    "not held": "no key.",
    "no chest": "no chest.",
    "open": "open.",
    "locked": "locked.",
    "opens": "{} opens: {}.",
    "one": "what.",
    "what": "what.",
    "memory": "{} keys {}. open {}. tried {}.",
    "try": "{} {}",
    "none": "none",
    "go": "go {}",
    "take": "take {}",
    "use": "try {} {}",
}


@dataclass(frozen=True)
class House:
    """What is where. All indices are into the tuples above.

    Attributes:
        chest_rooms: Room of each chest.
        key_of_chest: Key that opens each chest.
        key_places: Room of each key, or -1 - c if chest c holds it.
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
        seed: Seeds everything in the house.
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


@dataclass(frozen=True)
class Position:
    """Where an episode stands.

    Attributes:
        room: Where the agent is.
        keys: In its hands.
        open: The chests that it opened.
        failed: (key, chest) pairs that did not fit, in the order in which they were tried.
    """

    room: int = ROOMS.index("hall")
    keys: frozenset[int] = frozenset()
    open: frozenset[int] = frozenset()
    failed: tuple[tuple[int, int], ...] = ()


class TextHouse(TextEnv[HouseTask]):
    """Finding a treasure behind ``depth`` locks. Reward 1 for the treasure and nothing before.

    Commands: "go to the cellar", "take the red key", "open the oak chest with the red key". The reply to the last one says
    whether the chest opened and what was in it. ``info["subgoals"]`` says of each chest on the way whether it is open.

    Args:
        depth: Locks between the agent and the treasure, 1 to 4.
        house: Seed of the one house of all episodes; None draws a new one for every episode.
        vary_goal: Any of the house's four treasures, drawn every episode, instead of the deepest one.
        brief: Texts of as few words as possible, for very small models; commands may be as short: "go cellar", "take red",
            "try red oak". The goal then stands in the first observation only, as it does in the other form too.
        memory: Observations end with the room, the keys in hand, the chests that are open and the tries at this room's
            chests that failed, so that the last one sums up the dialogue: ``history_turns: 1`` then loses nothing but what
            other rooms hold and which keys failed there.
        bonus: A hand-made reward for every chest on the way, for baselines that need one; 0 pays for the treasure alone.
        key_bonus: A reward for every key picked up, of use or not; those in a chest count with their chest.
        chest_bonus: A reward for every chest opened, on the way or not, but that of the treasure, which pays 1. Both together
            pay for what the evaluator of the model ``tiny_house`` was taught to approve of.
        max_turns: Commands per episode.
        split: With ``house: None``, houses of "train" and "eval" are different ones.

    Raises:
        ValueError: An argument is out of range.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "depth": {"type": "integer", "minimum": 1, "maximum": len(MATERIALS)},
        "house": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_HOUSE},
        "vary_goal": {"type": "boolean"},
        "memory": {"type": "boolean"},
        "brief": {"type": "boolean"},
        "bonus": {"type": "number", "minimum": 0, "maximum": 1},
        "key_bonus": {"type": "number", "minimum": 0, "maximum": 1},
        "chest_bonus": {"type": "number", "minimum": 0, "maximum": 1},
        "max_turns": MAX_TURNS,
        "split": SPLIT,
    }

    def __init__(
        self,
        depth: int = 2,
        house: int | None = None,
        vary_goal: bool = False,
        memory: bool = False,
        brief: bool = False,
        bonus: float = 0.0,
        key_bonus: float = 0.0,
        chest_bonus: float = 0.0,
        max_turns: int = 30,
        split: str = "train",
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        check_number("depth", depth, 1, len(MATERIALS), whole=True)
        if house is not None:
            check_number("house", house, 0, MAX_HOUSE, whole=True)
        for key, paid in {"bonus": bonus, "key_bonus": key_bonus, "chest_bonus": chest_bonus}.items():
            check_number(key, paid, 0)
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; TextHouse knows 'train' and 'eval'")
        self.depth, self.house, self.vary_goal, self.memory = depth, house, vary_goal, memory
        self.bonus, self.key_bonus, self.chest_bonus = bonus, key_bonus, chest_bonus
        self._phrases = BRIEF if brief else FULL
        self.position = Position()

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
            goal = int(self.np_random.integers(len(MATERIALS))) if self.vary_goal else self.depth - 1
        else:
            match = re.fullmatch(r"house-(\d{1,7})-goal-(\d)", spec)
            if not match:
                raise ValueError(f"no task is called {spec!r}; tasks are called as in 'house-3-goal-0'")
            seed, goal = int(match[1]), int(match[2])
        house = make_house(seed, self.depth)
        if goal >= len(MATERIALS):
            raise ValueError(f"task {spec!r}: a house has the goals 0 to {len(MATERIALS) - 1}")
        task = HouseTask(house, self._goals(house)[goal])
        return TaskId(f"house-{seed}-goal-{goal}", task, {"chests": [MATERIALS[c] for c in house.chain(task.chest)]})

    def _goals(self, house: House) -> list[int]:
        """All chests: those on the way to the deepest one, the shallowest first, and then those that lead nowhere."""
        way = house.chain(max(range(len(MATERIALS)), key=lambda chest: len(house.chain(chest))))
        return [*way, *(chest for chest in range(len(MATERIALS)) if chest not in way)]

    def begin(self, task: HouseTask) -> str:
        self.position = Position()
        goal = self._say("goal", TREASURES[task.house.treasure_of_chest[task.chest]])
        return self._with_memory(task.house, f"{goal} {self._look(task.house)}", looked=True)

    def _say(self, phrase: str, *words: str) -> str:
        return self._phrases[phrase].format(*words)

    def reply(self, task: HouseTask, action: str) -> Reply:
        words = set(re.findall(r"[a-z]+", action.lower()[:500]))
        rooms, keys, chests = (
            [index for index, name in enumerate(names) if name in words] for names in (ROOMS, COLOURS, MATERIALS)
        )
        if chests and keys and words & {"open", "try", "unlock", "use"}:
            if len(chests) > 1 or len(keys) > 1:
                return Reply(self._with_memory(task.house, self._say("one")))
            return self._try(task, chests[0], keys[0])
        if len(rooms) == 1 and words & {"go", "walk", "enter"}:
            self.position = replace(self.position, room=rooms[0])
            return Reply(self._with_memory(task.house, self._look(task.house), looked=True))
        if len(keys) == 1 and words & {"take", "get", "grab", "pick"}:
            held = self.position.keys
            text = self._take(task.house, keys[0])
            return Reply(self._with_memory(task.house, text), self.key_bonus if self.position.keys != held else 0.0)
        return Reply(self._with_memory(task.house, self._say("what")))

    def _take(self, house: House, key: int) -> str:
        if key in self.position.keys:
            return self._say("held", COLOURS[key])
        if house.key_places[key] != self.position.room:
            return self._say("no key", COLOURS[key])
        self.position = replace(self.position, keys=self.position.keys | {key})
        return self._say("taken", COLOURS[key])

    def _try(self, task: HouseTask, chest: int, key: int) -> Reply:
        house, names, at = task.house, (COLOURS[key], MATERIALS[chest]), self.position
        if key not in at.keys:
            return Reply(self._with_memory(house, self._say("not held", names[0])))
        if house.chest_rooms[chest] != at.room:
            return Reply(self._with_memory(house, self._say("no chest", names[1])))
        if chest in at.open:
            return Reply(self._with_memory(house, self._say("open", names[1])))
        if house.key_of_chest[chest] != key:
            self.position = replace(at, failed=(*at.failed, (key, chest)))
            return Reply(self._with_memory(house, self._say("locked", *names)))
        inside = [key for key, place in enumerate(house.key_places) if place == -1 - chest]
        self.position = replace(at, open=at.open | {chest}, keys=at.keys.union(inside))
        found = [self._say("thing", TREASURES[house.treasure_of_chest[chest]])]
        found += [self._say("key", COLOURS[key]) for key in inside]
        text = self._say("opens", names[1], " and ".join(found))
        if chest == task.chest:
            return Reply(text, 1.0, success=True)
        on_the_way = self.bonus if chest in house.chain(task.chest) else 0.0
        return Reply(self._with_memory(house, text), self.chest_bonus + on_the_way)

    def _look(self, house: House) -> str:
        at = self.position
        chests = [c for c, room in enumerate(house.chest_rooms) if room == at.room]
        here = [self._say("opened" if c in at.open else "chest", MATERIALS[c]) for c in chests]
        keys = [k for k, place in enumerate(house.key_places) if place == at.room and k not in at.keys]
        here += [self._say("key", COLOURS[k]) for k in keys]
        return self._say("room", ROOMS[at.room], ", ".join(here) or self._say("nothing"))

    def _with_memory(self, house: House, text: str, looked: bool = False) -> str:
        if not self.memory:
            return text
        if not looked:
            text = f"{text} {self._look(house)}"
        at = self.position
        held, opened = (
            ", ".join(names[index] for index in sorted(of)) or self._say("none")
            for names, of in ((COLOURS, at.keys), (MATERIALS, at.open))
        )
        here = [(key, chest) for key, chest in dict.fromkeys(at.failed) if house.chest_rooms[chest] == at.room]
        tries = [self._say("try", COLOURS[key], MATERIALS[chest]) for key, chest in here]
        return self._say("memory", text, held, opened, ", ".join(tries) or self._say("none"))

    def _info(self) -> dict:
        info = super()._info()
        assert self._current is not None
        chain = self._current.task.house.chain(self._current.task.chest)
        info["subgoals"] = {f"chest_{number}": chest in self.position.open for number, chest in enumerate(chain, start=1)}
        return info

    def expert_action(self) -> str:
        """The shortest way, which one can know only with the house's plan in hand."""
        assert self._current is not None
        return self.shortest(self._current.task)

    def shortest(self, task: HouseTask) -> str:
        """The next command on the shortest way from ``position``."""
        house, at = task.house, self.position
        chest = next(c for c in house.chain(task.chest) if c not in at.open)
        key = house.key_of_chest[chest]
        if key not in at.keys:
            room = house.key_places[key]
            return self._say("take", COLOURS[key]) if room == at.room else self._say("go", ROOMS[room])
        if house.chest_rooms[chest] != at.room:
            return self._say("go", ROOMS[house.chest_rooms[chest]])
        return self._say("use", COLOURS[key], MATERIALS[chest])
