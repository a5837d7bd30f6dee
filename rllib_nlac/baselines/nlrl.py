"""NLRL, Natural Language Reinforcement Learning (Feng et al., arXiv 2411.14251), as arXiv 2512.04601 compares with it.

On-policy Monte Carlo in words: each rollout is described from its end backwards, the value model is trained on these
descriptions, and the evaluator judges an action from all of its rollouts in one context. Simplified: its language value is
our predict role, its aggregation our evaluate role, its improvement our refine role.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.rollouts import RolloutConfig, RolloutCritic
from rllib_nlac.language.report import StageReport
from rllib_nlac.types import BellmanTarget, Transition


class NLRLConfig(RolloutConfig):
    """Configures NLRL."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or NLRL)


class NLRL(RolloutCritic):
    """Values in words from on-policy rollouts."""

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> NLRLConfig:
        return NLRLConfig(algo_class=cls)

    @override(RolloutCritic)
    def describe(self, rollouts: Sequence[Sequence[Transition]], report: StageReport) -> list[list[BellmanTarget]]:
        """A Monte Carlo backup of each rollout: nothing is bootstrapped, every step was really played."""
        targets: list[BellmanTarget]
        flat = [transition for group in rollouts for transition in group]
        (targets,) = self.stages.drive(report, self.stages.backup(flat, report))
        remaining = iter(targets)
        return [[next(remaining) for _ in group] for group in rollouts]
