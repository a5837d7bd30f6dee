"""GRPO (Group Relative Policy Optimization, arXiv 2402.03300): several episodes of each task, and no critic.

An episode's advantage is its return beside those of the other episodes of the same task; every token of its turns gets it.
Simplified: no KL term to a reference model but where ``kl_to_base_coeff`` asks for one, as most later work has it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Self

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.episode import task_seed_of
from rllib_nlac.learner.batch import TrainingSequence, into_minibatches, turn_sequences
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.learner.losses import clipped_policy_loss

ROUNDING = 1e-10  # returns are sums of rewards in float64


class GRPOConfig(LanguageAlgorithmConfig):
    """Configures GRPO. ``minibatch_size`` counts turns, ``episodes_per_iteration`` all episodes of all tasks."""

    RANGES = {
        **ranges.POLICY_GRADIENT,
        "episodes_per_task": ranges.Range(2, whole=True, why="an advantage compares episodes"),
        "clip_param": ranges.POSITIVE,
        "normalize_by_std": ranges.FLAG,
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)
        self.episodes_per_task = 8
        self.clip_param = 0.2
        self.normalize_by_std = True

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        episodes_per_task: int | None = NotProvided,
        clip_param: float | None = NotProvided,
        normalize_by_std: bool | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets GRPO's hyper-parameters.

        Args:
            episodes_per_task: G, the size of a group.
            clip_param: ε of the clipped ratio.
            normalize_by_std: Whether advantages are divided by their group's standard deviation.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        return PolicyGradientLearner


class PolicyGradientLearner(LanguageLearner):
    """The gradient step on turns that carry an advantage and the log-probabilities they were sampled with."""

    @override(LanguageLearner)
    def _sequence_losses(self, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
        temperature = self.config.action_temperature
        logprobs, mask, _, kl = self._answers(rows["ids"], rows["prompt_length"], rows["length"], temperature)
        behaviour = rows["logprobs"][:, int(rows["prompt_length"].min()) : int(rows["length"].max())]
        return clipped_policy_loss(logprobs, behaviour, rows["scalar"], mask, self.config.clip_param), kl


class GRPO(LanguageAlgorithm):
    """On-policy: a batch of groups, a few epochs of clipped policy gradient, new weights.

    Metrics (top level):
        informative_group_rate: GRPO: share of groups whose returns differ. Near 0: easier or harder tasks, more
            `episodes_per_task`.
    """

    nothing_to_learn = (
        "all episodes of each task had the same return, so none was better than another. Take tasks that the model sometimes "
        "solves, or more episodes of each (episodes_per_task)"
    )

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> GRPOConfig:
        return GRPOConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        groups: dict[int, list[SingleAgentEpisode]] = defaultdict(list)
        for episode in episodes:
            groups[task_seed_of(episode)].append(episode)
        sequences: list[TrainingSequence] = []
        informative: list[bool] = []
        for group in groups.values():
            returns = np.array([episode.get_return() for episode in group])
            informative.append(has_spread(returns))
            for episode, advantage in zip(group, self.advantages(returns), strict=True):
                if advantage:  # else its gradient is 0
                    sequences += turn_sequences(episode, advantage=float(advantage))
        self.metrics.log_value("informative_group_rate", np.mean(informative), window=1)
        return into_minibatches(sequences, self.config.minibatch_size, self.config.num_epochs, self.rng)

    def advantages(self, returns: np.ndarray) -> np.ndarray:
        """What each episode of a task is worth beside the others; other group methods differ in nothing else.

        Args:
            returns: Returns of the task's episodes, shape (G,).

        Returns:
            Shape (G,); an episode with 0 is not trained on.
        """
        return group_advantages(returns, self.config.normalize_by_std)


def has_spread(returns: np.ndarray) -> bool:
    """Whether the returns of a group differ by more than rounding, shape (G,), so that it says anything at all."""
    return bool(np.ptp(returns) > ROUNDING * max(1.0, np.abs(returns).max()))


def group_advantages(returns: np.ndarray, normalize_by_std: bool) -> np.ndarray:
    """(R - mean R) / std R of one group, shape (G,); zeros where all returns are equal.

    Returns that differ by rounding alone count as equal: divided by their deviation the rounding would be an advantage of 1.
    """
    if not has_spread(returns):
        return np.zeros_like(returns)
    advantages = returns - returns.mean()
    return advantages / returns.std() if normalize_by_std else advantages
