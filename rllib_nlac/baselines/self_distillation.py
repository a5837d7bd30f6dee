"""Self-distillation (a baseline of arXiv 2512.04601): refine from real rollouts in context, and distil; no critic is trained.

The evaluator sees the bare replies of each rollout and how it ended, where NLAC shows it predicted futures.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.rollouts import RolloutConfig, RolloutCritic
from rllib_nlac.language.critique import transcript
from rllib_nlac.language.report import StageReport
from rllib_nlac.types import BellmanTarget, Transition


class SelfDistillationConfig(RolloutConfig):
    """Configures self-distillation."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or SelfDistillation)


class SelfDistillation(RolloutCritic):
    """Rollouts in context, a refined action, supervised."""

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> SelfDistillationConfig:
        return SelfDistillationConfig(algo_class=cls)

    @override(RolloutCritic)
    def describe(self, rollouts: Sequence[Sequence[Transition]], report: StageReport) -> list[list[BellmanTarget]]:
        """The replies as they came and the outcome; nothing is generated, so nothing of it is trained on."""
        return [[BellmanTarget(t, None, transcript(t), None, None) for t in group] for group in rollouts]
