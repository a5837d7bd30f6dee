"""Natural Language Actor-Critic for Ray RLlib.

Importing this package registers ``NLAC``, its baselines and the environments with Tune, so that ``tune.Tuner("NLAC", ...)``
and ``rllib train`` know them by name.
"""

from ray.tune.registry import register_trainable

from rllib_nlac import algorithms
from rllib_nlac.checkpoints.checked import guard_from_checkpoint
from rllib_nlac.envs.builtin import register_all
from rllib_nlac.envs.registry import register
from rllib_nlac.nlac import NLAC, NLACConfig
from rllib_nlac.version import __version__

__all__ = ["NLAC", "NLACConfig", "__version__", "register"]

for _name, _class in algorithms.OURS.items():
    register_trainable(_name, _class)
for _class in algorithms.STOCK_ON_TEXT.values():
    register_trainable(_class.__name__, _class)
register_all()
guard_from_checkpoint()
