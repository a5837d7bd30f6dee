"""Algorithms by name: what ``run: NLAC`` in a YAML file means, or ``run: my_module:MyAlgorithm``."""

from __future__ import annotations

from ray.rllib.algorithms.algorithm import Algorithm

from rllib_nlac.ablations import ABLATIONS
from rllib_nlac.baselines.grpo import GRPO
from rllib_nlac.baselines.nlql import NLQL
from rllib_nlac.baselines.nlrl import NLRL
from rllib_nlac.baselines.react import ReAct
from rllib_nlac.baselines.rft import RFT
from rllib_nlac.baselines.scalar_critic import ScalarCritic
from rllib_nlac.baselines.self_distillation import SelfDistillation
from rllib_nlac.baselines.sft import SFT
from rllib_nlac.baselines.stock import TextAPPO, TextPPO
from rllib_nlac.names import attribute_of, names_attribute
from rllib_nlac.nlac import NLAC

OURS: dict[str, type[Algorithm]] = {
    cls.__name__: cls for cls in (NLAC, SFT, GRPO, RFT, NLRL, SelfDistillation, NLQL, ScalarCritic, ReAct)
} | ABLATIONS
#: RLlib's algorithms that play text, by RLlib's names.
STOCK_ON_TEXT: dict[str, type[Algorithm]] = {"PPO": TextPPO, "APPO": TextAPPO}


def find_outside(name: str) -> type[Algorithm] | None:
    """The class that ``module:Class`` names, looked for in the current directory too; None where a name reads otherwise.

    Raises:
        ValueError: There is none, or it is no algorithm.
    """
    if not names_attribute(name):
        return None
    found = attribute_of(name, "algorithm", "my_module:MyAlgorithm")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ValueError(f"algorithm {name!r} is no subclass of ray.rllib.algorithms.Algorithm")
    return found
