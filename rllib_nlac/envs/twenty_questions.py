"""Twenty questions: the agent asks yes/no questions, a scripted oracle answers from an object/attribute table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path

from rllib_nlac.envs.base import Reply, TaskId, TextEnv

YES, NO, UNKNOWN, CORRECT = "Yes.", "No.", "I do not know.", "Correct!"
DEFAULT_TABLE = "twenty_questions.table"


@dataclass(frozen=True)
class Attribute:
    """One yes/no attribute: its key, the canonical question, and the words that the oracle recognises it by."""

    key: str
    question: str
    words: frozenset[str]


@dataclass(frozen=True)
class ObjectTable:
    """Which object has which attribute.

    Attributes:
        attributes: The attributes, in the table's order.
        objects: The objects' names, one word each, in the table's order.
        facts: For each object the set of attribute indices that hold.
    """

    attributes: tuple[Attribute, ...]
    objects: tuple[str, ...]
    facts: tuple[frozenset[int], ...]

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """For each attribute the objects that have it, as a bit set over object indices."""
        return tuple(sum(1 << o for o, held in enumerate(self.facts) if a in held) for a in range(len(self.attributes)))

    @cached_property
    def everything(self) -> int:
        return (1 << len(self.objects)) - 1

    @cached_property
    def _object_words(self) -> dict[str, int]:
        return {name.lower(): index for index, name in enumerate(self.objects)}

    @cached_property
    def _attribute_words(self) -> dict[str, int]:
        return {word: index for index, attribute in enumerate(self.attributes) for word in attribute.words}

    def guess(self, index: int) -> str:
        """The canonical guess of an object."""
        name = self.objects[index]
        article = "an" if name[0].lower() in "aeiou" else "a"
        return f"Is it {article} {name}?"

    def meaning(self, text: str) -> tuple[str, int] | None:
        """What a question asks: ``("guess", object)``, ``("ask", attribute)``, or None when that is not clear.

        A text that names exactly one object is a guess; otherwise one that names exactly one attribute asks for it.
        """
        words = re.findall(r"[a-z][a-z-]*", text.lower()[:2000])
        guesses = {self._object_words[w] for w in words if w in self._object_words}
        if guesses:
            return ("guess", guesses.pop()) if len(guesses) == 1 else None
        asked = {self._attribute_words[w] for w in words if w in self._attribute_words}
        return ("ask", asked.pop()) if len(asked) == 1 else None

    def answer(self, meaning: tuple[str, int] | None, target: int) -> str:
        """The truthful answer about object ``target``."""
        if meaning is None:
            return UNKNOWN
        kind, index = meaning
        if kind == "guess":
            return CORRECT if index == target else NO
        return YES if index in self.facts[target] else NO

    def narrow(self, candidates: int, meaning: tuple[str, int] | None, answer: str) -> int:
        """The candidates (a bit set) that remain once ``answer`` has been heard."""
        if meaning is None or answer == UNKNOWN:
            return candidates
        kind, index = meaning
        holds = (1 << index) if kind == "guess" else self.masks[index]
        return candidates & (holds if answer in (YES, CORRECT) else ~holds)

    def best(self, candidates: int, turns_left: int) -> tuple[str, int]:
        """The greedy move: a guess once at most two candidates are left or no turn beyond this one, else the most even
        question, the earliest of the table in a tie."""
        count = candidates.bit_count()
        if count <= 2 or turns_left <= 1:
            return "guess", (candidates & -candidates).bit_length() - 1
        splits = [abs(2 * (candidates & mask).bit_count() - count) for mask in self.masks]
        best = min(range(len(splits)), key=splits.__getitem__)
        if splits[best] == count:  # no question tells the candidates apart
            return "guess", (candidates & -candidates).bit_length() - 1
        return "ask", best

    def say(self, move: tuple[str, int]) -> str:
        """The canonical text of a move."""
        kind, index = move
        return self.guess(index) if kind == "guess" else self.attributes[index].question


@lru_cache(maxsize=16)
def load_table(path: str | None = None, num_objects: int | None = None, num_attributes: int | None = None) -> ObjectTable:
    """Reads an object table; see the shipped ``twenty_questions.table`` for the format.

    Args:
        path: A table file of one's own; None is the shipped one.
        num_objects: Only the first so many objects.
        num_attributes: Only the first so many attributes.

    Raises:
        ValueError: A line is malformed, there are fewer rows than asked for, or two objects are alike.
    """
    source = Path(path) if path else resources.files("rllib_nlac.envs") / DEFAULT_TABLE
    name = path or DEFAULT_TABLE
    attributes: list[Attribute] = []
    objects: list[tuple[str, set[str]]] = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        kind, _, rest = line.partition(" ")
        fields = [field.strip() for field in rest.split("|")]
        if kind == "attribute" and len(fields) == 3:
            attributes.append(Attribute(fields[0], fields[1], frozenset(fields[2].lower().split())))
        elif kind == "object" and len(fields) == 2:
            objects.append((fields[0], set(fields[1].split())))
        else:
            raise ValueError(
                f"{name}, line {number}: expected 'attribute KEY | QUESTION | WORDS' or 'object NAME | KEYS', got {line!r}"
            )
    keys = {attribute.key: index for index, attribute in enumerate(attributes)}
    for obj, held in objects:
        for key in sorted(held - set(keys)):
            raise ValueError(f"{name}: object {obj!r} has the attribute {key!r}, which the table does not define")
    attributes = _first(attributes, num_attributes, "num_attributes", name)
    objects = _first(objects, num_objects, "num_objects", name)
    facts = [frozenset(keys[key] for key in held if keys[key] < len(attributes)) for _, held in objects]
    alike: dict[frozenset[int], str] = {}
    for (obj, _), held_indices in zip(objects, facts, strict=True):
        if held_indices in alike:
            raise ValueError(
                f"{name}: {alike[held_indices]!r} and {obj!r} agree in all {len(attributes)} attributes, so no question "
                "tells them apart: raise num_attributes or lower num_objects"
            )
        alike[held_indices] = obj
    return ObjectTable(tuple(attributes), tuple(obj for obj, _ in objects), tuple(facts))


def _first(rows: list, count: int | None, key: str, name: str) -> list:
    if count is None:
        return rows
    if not 1 <= count <= len(rows):
        raise ValueError(f"{key} is {count}, and {name} has rows for 1 to {len(rows)}")
    return rows[:count]


class TwentyQuestions(TextEnv[int]):
    """The object is drawn uniformly; the agent wins by naming it within ``max_turns`` questions.

    Args:
        num_objects: Objects in the world; None takes the whole table.
        num_attributes: Attributes in the world; None takes the whole table.
        max_turns: Questions and guesses per episode.
        reward: "success" pays 1 at the end of a won episode; "per_question" pays -1 for every question (LMRL-Gym).
        table: Path of a table of one's own.
        split: Recorded in ``info``; both splits draw from the same objects.

    Raises:
        ValueError: An argument is out of range or the table is malformed.
    """

    def __init__(
        self,
        num_objects: int | None = None,
        num_attributes: int | None = None,
        max_turns: int = 20,
        reward: str = "success",
        table: str | None = None,
        split: str = "train",
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if reward not in ("success", "per_question"):
            raise ValueError(f"reward is {reward!r}; TwentyQuestions knows 'success' and 'per_question'")
        self.reward = reward
        self.table = load_table(table, num_objects, num_attributes)

    @cached_property
    def _system_prompt(self) -> str:
        return (
            "You play twenty questions. Find the object that I have in mind by asking questions that I can answer with "
            f"yes or no, one at a time; you have {self.max_turns} turns. You win by naming the object, as in "
            f"'{self.table.guess(0)}'. The object is one of: {', '.join(self.table.objects)}."
        )

    @property
    def system_prompt(self) -> str:
        return self._system_prompt

    def sample_task(self, spec: str | None) -> TaskId[int]:
        # A task's id is shown in logs and dialogues, so it is a number and not the hidden answer itself.
        names = {f"object-{index}": index for index in range(len(self.table.objects))}
        names |= {name: index for index, name in enumerate(self.table.objects)}
        if spec is None:
            index = int(self.np_random.integers(len(self.table.objects)))
        elif spec in names:
            index = names[spec]
        else:
            raise ValueError(f"no task is called {spec!r}; the world has {', '.join(names)}")
        return TaskId(id=f"object-{index}", task=index, privileged={"answer": self.table.objects[index]})

    def begin(self, task: int) -> str:
        return "Guess my object."

    def reply(self, task: int, action: str) -> Reply:
        answer = self.table.answer(self.table.meaning(action), task)
        won = answer == CORRECT
        reward = -1.0 if self.reward == "per_question" else float(won)
        return Reply(answer, reward, success=True if won else None)


def oracle_action(env: TwentyQuestions, dialogue: Sequence[tuple[str, str]]) -> str:
    """The greedy policy, which wins every game it has the turns for.

    Args:
        env: The environment, for its table and turn limit.
        dialogue: The (action, reply) pairs so far.
    """
    candidates = candidates_after(env.table, dialogue)
    return env.table.say(env.table.best(candidates, env.max_turns - len(dialogue)))


def candidates_after(table: ObjectTable, dialogue: Iterable[tuple[str, str]]) -> int:
    """The objects, as a bit set, that fit every (action, reply) pair of a dialogue."""
    candidates = table.everything
    for action, reply in dialogue:
        candidates = table.narrow(candidates, table.meaning(action), first_answer(reply))
    return candidates


def first_answer(reply: str) -> str:
    """The oracle's answer at the beginning of an observation, without what the turn limit may have added."""
    return next((answer for answer in (YES, NO, CORRECT) if reply.startswith(answer)), UNKNOWN)
