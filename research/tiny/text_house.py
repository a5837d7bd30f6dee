"""The text house as a little world. Houses are random, and none of them is ever seen by a learner: what a model knows from
here is how houses work, not what is in one. Play and advice are equally weak: any command that nothing in view speaks against,
taking what is there and trying what is held before walking on.

A future reads ``library: blue key, then blue taken in two. FAILURE``: the immediate reply, then the next progress (a key
taken, a chest opened) and in how many commands, or ``nothing``, then the outcome. The backup counts on by one what d' says
and drops what would be more than ``HORIZON`` commands away. So a progress that nobody ever makes dies out, however often it
was only imagined, while a real one is put in again by every real reply: the textual discount that makes the backup contract.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from research.tiny.corpus import NONSENSE, Corpus, outcome
from rllib_nlac.envs.text_house import COLOURS, MATERIALS, ROOMS, House, HouseTask, Position, TextHouse, make_house
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Future, Message, dialogue_after

#: A command: ("go", room, -1), ("take", key, -1) or ("try", key, chest).
Move = tuple[str, int, int]
NUMBERS = ("now", "one", "two", "three", "four")
HORIZON = len(NUMBERS) - 1
SOON = 1  # an evaluator's patience: progress by this command or by the next
HOPE = 4  # one future in so many must see a key; any one that sees a chest open will do, since most keys fit none
NOTHING = "nothing"
SENSE = {"go": 1, "take": 3, "try": 2}  # how readily play and advice come to a command of each kind that nothing speaks against
LEARNERS_HOUSES = 2_000_000  # seeds below it are left to reinforcement learning


@dataclass(frozen=True)
class State:
    """An episode under way; ``last`` is the latest command and its reply, all that is seen of the past."""

    task: HouseTask
    position: Position
    opening: str
    last: tuple[str, str] | None
    turns_left: int


@dataclass(frozen=True)
class Played:
    """What one command led to."""

    reply: str
    position: Position
    ended: bool
    won: bool


class TextHouseCorpus(Corpus[State, Move, Played]):
    """Examples about random houses.

    Args:
        env: How houses speak, and the turn limit.
        prompts: The wording of the roles.
        seed: Same seed, same examples.
    """

    ROLES = {"policy": 0.12, "predict": 0.17, "backup": 0.27, "evaluate": 0.38, "refine": 0.06}
    DRAWS = 4
    MOVES = 4
    FUTURES = (1, 1, 2, 4, 4, 8)
    ENV = "TextHouse"

    def __init__(self, env: TextHouse, prompts: PromptSet, seed: int) -> None:
        super().__init__(prompts, seed)
        self.env = env

    # What the roles know.

    def critique(self, state: State, move: Move | None, futures: list[Future]) -> str:
        """Yes where a future is hopeful enough and nothing speaks against the command; else advises at random."""
        flaw = self.flaw(state, move)
        if flaw is None and is_hopeful([future.text for future in futures]):
            return "Optimal: Yes\nReason: it makes progress."
        fix = self.say(self.any_of([m for m in self.sensible_moves(state) if m != move]))
        return f"Optimal: No\nReason: {flaw or 'nothing comes of it'}.\nFix: {fix}"

    def flaw(self, state: State, move: Move | None) -> str | None:
        """What the last observation says against a command, whatever the futures say."""
        at, house = state.position, state.task.house
        if move is None:
            return "it is no command"
        if move[0] == "go":
            return "you are there" if move[1] == at.room else None
        if move[0] == "take":
            if move[1] in at.keys:
                return "you have it"
            return None if house.key_places[move[1]] == at.room else "it is not here"
        _, key, chest = move
        if key not in at.keys:
            return "you lack the key"
        if house.chest_rooms[chest] != at.room:
            return "it is not here"
        if chest in at.open:
            return "it is open"
        return "it failed before" if (key, chest) in at.failed else None

    def sensible_moves(self, state: State) -> list[Move]:
        """Every command that has no flaw."""
        at, house = state.position, state.task.house
        moves: list[Move] = [("go", room, -1) for room in range(len(ROOMS))]
        moves += [("take", key, -1) for key, place in enumerate(house.key_places) if place == at.room]
        chests = [chest for chest, room in enumerate(house.chest_rooms) if room == at.room]
        moves += [("try", key, chest) for key in sorted(at.keys) for chest in chests]
        return [move for move in moves if self.flaw(state, move) is None]

    def future(self, state: State, move: Move | None, skill: float) -> Future:
        played = self.play(state, move)
        first = played
        progress, commands = NOTHING, 0
        while not played.ended:
            commands += 1
            state = self.after(state, move, played)
            move = self.skilled_move(state, skill)
            played = self.play(state, move)
            if progress == NOTHING and commands <= HORIZON and (made := progress_of(played.reply)):
                progress = f"{made} in {NUMBERS[commands]}"
            if commands == HORIZON and skill == 0.0 and not played.ended:
                break  # random play wins about one game in a thousand
        if first.ended:
            return Future(self.ending(first), first.won)
        return Future(f"{head(first.reply)}, then {progress}. {outcome(played.won)}", played.won)

    def compose(self, played: Played, next_future: Future) -> str:
        return f"{head(played.reply)}, then {one_later(next_future.text)}. {outcome(next_future.success)}"

    def ending(self, played: Played) -> str:
        return f"{head(played.reply)}. {outcome(played.won)}"

    # The episode.

    def state(self) -> State:
        skill, house = self.skill(), self.house()
        task = HouseTask(house, self.rng.randrange(len(MATERIALS)))
        opening = self.env.begin(task)
        state = State(task, self.env.position, opening, None, self.env.max_turns)
        for _ in range(self.rng.randrange(self.env.max_turns)):
            move = self.skilled_move(state, skill)
            played = self.play(state, move)
            if played.ended:
                break
            state = self.after(state, move, played)
        return state

    def episode(self, seed: int) -> dict[str, Any]:
        opening, begun = self.env.reset(seed=seed)
        state = State(self.env.sample_task(begun["task_id"]).task, self.env.position, opening, None, self.env.max_turns)
        while True:
            move = self.random_move(state)
            reply, _, won, cut_off, info = self.env.step(self.say(move))
            if won or cut_off:
                return info
            state = self.after(state, move, Played(reply, self.env.position, False, False))

    def house(self) -> House:
        """The house of the next state: another one each time."""
        return self.any_house(self.rng)

    def any_house(self, rng: random.Random) -> House:
        seed, depth = LEARNERS_HOUSES + rng.randrange(10**9), rng.choice((1, 2, 3))
        return make_house(seed, depth)

    def imagine(self, state: State) -> State:
        return state  # the house was drawn at random, and next to nothing of it has been seen

    def play(self, state: State, move: Move | None) -> Played:
        self.env.position = state.position
        reply = self.env.reply(state.task, self.say(move))
        won, last = bool(reply.success), state.turns_left == 1
        text = f"{reply.text} {self.env.out_of_turns}" if last and not won else reply.text
        return Played(text, self.env.position, won or last, won)

    def after(self, state: State, move: Move | None, played: Played) -> State:
        last = (self.say(move), played.reply)
        return replace(state, position=played.position, last=last, turns_left=state.turns_left - 1)

    def move(self, state: State) -> Move | None:
        at, house = state.position, state.task.house
        chests = [chest for chest, room in enumerate(house.chest_rooms) if room == at.room]
        if at.keys and chests and self.rng.random() < 0.2:  # whether it fits, was tried before, or is open already
            return "try", self.rng.choice(sorted(at.keys)), self.rng.choice(chests)
        return self.skilled_move(state, self.rng.choice((0.0, 0.0, 0.9)))

    def skilled_move(self, state: State, skill: float) -> Move | None:
        if self.rng.random() < skill:
            self.env.position = state.position
            return self.parse(self.env.shortest(state.task))
        return None if self.rng.random() < NONSENSE else self.random_move(state)

    def random_move(self, state: State) -> Move:
        """A sensible command, mostly; else any."""
        if self.rng.random() < 0.8:
            return self.any_of(self.sensible_moves(state))
        kind, key = self.rng.choice(("go", "take", "try")), self.rng.randrange(len(COLOURS))
        if kind == "try":
            return "try", key, self.rng.randrange(len(MATERIALS))
        return kind, key if kind == "take" else self.rng.randrange(len(ROOMS)), -1

    def any_of(self, moves: Sequence[Move]) -> Move:
        """One of several moves, by common sense."""
        return self.rng.choices(moves, weights=[SENSE[kind] for kind, *_ in moves])[0]

    def say(self, move: Move | None) -> str:
        if move is None:
            return self.rng.choice(("go", "look", "take key", "try chest"))
        if move[0] == "go":
            return f"go {ROOMS[move[1]]}"
        return f"take {COLOURS[move[1]]}" if move[0] == "take" else f"try {COLOURS[move[1]]} {MATERIALS[move[2]]}"

    def parse(self, command: str) -> Move:
        """The move behind a well-formed command."""
        kind, first, *chest = command.split()
        if kind == "try":
            return kind, COLOURS.index(first), MATERIALS.index(chest[0])
        return kind, (ROOMS if kind == "go" else COLOURS).index(first), -1

    def messages(self, state: State) -> tuple[Message, ...]:
        opening = self.prompts.state("", state.opening)
        return opening if state.last is None else dialogue_after(opening, *state.last)


class HousesByHeart(TextHouseCorpus):
    """The same in one house after another, each for long enough to be learned, and at last in ever new ones again.

    A model that has had to learn which key fits which chest, over and over, learns it sooner in one house more.
    """

    ROLES = {"policy": 0.12, "predict": 0.40, "backup": 0.19, "evaluate": 0.24, "refine": 0.05}
    EXAMPLES_PER_HOUSE = 2_000  # of each of the processes that train together: some eighty gradient steps
    HOUSES_BY_HEART = 17

    def house(self) -> House:
        """All processes that train together learn the same one: houses follow from how many examples there are."""
        number = self.made // self.EXAMPLES_PER_HOUSE
        if number >= self.HOUSES_BY_HEART:
            return super().house()
        return self.any_house(random.Random(f"{self.seed} {number}"))


def head(reply: str) -> str:
    """The first sentence of a reply, which is the answer to the command; the rest is the memory."""
    return reply.split(". ")[0].rstrip(".")


def progress_of(reply: str) -> str | None:
    """The progress that a reply reports: "blue taken", "oak opens"."""
    said = head(reply).split(":")[0].split(", then")[0]
    return said if said.endswith((" taken", " opens")) else None


def one_later(future: str) -> str:
    """The progress that a future speaks of, as one command earlier sees it."""
    said = future.rsplit(". ", 1)[0]
    if progress := progress_of(said):
        return f"{progress} in {NUMBERS[1]}"
    later = said.partition(", then ")[2]
    what, _, number = later.rpartition(" in ")
    return f"{what} in {NUMBERS[NUMBERS.index(number) + 1]}" if number in NUMBERS[1:-1] and what else NOTHING


def is_hopeful(futures: Sequence[str]) -> bool:
    """Whether a command is worth trying: any future sees a chest open soon, or one in ``HOPE`` a key taken."""
    near = [future for future in futures if distance(future) <= SOON]
    return any(next_of(future).endswith(" opens") for future in near) or (near != [] and HOPE * len(near) >= len(futures))


def next_of(future: str) -> str:
    """What a future speaks of, however far away it is: "blue taken", "oak opens" or nothing."""
    said = future.rsplit(". ", 1)[0]
    return progress_of(said) or said.partition(", then ")[2].rpartition(" in ")[0] or NOTHING


def distance(future: str) -> float:
    """Commands until the next progress, 0 where the immediate reply is it."""
    said = future.rsplit(". ", 1)[0]
    if progress_of(said):
        return 0
    number = said.rpartition(" in ")[2]
    return NUMBERS.index(number) if ", then " in said and number in NUMBERS[1:] else float("inf")
