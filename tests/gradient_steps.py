"""Sequences for a learner, a gradient step on them, and what it did to the weights."""

from __future__ import annotations

import torch

from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.types import Weights

SEQUENCES = [
    TrainingSequence((3, 10, 11, 12), (20, 21, 1), CRITIC, 0, 0, 0.25),
    TrainingSequence((3, 10), (30, 31, 32, 33, 1), POLICY, 0, 0, 0.5),
    TrainingSequence((3, 40, 41, 42, 43, 44, 45), (22, 1), CRITIC, 1, 0, 0.125),
    TrainingSequence((3, 50, 51), (60, 1), POLICY, 2, 0, 1.0),
]


def update(learner: LanguageLearner, sequences=SEQUENCES, env_steps: int = 0) -> dict:
    timesteps = {"num_env_steps_sampled_lifetime": env_steps}
    return learner.update(batch=to_multi_agent_batch(sequences, env_steps=3), timesteps=timesteps)


def weights_of(learner: LanguageLearner) -> dict[str, torch.Tensor]:
    return learner.export_weights()[Weights.POLICY]


def zero(stage: int) -> dict:
    """The key of a ZeRO stage."""
    return {"deepspeed_config": {"zero_optimization": {"stage": stage}}}
