"""Critics without a successor model: real rollouts of the policy from (s, a) stand where NLAC predicts futures.

Each iteration plays episodes, takes one step of each at random, and lets the policy play on from there several times: the
environment is reset with the same seed and led to that step again. These rollouts are environment episodes and count as
such. ``nlrl`` and ``self_distillation`` differ in what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.critic_config import CriticConfig
from rllib_nlac.algorithm.evaluation import on_runners
from rllib_nlac.diagnostics.metrics import log_stages, timed
from rllib_nlac.language.report import StageReport
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, into_minibatches
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.branches import Prefix, play_branches
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.slot import Start
from rllib_nlac.types import BellmanTarget, Refinement, Transition


class RolloutConfig(CriticConfig):
    """Configures critics from rollouts. ``minibatch_size`` counts texts, of both roles together."""

    RANGES = {"rollouts_per_action": ranges.COUNT}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.rollouts_per_action = 4

    @override(AlgorithmConfig)
    def training(self, *, rollouts_per_action: int | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets the hyper-parameters.

        Args:
            rollouts_per_action: Continuations of each judged action, the one first played included.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)


class RolloutCritic(LanguageAlgorithm):
    """On-policy: judge actions by real rollouts, refine them, distil."""

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        super().setup(config)
        self.stages = self.make_stages()

    def describe(self, rollouts: Sequence[Sequence[Transition]], report: StageReport) -> list[list[BellmanTarget]]:
        """What the evaluator is told of each rollout.

        Args:
            rollouts: For each judged action its rollouts: the transition of that action, with all that followed in
                ``following``.
            report: Counts what is lost.

        Returns:
            A description of each rollout; it is trained on where it has a generation.
        """
        raise NotImplementedError

    @override(LanguageAlgorithm)
    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        picks = [(episode, int(self.rng.integers(len(episode)))) for episode in episodes]
        with timed(self.metrics, "branches", "playing on"):
            branches = self.branch([(episode, t + 1) for episode, t in picks], self.config.rollouts_per_action - 1)
        rollouts = [
            [self._transition(rollout, t) for rollout in (episode, *continued)]
            for (episode, t), continued in zip(picks, branches, strict=True)
        ]
        report = StageReport()
        with timed(self.metrics, "waves", "asking the critic"):
            described = self.describe(rollouts, report)
            futures = [tuple(target.future for target in targets if target.future) for targets in described]
            judged = [first for first, *_ in rollouts]
            refinements: list[Refinement]
            (refinements,) = self.stages.drive(report, self.stages.improvement(judged, report, futures))
        targets = [target for group in described for target in group]
        log_stages(self.metrics, report, targets, refinements)
        self.watch.check_stages(report)
        return self._sequences(targets, refinements)

    def branch(self, prefixes: Sequence[Prefix], count: int) -> list[list[SingleAgentEpisode]]:
        """``count`` continuations of each prefix, shared out among the EnvRunners; see ``play_branches``."""

        def play(starts: Sequence[Start]) -> list[SingleAgentEpisode]:
            played, metrics = on_runners(self, self.env_runner_group, starts, TextEnvRunner.play_forks)
            self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS)
            return played

        return play_branches(prefixes, count, self.rng, play)

    def _transition(self, episode: SingleAgentEpisode, t: int) -> Transition:
        return transition_at(str(self.config.env), episode, t, n_step=len(episode))  # all that followed comes along

    def _sequences(self, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]) -> list[TrainingSequence]:
        """Both losses weigh the same, whatever the number of their texts."""
        config = self.config
        critic = [(t, t.generation) for t in targets if t.generation]
        policy = [(r, r.generation) for r in refinements if r.generation and config.policy_loss_coeff]
        sequences: list[TrainingSequence] = []
        for target, answer in critic:
            weight = 1.0 / len(critic)
            sequences.append(
                TrainingSequence(
                    target.prompt_ids,
                    answer.token_ids,
                    CRITIC,
                    0,
                    0,
                    weight,
                    origin=f"turn {target.transition.id} of a rollout",
                )
            )
        for refinement, answer in policy:
            ids, weight = refinement.transition.generation.prompt_ids, config.policy_loss_coeff / len(policy)
            origin = f"turn {refinement.transition.id} of a judged episode"
            sequences.append(TrainingSequence(ids, answer.token_ids, POLICY, 0, 0, weight, origin=origin))
        return into_minibatches(sequences, self.config.minibatch_size, self.config.num_epochs, self.rng)
