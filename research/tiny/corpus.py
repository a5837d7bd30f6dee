"""What a small base model is trained on: a little world, and the roles of NLAC in it. The worlds are modules of their own.

It stands in for what an instruction-tuned LLM brings along.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from rllib_nlac.language.prompts import PromptSet
from rllib_nlac.types import Future, Generation, Message, Transition

NOT_GENERATED = Generation((), (), np.zeros(0, np.float32), True, 0)
NONSENSE = 0.02  # share of actions that are none


@dataclass(frozen=True)
class Example:
    """One training sequence: the model is trained on ``answer`` and its end, never on the prompt."""

    role: str
    prompt: tuple[Message, ...]
    answer: str


class Step(Protocol):
    """What one move led to, as far as every world needs to know."""

    @property
    def reply(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    @property
    def won(self) -> bool: ...


State = TypeVar("State")
Move = TypeVar("Move")
Played = TypeVar("Played", bound=Step)


class Corpus(abc.ABC, Generic[State, Move, Played]):
    """An endless stream of examples about one little world.

    Args:
        prompts: The wording of the roles.
        seed: Same seed, same examples.
    """

    #: How often each role is drawn. A role is a method of that name, which makes one example of a state.
    ROLES: ClassVar[dict[str, float]]
    #: How many roles are drawn for each state: what their prompts begin with alike a pack computes once.
    DRAWS: ClassVar[int] = 1
    #: How many moves are shown to the policy where it is drawn: one more of the same state costs next to nothing.
    MOVES: ClassVar[int] = 1
    #: How many futures an evaluator's prompt shows, drawn from these.
    FUTURES: ClassVar[tuple[int, ...]] = (1, 1, 1, 2, 4)
    ENV: ClassVar[str]

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self.rng = random.Random(seed)
        self.made = 0  # examples so far

    def __iter__(self) -> Iterator[Example]:
        makers = {role: getattr(self, role) for role in self.ROLES}
        while True:
            state = self.state()
            for role in self.rng.choices(list(self.ROLES), weights=list(self.ROLES.values()), k=self.DRAWS):
                for _ in range(self.MOVES if role == "policy" else 1):
                    self.made += 1
                    yield makers[role](state)

    # The roles that every world has.

    def policy(self, state: State) -> Example:
        return Example("policy", self.messages(state), self.say(self.random_move(state)))

    def predict(self, state: State) -> Example:
        move = self.move(state)
        # What the base policy's own play leads to, in any world that the dialogue allows.
        future = self.future(self.imagine(state), move, skill=0.0)
        return Example("predict", self.prompts.predict_messages(self.messages(state), self.say(move)), f"Future: {future.text}")

    def backup(self, state: State) -> Example:
        move = self.move(state)
        played = self.play(state, move)
        transition = self.transition(state, move, played)
        if played.ended:
            return Example("backup", self.prompts.backup_messages(transition, None), f"Future: {self.ending(played)}")
        after = self.after(state, move, played)
        if self.rng.random() < 0.15:  # a d' that does not belong here must be carried over all the same
            after = self.state()
        next_future = self.future(after, self.move(after), self.skill())
        answer = f"Future: {self.compose(played, next_future)}"
        return Example("backup", self.prompts.backup_messages(transition, next_future.text), answer)

    def evaluate(self, state: State) -> Example:
        move = self.move(state)
        futures = self.futures(state, move)
        prompt = self.prompts.evaluate_messages(self.messages(state), self.say(move), futures)
        return Example("evaluate", prompt, self.critique(state, move, futures))

    def refine(self, state: State) -> Example:
        move = self.move(state)
        critique = self.critique(state, move, self.futures(state, move))
        prompt = self.prompts.refine_messages(self.messages(state), self.say(move), critique)
        return Example("refine", prompt, self.fix_of(critique) or self.say(move))

    def futures(self, state: State, move: Move | None) -> list[Future]:
        """What a successor model of any quality might say of a move, once or several times."""
        said = []
        for _ in range(self.rng.choice(self.FUTURES)):
            truth = self.imagine(state)
            if self.rng.random() < 0.15:
                truth = self.state()
            said.append(self.future(truth, move, self.skill()))
        return said

    def episode(self, seed: int) -> dict[str, Any] | None:
        """The last info of an episode that is played as the policy's examples are; None where a world has none."""
        return None

    def skill(self) -> float:
        """How well somebody plays, from 0, as the base policy does, to 1."""
        return self.rng.choice((0.0, 0.0, 0.5, 0.8, 1.0))

    def transition(self, state: State, move: Move | None, played: Played) -> Transition:
        return Transition(
            id=0,
            env=self.ENV,
            state=self.messages(state),
            action=self.say(move),
            generation=NOT_GENERATED,
            observation=played.reply,
            reward=float(played.won),
            terminated=played.won,
            truncated=played.ended and not played.won,
            episode_success=played.won,
            returns_to_go=float(played.won),
        )

    @staticmethod
    def fix_of(critique: str) -> str:
        return critique.partition("Fix: ")[2]

    # What the world knows.

    @abc.abstractmethod
    def state(self) -> State:
        """A state somewhere in an episode played with a randomly drawn skill."""

    @abc.abstractmethod
    def imagine(self, state: State) -> State:
        """The same to the agent, in a world drawn from all that it may be in."""

    @abc.abstractmethod
    def move(self, state: State) -> Move | None:
        """A move to judge: as the base policy makes it, often, and sometimes a good one. None is nonsense."""

    @abc.abstractmethod
    def random_move(self, state: State) -> Move:
        """A move of the base policy."""

    @abc.abstractmethod
    def play(self, state: State, move: Move | None) -> Played:
        """What a move leads to."""

    @abc.abstractmethod
    def after(self, state: State, move: Move | None, played: Played) -> State:
        """The state after a move that ended nothing."""

    @abc.abstractmethod
    def future(self, state: State, move: Move | None, skill: float) -> Future:
        """The future of a move under play of a given skill, in the words of the corpus."""

    @abc.abstractmethod
    def compose(self, played: Played, next_future: Future) -> str:
        """The exact backup of a real step and d'."""

    @abc.abstractmethod
    def ending(self, played: Played) -> str:
        """The exact backup of a last step."""

    @abc.abstractmethod
    def critique(self, state: State, move: Move | None, futures: list[Future]) -> str:
        """Judges a move by what is known and by the futures, and names another where it falls short."""

    @abc.abstractmethod
    def say(self, move: Move | None) -> str:
        """A move in the words of the agent."""

    @abc.abstractmethod
    def messages(self, state: State) -> tuple[Message, ...]:
        """The dialogue, as the policy sees it."""


def outcome(won: bool) -> str:
    return "SUCCESS" if won else "FAILURE"
