"""ERL, Experiential Reinforcement Learning (arXiv 2602.13949), and the self-distillation of RLTF (arXiv 2602.02482).

A first attempt that is lost is followed by a reflection: the model reads its own attempt, the environment's words and the
outcome, and writes what to do instead. With that note in view it tries the same task, by its seed, once more. What was better
is internalised: the policy is trained on those turns under the prompts *without* the note. By ``internalise: success`` that
is, as in ERL, every attempt that was won; by ``advantage``, as in RLTF-SD, an attempt counts as much as its return exceeds the
mean return of the task's first attempts.

Simplified: imitation stands where both papers reinforce first attempts (and ERL reflections and second attempts, too) by a
policy gradient, so that a first attempt that was good is imitated like a second, and reflecting itself is not trained. What
was worse teaches nothing: RLTF-SD's negative advantages are left out. Weights count relative to each other within a minibatch,
so that an advantage of 0.01 that stands alone makes as large a step as one of 1. One reflection and one second attempt; no
memory of reflections over tasks. RLTF's feedback is a judge's words, here it is the environment's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.evaluation import on_runners
from rllib_nlac.baselines.grpo import has_spread
from rllib_nlac.diagnostics.metrics import timed
from rllib_nlac.diagnostics.watch import MANY
from rllib_nlac.engine.chat import Prompt, Wanted
from rllib_nlac.episode import episode_success, generations_of, messages_at, task_seed_of
from rllib_nlac.language.critique import transcript
from rllib_nlac.language.parsing import without_thinking
from rllib_nlac.learner.batch import TrainingSequence, into_minibatches, turn_sequences
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import Request

AGAIN = "/again"  # ends the names of second attempts


class ERLConfig(LanguageAlgorithmConfig):
    """Configures ERL. ``minibatch_size`` counts turns, ``episodes_per_iteration`` first attempts."""

    trains_by_imitation = True
    RANGES = {"episodes_per_task": ranges.COUNT, "max_reflection_tokens": ranges.COUNT_OR_NONE}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ERL)
        self.episodes_per_task = 8
        self.internalise = "success"
        self.max_reflection_tokens: int | None = None

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        episodes_per_task: int | None = NotProvided,
        internalise: str | None = NotProvided,
        max_reflection_tokens: int | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets ERL's hyper-parameters.

        Args:
            episodes_per_task: First attempts at each task, whose mean return is the baseline of ``internalise: advantage``.
            internalise: "success": attempts that were won, all alike (ERL). "advantage": those above the task's first attempts,
                by how much they are (RLTF-SD).
            max_reflection_tokens: The most tokens of a reflection, thought included; None is as many as the shipped model's
                critiques have, or 192.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check_choice("internalise", "success", "advantage")


class ERL(LanguageAlgorithm):
    """On-policy: attempt, reflect, attempt again, and imitate what was better as if there had been no reflection."""

    nothing_to_learn = (
        "no attempt was better than its task's first ones, not even with a reflection in view. Begin with a model that "
        "sometimes succeeds, with easier tasks, or play more episodes (episodes_per_iteration)"
    )

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> ERLConfig:
        return ERLConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        again = self.attempt_again(self.reflect([episode for episode in episodes if not episode_success(episode)]))
        self.metrics.log_value("second_attempt_success", share_won(again), window=1)
        attempts = [*episodes, *again]
        weights = [
            self.weight(episode, baseline) for episode, baseline in zip(attempts, baselines(episodes, again), strict=True)
        ]
        self.metrics.log_value("internalised_rate", sum(w > 0 for w in weights) / max(len(weights), 1), window=1)
        sequences = [
            replace(turn, weight=turn.weight * weight)
            for episode, weight in zip(attempts, weights, strict=True)
            if weight > 0
            for turn in self.without_note(episode)
        ]
        return into_minibatches(sequences, self.config.minibatch_size, self.config.num_epochs, self.rng)

    def weight(self, episode: SingleAgentEpisode, baseline: float) -> float:
        """How much an attempt counts, beside the mean return of its task's first attempts; not at all at 0.

        Relative to the others of its minibatch, whose weights are made to sum to 1.
        """
        if self.config.internalise == "success":
            return float(episode_success(episode))
        pair = np.array([episode.get_return(), baseline])
        return float(pair[0] - pair[1]) if pair[0] > pair[1] and has_spread(pair) else 0.0

    def reflect(self, lost: Sequence[SingleAgentEpisode]) -> list[tuple[SingleAgentEpisode, str]]:
        """What the model would do otherwise after each attempt, without those whose note is empty or was cut off."""
        sampling = replace(self.config.action_sampling, max_tokens=self.max_reflection_tokens)
        wanted = []
        for episode in lost:
            last = transition_at(str(self.config.env), episode, len(episode) - 1)
            messages = self.prompts_for(last.env).reflect_messages(last.state, last.action, transcript(last).text)
            wanted.append(Wanted(messages, sampling.max_tokens, last.seen))
        asked = [(e, p) for e, p in zip(lost, self.chat.prompts(wanted), strict=True) if isinstance(p, Prompt)]
        limits = (sampling.max_tokens, sampling.temperature, sampling.top_p)
        requests = [
            Request(p.ids, *limits, seed=int(self.rng.integers(1 << 31)), logprobs=False, role="reflection") for _, p in asked
        ]
        with timed(self.metrics, "reflection", "reflecting"):
            answers = self.engine.generate(requests) if requests else []
        self.metrics.log_value("num_reflection_tokens", sum(len(g.token_ids) for g in answers), reduce="sum")
        notes = [without_thinking(self.chat.said(g)) if g.finished else "" for g in answers]
        reflected = [(episode, note) for (episode, _), note in zip(asked, notes, strict=True) if note]
        if lost:
            self.metrics.log_value("reflected_rate", len(reflected) / len(lost), window=1)
            self.check_reflections(len(lost), sum(not g.finished for g in answers), len(lost) - len(asked))
        return reflected

    def check_reflections(self, wanted: int, cut_off: int, too_long: int) -> None:
        """Tells a person where most reflections of an iteration came to nothing for a reason that can be removed."""
        text = None
        if cut_off + too_long > MANY * wanted:
            text = (
                f"most reflections of iteration {self.iteration + 1} came to nothing: {cut_off} of {wanted} were cut off "
                f"(max_reflection_tokens is {self.max_reflection_tokens}), and {too_long} did not fit the context "
                f"(max_context is {self.chat.max_context}); raise what is too small"
            )
        self.notices.update("reflections", text)

    @property
    def max_reflection_tokens(self) -> int:
        """The most tokens of a reflection."""
        return self.config.max_reflection_tokens or self.config.model_defaults.max_critique_tokens

    def attempt_again(self, notes: Sequence[tuple[SingleAgentEpisode, str]]) -> list[SingleAgentEpisode]:
        """Plays each episode's task once more, with the note in view. They count as episodes, and not in ``success_rate``."""
        if not notes:
            return []
        starts = [
            Start(
                f"{episode.id_}{AGAIN}",
                task_seed_of(episode),
                int(self.rng.integers(1 << 31)),
                note=note,
                role="second_attempts",
            )
            for episode, note in notes
        ]
        with timed(self.metrics, "second_attempts", "trying again"):
            played, metrics = on_runners(self, self.env_runner_group, starts, TextEnvRunner.play_forks)
        self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS)
        return played

    def without_note(self, episode: SingleAgentEpisode) -> list[TrainingSequence]:
        """An attempt's turns under the prompts of a policy that has no note; one that does not fit is left out."""
        turns = turn_sequences(episode)
        if not episode.id_.endswith(AGAIN):
            return turns
        spoken = [t for t, g in enumerate(generations_of(episode)) if g.token_ids]
        wanted = [Wanted(messages_at(episode, t), len(turn.answer_ids)) for t, turn in zip(spoken, turns, strict=True)]
        prompts = self.chat.prompts(wanted)
        return [replace(turn, prompt_ids=p.ids) for turn, p in zip(turns, prompts, strict=True) if isinstance(p, Prompt)]


def baselines(first: Sequence[SingleAgentEpisode], again: Sequence[SingleAgentEpisode]) -> list[float]:
    """The mean return of the first attempts at each one's task, of first and second attempts in their order."""
    returns: dict[int, list[float]] = defaultdict(list)
    for episode in first:
        returns[task_seed_of(episode)].append(episode.get_return())
    return [float(np.mean(returns[task_seed_of(episode)])) for episode in (*first, *again)]


def share_won(episodes: Sequence[SingleAgentEpisode]) -> float:
    """Share of episodes that ended in success; NaN if there are none."""
    return float(np.mean([episode_success(episode) for episode in episodes])) if episodes else float("nan")
