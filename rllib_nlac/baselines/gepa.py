"""GEPA (arXiv 2507.19457): the instructions that the policy is given evolve by reflection, and no weights are trained.

The model plays a few tasks under some instructions, reads its attempts and how they ended, and writes better instructions.
These are played on the same tasks; if their return is higher, they are played on the validation tasks, too, and become a
candidate for further change. Candidates are drawn among those that no other beats on some validation task. The policy is the
model under the candidate with the best mean return there.

The search itself is that of the authors' library ``gepa``; here are rollouts and reflections. An iteration is as many rounds
of it as ``episodes_per_iteration`` pays for. Left out: merging candidates, which needs more than one text. What differs: the
tasks of each round are new ones, since an environment has as many as anybody wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS

from rllib_nlac.activity import EPISODES
from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.evaluation import on_runners
from rllib_nlac.baselines.react import ENDPOINT_RANGES, ReAct, ReActConfig
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.diagnostics.metrics import log_collection, stage
from rllib_nlac.diagnostics.token_usage import IterationTokens
from rllib_nlac.engine.chat import Prompt, Wanted
from rllib_nlac.engine.endpoint_engine import EndpointChat
from rllib_nlac.engine.make import make_engine
from rllib_nlac.inputs.texts import readable
from rllib_nlac.language.parsing import without_thinking
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Message, Request

if TYPE_CHECKING:
    from rllib_nlac.baselines.gepa_search import Search

INSTALL = "pip install 'rllib_nlac[gepa]'"
MOST_REFLECTION_TOKENS = 1024  # unless ``max_reflection_tokens`` says otherwise
MOST_CHARACTERS = 16  # of a reflection for each token that it may have, whatever the tokenizer


class GEPAConfig(ReActConfig):
    """Configures GEPA. ``episodes_per_iteration`` are those of all candidates, on validation tasks and others."""

    RANGES = {
        "episodes_per_iteration": ranges.COUNT,
        "num_validation_tasks": ranges.COUNT,
        "tasks_per_round": ranges.COUNT,
        "max_reflection_tokens": ranges.COUNT_OR_NONE,
    }
    NESTED_RANGES = {"reflection_endpoint": ENDPOINT_RANGES}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GEPA)
        self.action_format = "plain"
        self.instructions = ""
        self.num_validation_tasks = 32
        self.tasks_per_round = 3
        self.max_reflection_tokens: int | None = None
        self.reflection_endpoint: dict[str, Any] = {}

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        instructions: str | None = NotProvided,
        num_validation_tasks: int | None = NotProvided,
        tasks_per_round: int | None = NotProvided,
        max_reflection_tokens: int | None = NotProvided,
        reflection_endpoint: dict[str, Any] | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets the search.

        Args:
            instructions: What it begins with; the policy is told them behind the environment's own system prompt.
            num_validation_tasks: Tasks on which every accepted candidate is played, the same ones throughout.
            tasks_per_round: New tasks of a round, which are played under a candidate and under what a reflection made of it.
            max_reflection_tokens: The most tokens of a reflection, thought included, and so of instructions; None is a quarter
                of the context, at most 1024.
            reflection_endpoint: Who reflects, with the keys of ``endpoint``. Empty: who plays.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        if find_spec("gepa") is None:
            raise ValueError(f"GEPA needs the package gepa: {INSTALL}")
        super().validate()
        self._check_endpoint("reflection_endpoint")
        self._check(isinstance(self.instructions, str), "instructions", "must be a text")


class GEPA(ReAct):
    """Plays, reflects, and keeps what is better; nothing is trained."""

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> GEPAConfig:
        return GEPAConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        self.search: Search | None = None
        self.reflector: Any = None
        super().setup(config)
        self.instructions = self.config.instructions
        self.reflector, self.reflection_chat = self.engine, self.chat
        if endpoint := self.config.reflection_endpoint:
            self.reflection_chat = EndpointChat(self.chat)
            self.reflector = make_engine(replace(self.config.engine_spec, endpoint=endpoint), self.reflection_chat)
            self.token_usage = IterationTokens(self.engine, self.reflector)

    @override(Algorithm)
    def training_step(self) -> None:
        from rllib_nlac.baselines.gepa_search import VALIDATION_SEED, Adapter, Tasks, go_on

        config = self.config
        self.played: list[SingleAgentEpisode] = []
        self.lost_reflections: Counter[str] = Counter()
        prompts, seed = self.prompts_for(config.env), config.seed or 0
        wording = prompts.instruct and prompts.instruct.format(instructions="<curr_param>", attempts="<side_info>")
        adapter = Adapter(self.play, self.reflect, wording, prompts.quote)
        self.search = go_on(
            self.search,
            adapter,
            config.instructions,
            Tasks(seed),
            Tasks(seed + VALIDATION_SEED, config.num_validation_tasks),
            config.tasks_per_round,
            budget=config.episodes_per_iteration + (self.search.budget if self.search else 0),
            seed=int(self.rng.integers(1 << 31)),
        )
        self.instructions = self.search.instructions
        for name, value in {
            "num_candidates": len(self.search.candidates),
            "front_size": len(self.search.front),
            "validation_return": max(self.search.returns),
            "proposed_rate": adapter.proposals / max(adapter.rounds, 1),
        }.items():
            self.metrics.log_value(name, value, window=1)
        self.heed_reflections(adapter.rounds, adapter.proposals)
        log_collection(self.metrics, self.played, self.weight_version)
        if config.output:
            self.record_dialogues(self.played)

    def heed_reflections(self, rounds: int, proposals: int) -> None:
        """Tells a person where no reflection of an iteration came to new instructions for a reason that can be removed."""
        lost, text = self.lost_reflections, None
        if not proposals and lost:
            text = (
                f"no new instructions in iteration {self.iteration + 1}: of {rounds} reflections {lost['cut_off']} were cut "
                f"off (max_reflection_tokens is {self.max_reflection_tokens}), and {lost['too_long']} did not fit the context "
                f"({self.reflection_chat.max_context} tokens), {lost['empty']} more said nothing but reasoning, or nothing; "
                "raise what is too small, or set reflection_endpoint"
            )
        self.notices.heed("reflections", text)

    def play(self, tasks: Sequence[Start], instructions: str) -> list[SingleAgentEpisode | None]:
        """Plays tasks under instructions; None where an environment lost the episode."""
        prefix = f"{self.iteration + 1:06d}-{len(self.played):06d}"
        starts = [replace(task, name=f"{prefix}-{task.name}", instructions=instructions) for task in tasks]
        with stage(self.metrics, "play", "playing", len(starts), EPISODES):
            episodes, results = on_runners(self, self.env_runner_group, starts, TextEnvRunner.play_starts)
        self.metrics.aggregate(results, key=ENV_RUNNER_RESULTS)
        self.played += episodes
        by_name = {episode.id_: episode for episode in episodes}
        return [by_name.get(start.name) for start in starts]

    def reflect(self, prompts: Sequence[str]) -> str | None:
        """Answers the first of several prompts that fits the context; None where none does, or the answer is of no use."""
        if not prompts:
            return None
        limit = self.max_reflection_tokens
        for text in prompts:
            messages = (Message("user", text),)
            (prompt,) = self.reflection_chat.prompts([Wanted(messages, limit)])
            if isinstance(prompt, Prompt):
                break
        else:
            self.lost_reflections["too_long"] += 1
            return None
        seed = int(self.rng.integers(1 << 31))
        request = Request(prompt.ids, limit, seed=seed, messages=messages, logprobs=False, role="reflection")
        with stage(self.metrics, "reflection", "reflecting"):
            (answer,) = self.reflector.generate([request])
        self.metrics.log_value("num_reflection_tokens", len(answer.token_ids), reduce="sum")
        said = self.reflection_chat.said(answer)
        # An endpoint has counted in tokens of its own, and another tokenizer's count says nothing; but it may mind no limit.
        if not answer.finished or len(said) > MOST_CHARACTERS * limit:
            self.lost_reflections["cut_off"] += 1
            return None
        reflection = readable(without_thinking(said))[0]
        if not reflection:
            self.lost_reflections["empty"] += 1
        return reflection or None

    @property
    def max_reflection_tokens(self) -> int:
        """The most tokens of a reflection."""
        return self.config.max_reflection_tokens or min(MOST_REFLECTION_TOKENS, self.reflection_chat.max_context // 4)

    @override(LanguageAlgorithm)
    def step(self) -> dict[str, Any]:
        """An iteration, with the best instructions so far in its results."""
        return {**super().step(), "instructions": self.instructions}

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "search": self.search and asdict(self.search)}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        from rllib_nlac.baselines.gepa_search import VALIDATION_SEED, Search

        search = state["search"] and Search(**state["search"])
        if search:
            seed, count = search.validation
            for key, now, then in (
                ("num_validation_tasks", self.config.num_validation_tasks, count),
                ("seed", self.config.seed or 0, seed - VALIDATION_SEED),
            ):
                if now != then:
                    raise CheckpointError(
                        f"config.{key} is {now}, and the search of the checkpoint compares its candidates on the validation "
                        f"tasks of {key} {then}: set it to {then}, or begin a new search with instructions, its best ones"
                    )
            if (then := search.tasks_per_round or self.config.tasks_per_round) != self.config.tasks_per_round:
                raise CheckpointError(
                    f"config.tasks_per_round is {self.config.tasks_per_round}, and the rounds of the checkpoint's search had "
                    f"{then}, so that some tasks would be played again: set it to {then}, or begin a new search with "
                    "instructions, its best ones"
                )
        super().set_own_state(state)
        self.search = search
        self.instructions = self.search.instructions if self.search else self.config.instructions

    @override(LanguageAlgorithm)
    def cleanup(self) -> None:
        if self.reflector is not None and self.reflector is not self.engine:
            self.reflector.stop()
        super().cleanup()
