"""Baselines on the same environments, engines and models: RLlib's own algorithms, and each other one in a short file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm


def algorithms() -> dict[str, type[Algorithm]]:
    """This package's algorithms by the name that ``run:`` and Tune know them by."""
    from rllib_nlac.baselines.grpo import GRPO
    from rllib_nlac.baselines.nlql import NLQL
    from rllib_nlac.baselines.nlrl import NLRL
    from rllib_nlac.baselines.react import ReAct
    from rllib_nlac.baselines.rft import RFT
    from rllib_nlac.baselines.scalar_critic import ScalarCritic
    from rllib_nlac.baselines.self_distillation import SelfDistillation
    from rllib_nlac.nlac import NLAC

    return {cls.__name__: cls for cls in (NLAC, GRPO, RFT, NLRL, SelfDistillation, NLQL, ScalarCritic, ReAct)}


def stock_on_text() -> dict[str, type[Algorithm]]:
    """RLlib's algorithms that play text, by RLlib's names."""
    from rllib_nlac.baselines.stock import TextAPPO, TextPPO

    return {"PPO": TextPPO, "APPO": TextAPPO}
