"""The crossing as a little world. Layouts are random, and no learner ever meets one of them: what a model knows from here is
how such a world speaks, not which door leads on. Play and advice are any door at all, and the evaluator reads the futures and
nothing else.

A future reads ``attic, then crown in three. SUCCESS``: the immediate reply, then in how many moves the crown is found, or
``nothing``. The backup counts on by one, and what would be more than ``HORIZON`` moves away is nothing: a crown that is only
imagined dies out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from research.crossing import DEAD_END, DOORS, NAMES, WON, Crossing, Layout, make_layout
from research.tiny.corpus import NONSENSE, Corpus, outcome
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Future, Message, dialogue_after

LOOK = -1  # the first move; the others are doors
NUMBERS = ("now", "one", "two", "three", "four", "five", "six")
HORIZON = len(NUMBERS) - 1
NOTHING = "nothing"
LEARNERS_LAYOUTS = 2_000_000  # seeds below it are left to reinforcement learning


@dataclass(frozen=True)
class State:
    """An episode under way; ``room`` is None before the first move, ``last`` the latest move and its reply."""

    layout: Layout
    room: int | None
    last: tuple[str, str] | None
    turns_left: int


@dataclass(frozen=True)
class Played:
    """What one move led to."""

    reply: str
    room: int | None
    ended: bool
    won: bool


class CrossingCorpus(Corpus[State, int, Played]):
    """Examples about random layouts.

    Args:
        env: How rooms speak, and the turn limit.
        prompts: The wording of the roles.
        seed: Same seed, same examples.
    """

    ROLES = {"policy": 0.10, "predict": 0.20, "backup": 0.35, "evaluate": 0.25, "refine": 0.10}
    FUTURES = (1,)  # of each action that is judged
    ENV = "Crossing"

    def __init__(self, env: Crossing, prompts: PromptSet, seed: int) -> None:
        super().__init__(prompts, seed)
        self.env = env

    # What the roles know.

    def critique(self, state: State, move: int | None, futures: list[Future]) -> str:
        """Yes where at least half of the futures find the crown; else advises at random."""
        if 2 * sum(future.success for future in futures) >= len(futures):
            return "Optimal: Yes\nReason: it leads to the crown."
        others = [LOOK] if state.room is None else [door for door in range(len(DOORS)) if door != move]
        return f"Optimal: No\nReason: nothing comes of it.\nFix: {self.say(self.rng.choice(others))}"

    def future(self, state: State, move: int | None, skill: float) -> Future:
        first = played = self.play(state, move)
        moves = 0
        while not played.ended:
            state = self.after(state, move, played)
            move = self.skilled_move(state, skill)
            played = self.play(state, move)
            moves += 1
        if first.ended:
            return Future(self.ending(first), first.won)
        return self._told(first, f"crown in {NUMBERS[moves]}" if played.won and moves <= HORIZON else NOTHING)

    def compose(self, played: Played, next_future: Future) -> str:
        return self._told(played, one_later(next_future.text)).text

    def ending(self, played: Played) -> str:
        return f"{head(played.reply)}. {outcome(played.won)}"

    @staticmethod
    def _told(played: Played, later: str) -> Future:
        won = later != NOTHING
        return Future(f"{head(played.reply)}, then {later}. {outcome(won)}", won)

    # The episode.

    def state(self) -> State:
        """Any place of a random layout, come to by any door: how one came there tells nothing."""
        layout = make_layout(LEARNERS_LAYOUTS + self.rng.randrange(4096))
        turns_left = self.rng.randrange(1, self.env.max_turns)
        if self.rng.random() < 0.1:
            return State(layout, None, None, self.env.max_turns)
        room = self.rng.randrange(len(NAMES))
        move = LOOK if self.rng.random() < 0.15 else self.rng.randrange(len(DOORS))
        return State(layout, room, (self.say(move), f"{layout.name(room)}."), turns_left)

    def imagine(self, state: State) -> State:
        return state  # the layout was drawn at random, and nothing of it has been seen

    def play(self, state: State, move: int | None) -> Played:
        self.env.room = state.room
        reply = self.env.reply(state.layout, self.say(move))
        won, last = bool(reply.success), state.turns_left == 1
        text = f"{reply.text} {self.env.out_of_turns}" if last and reply.success is None else reply.text
        return Played(text, self.env.room, last or reply.success is not None, won)

    def after(self, state: State, move: int | None, played: Played) -> State:
        last = (self.say(move), played.reply)
        return replace(state, room=played.room, last=last, turns_left=state.turns_left - 1)

    def move(self, state: State) -> int | None:
        return self.skilled_move(state, self.rng.choice((0.0, 0.9)))

    def skill(self) -> float:
        return self.rng.choice((0.0, 0.8, 1.0, 1.0))  # futures of every length

    def skilled_move(self, state: State, skill: float) -> int | None:
        if state.room not in (None, DEAD_END) and self.rng.random() < skill:
            return state.layout.right[state.room]
        return None if self.rng.random() < NONSENSE else self.random_move(state)

    def random_move(self, state: State) -> int:
        """Any door."""
        return LOOK if state.room is None else self.rng.randrange(len(DOORS))

    def say(self, move: int | None) -> str:
        if move is None:
            return self.rng.choice(("go", "go back", "open"))
        return "look" if move == LOOK else f"go {DOORS[move]}"

    def messages(self, state: State) -> tuple[Message, ...]:
        opening = self.prompts.state("", self.env.begin(state.layout))
        return opening if state.last is None else dialogue_after(opening, *state.last)


def head(reply: str) -> str:
    """The first sentence of a reply: where the move led."""
    return reply.split(".")[0]


def one_later(future: str) -> str:
    """What a future says of the crown, as one move earlier sees it."""
    said = future.rsplit(". ", 1)[0]
    if said == head(WON):
        return f"crown in {NUMBERS[1]}"
    number = said.partition(", then crown in ")[2]
    return f"crown in {NUMBERS[NUMBERS.index(number) + 1]}" if number in NUMBERS[1:-1] else NOTHING
