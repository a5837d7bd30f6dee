"""Twenty questions: the agent asks yes/no questions; a table of objects and attributes answers, or a language model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from rllib_nlac.envs.base import MAX_TURNS, SPLIT, Reply, TaskId, TextEnv
from rllib_nlac.envs.partners import Partners
from rllib_nlac.inputs.endpoint import Endpoint, endpoint_from

YES, NO, UNKNOWN, CORRECT = "Yes.", "No.", "I do not know.", "Correct!"
DEFAULT_TABLE = "twenty_questions.table"
MAX_LISTED = 256  # objects that the system prompt names; of more it says nothing
NAMED = 8  # objects that the expert names; of more it says how many there are
_GUESS = re.compile(
    r"(?:(?:is it|could it be|it is|it's|i guess|my guess is|is (?:the|your) object) )?(?:(?:an?|the) )*(.+?) ?[?.!]*"
)
_WORD = re.compile(r"[a-z][a-z-]*")


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
        words = _WORD.findall(text.lower()[:2000])
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

    def names(self, some: int) -> str:
        """The objects of a bit set by name, so that a small model can copy them; their number if there are many."""
        if some.bit_count() > NAMED:
            return f"{some.bit_count()} objects"
        return ", ".join(name for index, name in enumerate(self.objects) if some >> index & 1) or "none"

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
            if not _WORD.fullmatch(fields[0].lower()):
                raise ValueError(
                    f"{name}, line {number}: the object {fields[0]!r} must be one word of letters a to z and hyphens, as in "
                    "'glass-door', or no guess can name it; env_config.words takes others, with an oracle behind an endpoint"
                )
            objects.append((fields[0], set(fields[1].split())))
        else:
            raise ValueError(
                f"{name}, line {number}: expected 'attribute KEY | QUESTION | WORDS' or 'object NAME | KEYS', got {line!r}"
            )
    _check_unique("object", (obj.lower() for obj, _ in objects), name)
    _check_unique("attribute", (attribute.key for attribute in attributes), name)
    _check_unique("word", (word for attribute in attributes for word in attribute.words), name)
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


def _check_unique(kind: str, names: Iterable[str], table: str) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"{table}: the {kind} {name!r} stands there twice, so that a question by it has two meanings")
        seen.add(name)


def _first(rows: list, count: int | None, key: str, name: str) -> list:
    if count is None:
        return rows
    if not 1 <= count <= len(rows):
        raise ValueError(f"{key} is {count}, and {name} has rows for 1 to {len(rows)}")
    return rows[:count]


class TwentyQuestions(TextEnv[int]):
    """Guessing one of 181 objects, or of one's own words, by questions that are answered with yes or no.

    The object is drawn uniformly; the agent wins by naming it within ``max_turns`` questions.

    Args:
        num_objects: Objects in the world; None takes the whole table.
        num_attributes: Attributes in the world; None takes the whole table.
        max_turns: Questions and guesses per episode.
        reward: "success" pays 1 at the end of a won episode; "per_question" pays -1 for every question (LMRL-Gym).
        table: Path of a table of one's own.
        words: Objects of one's own, a list or a text file with one a line; nobody knows their attributes, so ``oracle`` must
            be an endpoint.
        oracle: None answers from the table; ``{kind: endpoint, base_url: ..., model: ...}`` asks a language model. What names
            the object, as in "Is it a dog?", is judged by its words in either case. Of a list each episode draws one.
        split: Recorded in ``info``; both splits draw from the same objects.

    Raises:
        ValueError: An argument is out of range, the table is malformed, or ``words`` come without an endpoint.
    """

    row_schema: ClassVar[dict[str, Any] | None] = {
        "num_objects": {"type": "integer", "minimum": 1, "maximum": 100_000},
        "num_attributes": {"type": "integer", "minimum": 1, "maximum": 100_000},
        "max_turns": MAX_TURNS,
        "reward": {"enum": ["success", "per_question"]},
        # A text would be the name of a file.
        "words": {"type": "array", "maxItems": 10_000, "minItems": 1, "items": {"type": "string", "maxLength": 100}},
        "split": SPLIT,
    }

    partners: Partners[Endpoint | None]

    def __init__(
        self,
        num_objects: int | None = None,
        num_attributes: int | None = None,
        max_turns: int = 20,
        reward: str = "success",
        table: str | None = None,
        words: str | Sequence[str] | None = None,
        oracle: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        split: str = "train",
    ) -> None:
        super().__init__(max_turns=max_turns, split=split)
        if reward not in ("success", "per_question"):
            raise ValueError(f"reward is {reward!r}; TwentyQuestions knows 'success' and 'per_question'")
        self.reward = reward
        self.partners = Partners(oracle, make_oracle, "oracle")
        if words is None:
            self.table = load_table(table, num_objects, num_attributes)
        elif None in self.partners.everybody:
            raise ValueError(
                "env_config.words needs an oracle that knows them: oracle: {kind: endpoint, base_url: ..., model: ...}"
            )
        else:
            self.table = ObjectTable((), read_words(words), ())
        self._tasks = {name: index for index, name in enumerate(self.table.objects)}
        self._tasks |= {f"object-{index}": index for index in range(len(self.table.objects))}

    @property
    def _model(self) -> Endpoint | None:
        """Oracle of the episode; None is the table."""
        return self.partners.current

    @cached_property
    def _system_prompt(self) -> str:
        objects = self.table.objects
        listed = f" The object is one of: {', '.join(objects)}." if len(objects) <= MAX_LISTED else ""
        return (
            "You play twenty questions. Find the object that I have in mind by asking questions that I can answer with "
            f"yes or no, one at a time; you have {self.max_turns} turns. You win by naming the object, as in "
            f"'{self.table.guess(0)}'.{listed}"
        )

    @property
    def system_prompt(self) -> str:
        return self._system_prompt

    def sample_task(self, spec: str | None) -> TaskId[int]:
        # A task's id is shown in logs and dialogues, so it is a number and not the hidden answer itself.
        if spec is None:
            index = int(self.np_random.integers(len(self.table.objects)))
        elif spec in self._tasks:
            index = self._tasks[spec]
        else:
            raise ValueError(f"no task is called {spec!r}; the world has {', '.join(list(self._tasks)[:300])}")
        return TaskId(id=f"object-{index}", task=index, privileged={"answer": self.table.objects[index]})

    def begin(self, task: int) -> str:
        return "Guess my object."

    def reply(self, task: int, action: str) -> Reply:
        if self._model is None:
            answer = self.table.answer(self.table.meaning(action), task)
        else:
            answer = ask_model(self._model, self.table.objects, task, action)
        won = answer == CORRECT
        reward = -1.0 if self.reward == "per_question" else float(won)
        return Reply(answer, reward, success=True if won else None)

    def expert_action(self) -> str:
        if self._model is not None:
            return super().expert_action()
        return oracle_action(self, self.dialogue)

    def expert_judgement(self, action: str) -> tuple[bool, str]:
        if self._model is not None:
            return super().expert_judgement(action)
        table, left = self.table, candidates_after(self.table, self.dialogue)
        meaning, count = table.meaning(action), left.bit_count()
        known = f"Left: {table.names(left)}."
        if meaning is None:
            return False, f"{known} This asks for none."
        fits = table.narrow(left, meaning, YES if meaning[0] == "ask" else CORRECT)
        held = fits.bit_count()
        best = table.best(left, self.max_turns - len(self.dialogue))
        most = table.narrow(left, best, YES if best[0] == "ask" else CORRECT).bit_count()
        good = held > 0 and meaning[0] == best[0] and min(held, count - held) >= min(most, count - most)
        return good, f"{known} This fits {table.names(fits)}."


def make_oracle(config: Mapping[str, Any] | None) -> Endpoint | None:
    """The language model that a configuration asks for; None is the table.

    Raises:
        ValueError: The kind or a key is unknown.
    """
    given = dict(config or {"kind": "table"})
    kind = given.pop("kind", None)
    if kind == "table" and not given:
        return None
    if kind == "endpoint":
        return endpoint_from({"max_tokens": 16, **given}, "env_config.oracle")
    raise ValueError(f"env_config.oracle is {config!r}; it must have kind: table, or kind: endpoint with base_url and model")


def read_words(words: str | Sequence[str]) -> tuple[str, ...]:
    """Objects of one's own.

    Raises:
        ValueError: There is none, or one stands there twice.
    """
    lines = Path(words).expanduser().read_text(encoding="utf-8").splitlines() if isinstance(words, str) else words
    names = [" ".join(line.split()).lower() for line in lines]
    names = [name for name in names if name and not name.startswith("#")]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if not names or twice:
        raise ValueError(f"env_config.words: {f'{twice!r} stands there twice' if twice else 'there is no word'}")
    return tuple(names)


def ask_model(model: Endpoint, objects: Sequence[str], target: int, question: str) -> str:
    """A language model's answer about an object; a guess is compared by its words and costs no call.

    Raises:
        EndpointError: The endpoint does not answer.
    """
    said = _bare(question[:2000])
    if said in map(_bare, objects):
        return CORRECT if said == _bare(objects[target]) else NO
    told = f"The object is: {objects[target]}. Answer the question about it with Yes or No, or Unknown where neither is right."
    messages = [{"role": "system", "content": told}, {"role": "user", "content": question[:2000] or "?"}]
    word = re.match(r"\W*(yes|no)\b", model.ask(messages).text.lower())
    return UNKNOWN if word is None else YES if word[1] == "yes" else NO


def _bare(text: str) -> str:
    """What a guess names, or a name, without articles and marks at the end."""
    guess = _GUESS.fullmatch(" ".join(text.lower().split()))
    return guess[1] if guess else ""


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
