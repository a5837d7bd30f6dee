"""The little worlds that this package ships a small base model for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllib_nlac.envs.crossing import Crossing
from rllib_nlac.envs.text_house import TextHouse
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.language.prompts import PromptSet, load_prompts
from rllib_nlac.tiny.corpus import Corpus
from rllib_nlac.tiny.crossing import CrossingCorpus
from rllib_nlac.tiny.text_house import HousesByHeart, TextHouseCorpus
from rllib_nlac.tiny.twenty_questions import TwentyQuestionsCorpus

HERE = Path(__file__).parent


@dataclass(frozen=True)
class World:
    """A world and its model.

    Attributes:
        name: Of the world, as the command lines take it.
        env: Registered name of its environment.
        env_config: The world's size.
        history_turns: How much of a dialogue the model sees; None is all.
        make_env: The environment's class.
        make_corpus: The corpus's class, which takes an environment, prompts and a seed.
        folder: Where the shipped model is, if there is one.
        advice_is_random: Whether its evaluator's fixes are drawn at random, and no answer to be exact about.
    """

    name: str
    env: str
    env_config: dict[str, Any]
    history_turns: int | None
    make_env: Callable[..., Any]
    make_corpus: Callable[[Any, PromptSet, int], Corpus]
    folder: Path | None
    advice_is_random: bool = False

    def known_part(self, answer: str) -> str:
        """What of an answer the prompt determines: an advice that was drawn at random is left out."""
        return answer.partition("\nFix: ")[0] if self.advice_is_random else answer

    @property
    def prompts(self) -> PromptSet:
        """The wording that the model was trained on."""
        return load_prompts("compact", self.env)

    def corpus(self, seed: int) -> Corpus:
        """The stream of examples that the model is trained on; another seed gives held-out ones."""
        return self.make_corpus(self.make_env(**self.env_config), self.prompts, seed)


TWENTY_QUESTIONS = World(
    "twenty_questions",
    "TwentyQuestions",
    {"num_objects": 16, "num_attributes": 8, "max_turns": 6},
    None,
    TwentyQuestions,
    TwentyQuestionsCorpus,
    HERE / "model",
)
TEXT_HOUSE = World(
    "text_house",
    "TextHouse",
    {"depth": 2, "brief": True, "memory": True, "max_turns": 30},
    1,
    TextHouse,
    TextHouseCorpus,
    HERE / "house_model",
    advice_is_random=True,
)
# Its model is built where it is needed, benchmarks/stitching.py says how.
CROSSING = World("crossing", "Crossing", {"max_turns": 8}, 1, Crossing, CrossingCorpus, None, advice_is_random=True)

# The same game with other knowledge; their models go on from the shipped one, benchmarks/compare.yaml says how.
VARIANTS = [
    replace(
        TWENTY_QUESTIONS,
        name=f"twenty_questions_{name}",
        folder=None,
        advice_is_random="advice" in changes,
        make_corpus=functools.partial(TwentyQuestionsCorpus, **changes),
    )
    for name, changes in (
        ("common_sense_advice", {"advice": "common sense"}),
        ("random_advice", {"advice": "random"}),
        ("some_sense", {"sense": 0.3}),
    )
]
# The last lesson of the house's model.
BY_HEART = replace(TEXT_HOUSE, name="text_house_by_heart", folder=None, make_corpus=HousesByHeart)
WORLDS = {world.name: world for world in (TWENTY_QUESTIONS, TEXT_HOUSE, CROSSING, BY_HEART, *VARIANTS)}
