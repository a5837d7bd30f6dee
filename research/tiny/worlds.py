"""The little worlds that a small base model can be built for. The package ships two of these models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rllib_nlac
from research.crossing import Crossing
from research.tiny.corpus import Corpus
from research.tiny.crossing import CrossingCorpus
from research.tiny.text_house import HousesByHeart, TextHouseCorpus
from research.tiny.twenty_questions import TwentyQuestionsCorpus
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.language.prompts import PromptSet, load_prompts

MODELS = Path(rllib_nlac.__file__).parent / "tiny"  # those that the package ships
MakeCorpus = Callable[[Any, PromptSet, int], Corpus]


@dataclass(frozen=True)
class Lesson:
    """A part of a model's training, with a learning rate that rises and falls once.

    Attributes:
        steps: Optimizer steps.
        lr: The highest learning rate.
        make_corpus: Another corpus than the world's.
        batch_size: Examples a step.
    """

    steps: int
    lr: float = 0.003
    make_corpus: MakeCorpus | None = None
    batch_size: int = 64


@dataclass(frozen=True)
class World:
    """A world and its model.

    Attributes:
        name: Name of the world, as the command lines take it.
        env: Registered name of its environment.
        env_config: The world's size.
        history_turns: How much of a dialogue the model sees; None is all.
        make_env: The environment's class.
        make_corpus: The corpus's class, which takes an environment, prompts and a seed.
        lessons: How its model is trained, one lesson after the other.
        folder: Where the shipped model is, if there is one.
        init: The model that its own goes on from; None begins from scratch.
        seed: Seeds the first weights and the examples.
        advice_is_random: Whether its evaluator's fixes are drawn at random, and no answer to be exact about.
    """

    name: str
    env: str
    env_config: dict[str, Any]
    history_turns: int | None
    make_env: Callable[..., Any]
    make_corpus: MakeCorpus
    lessons: tuple[Lesson, ...]
    folder: Path | None = None
    init: Path | None = None
    seed: int = 0
    advice_is_random: bool = False

    def known_part(self, answer: str) -> str:
        """What of an answer the prompt determines: an advice that was drawn at random is left out."""
        return answer.partition("\nFix: ")[0] if self.advice_is_random else answer

    @property
    def prompts(self) -> PromptSet:
        """The wording that the model was trained on."""
        return load_prompts("compact", self.env)

    def corpus(self, seed: int, lesson: Lesson | None = None) -> Corpus:
        """The stream of examples that the model is trained on, or of one lesson; another seed gives others, some the same."""
        make = (lesson and lesson.make_corpus) or self.make_corpus
        return make(self.make_env(**self.env_config), self.prompts, seed)


TWENTY_QUESTIONS = World(
    "twenty_questions",
    "TwentyQuestions",
    {"num_objects": 16, "num_attributes": 8, "max_turns": 6},
    None,
    TwentyQuestions,
    TwentyQuestionsCorpus,
    (Lesson(5_000),),
    MODELS / "model",
)
TEXT_HOUSE = World(
    "text_house",
    "TextHouse",
    {"depth": 2, "brief": True, "memory": True, "max_turns": 30},
    1,
    TextHouse,
    TextHouseCorpus,
    (Lesson(4_600, batch_size=48), Lesson(2_900, 0.0015, HousesByHeart, batch_size=48)),
    MODELS / "house_model",
    advice_is_random=True,
)
# No model of this one or of those below is shipped: experiments build them where they need them.
CROSSING = World(
    "crossing",
    "Crossing",
    {"max_turns": 8},
    1,
    Crossing,
    CrossingCorpus,
    (Lesson(160, 0.002, batch_size=32),),
    init=TEXT_HOUSE.folder,  # which has learned to copy and to count
    seed=90,
    advice_is_random=True,
)

# The same game with other knowledge.
VARIANTS = [
    replace(
        TWENTY_QUESTIONS,
        name=f"twenty_questions_{name}",
        make_corpus=functools.partial(TwentyQuestionsCorpus, **changes),
        lessons=(Lesson(600, 0.0015),),
        folder=None,
        init=TWENTY_QUESTIONS.folder,
        seed=80,
        advice_is_random="advice" in changes,
    )
    for name, changes in (
        ("common_sense_advice", {"advice": "common sense"}),
        ("random_advice", {"advice": "random"}),
        ("some_sense", {"sense": 0.3}),
    )
]
WORLDS = {world.name: world for world in (TWENTY_QUESTIONS, TEXT_HOUSE, CROSSING, *VARIANTS)}
