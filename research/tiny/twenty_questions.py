"""The little world of twenty questions. The critic roles are taught well; the policy role is taught on uniformly random
questions and guesses only, so that no policy example is good play.

A future reads ``Yes. few left, then one left. SUCCESS``: the immediate reply and how many objects are left, then how many
are left one turn later, then the outcome. The backup keeps the first part of d' as its own later part and drops the rest,
which is the textual discount.
"""

from __future__ import annotations

from dataclasses import dataclass

from research.tiny.corpus import NONSENSE, Corpus, Example, outcome
from rllib_nlac.envs.twenty_questions import CORRECT, NO, UNKNOWN, YES, ObjectTable, TwentyQuestions
from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Future, Message

Move = tuple[str, int]


@dataclass(frozen=True)
class State:
    """A game in progress: the hidden object, the (move, reply) pairs so far and the objects that still fit."""

    target: int
    dialogue: tuple[tuple[Move | None, str], ...]
    candidates: int


@dataclass(frozen=True)
class Played:
    """What one move led to. ``later`` is None where the game ended with it."""

    reply: str
    candidates: int
    ended: bool
    won: bool


class TwentyQuestionsCorpus(Corpus[State, Move, Played]):
    """Examples about a world of twenty questions.

    Args:
        env: The world, with its table and turn limit.
        prompts: The wording of the roles.
        seed: Same seed, same examples.
        advice: What the critique knows. "strong": common sense, and the greedy best move as the fix. "common sense": the fix
            is any move that common sense holds nothing against. "random": nothing but what the futures say, and any fix.
        sense: Share of the policy's examples that are moves common sense holds nothing against; the others are random.
    """

    ROLES = {"policy": 0.05, "predict": 0.13, "backup": 0.26, "evaluate": 0.40, "refine": 0.05, "fact": 0.02, "left": 0.09}
    ENV = "TwentyQuestions"

    def __init__(self, env: TwentyQuestions, prompts: PromptSet, seed: int, advice: str = "strong", sense: float = 0.0) -> None:
        super().__init__(prompts, seed)
        self.env, self.advice, self.sense = env, advice, sense
        self.table: ObjectTable = env.table
        self._opening = prompts.state(env.system_prompt, env.begin(0))

    def policy(self, state: State) -> Example:
        if not self.sense or self.rng.random() >= self.sense:
            return super().policy(state)
        return Example("policy", self.messages(state), self.say(self.rng.choice(self.sensible_moves(state))))

    # Two roles more, for what the others rest on.

    def fact(self, state: State) -> Example:
        obj, attribute = self.rng.randrange(len(self.table.objects)), self.rng.randrange(len(self.table.attributes))
        prompt = (Message("user", f"Fact: {self.table.objects[obj]}. {self.table.attributes[attribute].question}"),)
        return Example("fact", prompt, YES if attribute in self.table.facts[obj] else NO)

    def left(self, state: State) -> Example:
        names = [name for index, name in enumerate(self.table.objects) if state.candidates >> index & 1]
        return Example("left", (*self.messages(state), Message("user", "Left?")), ", ".join(names))

    # What the roles know.

    def critique(self, state: State, move: Move | None, futures: list[Future]) -> str:
        """Judges a move by what is known and by the futures, and names another where it falls short."""
        flaw = self.flaw(state, move) if self.advice != "random" else None
        if flaw is None and 2 * sum(future.success for future in futures) >= len(futures):
            return "Optimal: Yes\nReason: it leads to success."
        return f"Optimal: No\nReason: {flaw or 'it leads to failure'}.\nFix: {self.table.say(self.fix(state, move))}"

    def fix(self, state: State, move: Move | None) -> Move:
        """A move to make instead, as good as the advice knows."""
        if self.advice == "strong":
            return self.table.best(state.candidates, self.turns_left(state))
        moves = self.sensible_moves(state) if self.advice == "common sense" else self.moves()
        return self.rng.choice([other for other in moves if other != move] or self.moves())

    def moves(self) -> list[Move]:
        """All of them: a guess at every object, a question about every attribute."""
        guesses: list[Move] = [("guess", index) for index in range(len(self.table.objects))]
        return guesses + [("ask", index) for index in range(len(self.table.attributes))]

    def sensible_moves(self, state: State) -> list[Move]:
        """Those that common sense holds nothing against: a question while many objects fit, a guess after that."""
        return [move for move in self.moves() if self.flaw(state, move) is None]

    def flaw(self, state: State, move: Move | None) -> str | None:
        """What common sense holds against a move, whatever follows it."""
        if move is None:
            return "it asks nothing"
        if any(asked == move for asked, _ in state.dialogue):
            return "it was asked before"
        kind, index = move
        if kind == "guess":
            if not state.candidates >> index & 1:
                return "it is ruled out"
            return "it is too early" if state.candidates.bit_count() > 2 and self.turns_left(state) > 1 else None
        inside = state.candidates & self.table.masks[index]
        return "it tells nothing new" if inside in (0, state.candidates) else None

    def future(self, state: State, move: Move | None, skill: float) -> Future:
        """The future of a move under play of a given skill, in the words of the corpus."""
        first = self.play(state, move)
        if first.ended:
            return Future(self.ending(first), first.won)
        state = State(state.target, (*state.dialogue, (move, first.reply)), first.candidates)
        second = last = self.play(state, self.skilled_move(state, skill))
        while not last.ended:
            state = State(state.target, (*state.dialogue, (None, last.reply)), last.candidates)
            last = self.play(state, self.skilled_move(state, skill))
        return Future(f"{self.head(first)}, then {self.later(second)}. {outcome(last.won)}", last.won)

    def compose(self, played: Played, next_future: Future) -> str:
        """The exact backup: the real reply in detail, the first part of d' more shortly, its outcome."""
        later = next_future.text.split(". ", 1)[-1].split(", then")[0].rsplit(". ", 1)[0]
        if next_future.text.startswith("Correct"):
            later = "correct"
        return f"{self.head(played)}, then {later}. {outcome(next_future.success)}"

    def ending(self, played: Played) -> str:
        return f"Correct. {outcome(True)}" if played.won else f"{self.head(played)}. {outcome(False)}"

    def head(self, played: Played) -> str:
        answer = "Unknown." if played.reply.startswith(UNKNOWN) else played.reply.split(" ")[0]
        return f"{answer} {amount(played.candidates.bit_count())} left"

    def later(self, played: Played) -> str:
        return "correct" if played.won else f"{amount(played.candidates.bit_count())} left"

    # The game.

    def play(self, state: State, move: Move | None) -> Played:
        answer = self.table.answer(move, state.target)
        candidates = self.table.narrow(state.candidates, move, answer)
        won, last = answer == CORRECT, self.turns_left(state) == 1
        reply = f"{answer} {self.env.out_of_turns}" if last and not won else answer
        return Played(reply, candidates, won or last, won)

    def state(self) -> State:
        """A state at a uniformly drawn turn of a game played with a randomly drawn skill."""
        target, skill = self.rng.randrange(len(self.table.objects)), self.skill()
        state = State(target, (), self.table.everything)
        for _ in range(self.rng.randrange(self.env.max_turns)):
            move = self.skilled_move(state, skill)
            played = self.play(state, move)
            if played.ended:
                break
            state = State(target, (*state.dialogue, (move, played.reply)), played.candidates)
        return state

    def move(self, state: State) -> Move | None:
        """A move to judge: as random play makes it, often, and sometimes a good one."""
        return self.skilled_move(state, self.rng.choice((0.0, 0.0, 1.0)))

    def skilled_move(self, state: State, skill: float) -> Move | None:
        if self.rng.random() < skill:
            return self.table.best(state.candidates, self.turns_left(state))
        return None if self.rng.random() < NONSENSE else self.random_move(state)

    def random_move(self, state: State) -> Move:
        if self.rng.random() < 0.5:
            return "guess", self.rng.randrange(len(self.table.objects))
        return "ask", self.rng.randrange(len(self.table.attributes))

    def imagine(self, state: State) -> State:
        return State(self.pick(state.candidates), state.dialogue, state.candidates)

    def after(self, state: State, move: Move | None, played: Played) -> State:
        return State(state.target, (*state.dialogue, (move, played.reply)), played.candidates)

    def pick(self, candidates: int) -> int:
        return self.rng.choice([index for index in range(len(self.table.objects)) if candidates >> index & 1])

    def turns_left(self, state: State) -> int:
        return self.env.max_turns - len(state.dialogue)

    def say(self, move: Move | None) -> str:
        if move is not None:
            return self.table.say(move)
        return self.rng.choice(("Is it?", "Does it have it?", "Can you have it?", "Is it a legs?"))

    def messages(self, state: State) -> tuple[Message, ...]:
        turns = (
            message
            for move, reply in state.dialogue
            for message in (Message("assistant", self.say(move)), Message("user", reply))
        )
        return (*self._opening, *turns)


def amount(count: int) -> str:
    """How many objects are left, in words a small model can get exactly right."""
    return {0: "none", 1: "one", 2: "two"}.get(count, "few" if count <= 4 else "many")
