"""A model of a few thousand numbers, learners around it whose step is the gradient itself, and hand-made episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from transformers import Qwen2Config, Qwen2ForCausalLM

from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import GENERATION, MESSAGES, TASK_SEED
from rllib_nlac.learner.batch import TrainingSequence, to_multi_agent_batch
from rllib_nlac.learner.learner import LanguageLearner
from rllib_nlac.types import Generation, Message

VOCABULARY = 40
# With such an ε Adam's first step is lr · gradient / ε, and the gradient itself can be read from the weights.
GRADIENT = {"lr": 1e4, "optimizer": {"eps": 1e4}, "grad_clip": None}


def save_micro_model(folder: Path) -> str:
    """Writes the model; it has no tokenizer, for learners need none."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.5,
        **shape,
    )
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    return str(folder)


def build_learner(config: Any, **settings: Any) -> LanguageLearner:
    """The learner of an algorithm's configuration, in this process."""
    own = config.copy(copy_frozen=False)
    for key, value in settings.items():
        setattr(own, key, value)
    spec = own.get_default_rl_module_spec()
    spec.observation_space = spec.action_space = TextSpace()
    learner = own.get_default_learner_class()(config=own, module_spec=spec)
    learner.build()
    return learner


def update(learner: LanguageLearner, sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    """One batch through a learner; its metrics."""
    batch = to_multi_agent_batch(sequences, env_steps=1)
    return learner.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0})[DEFAULT_MODULE_ID]


def parameters_of(learner: LanguageLearner) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten().clone() for p in learner.trained.parameters()])


def gradient_of(learner: LanguageLearner, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """The gradient that one update has followed; the learner's settings must be ``GRADIENT``."""
    before = parameters_of(learner)
    update(learner, sequences)
    return before - parameters_of(learner)


def played(
    rewards: Sequence[float],
    task: int = 0,
    lengths: Sequence[int] | None = None,
    truncated: bool = False,
    success: bool | None = None,
    name: str = "",
) -> SingleAgentEpisode:
    """An episode with these rewards; turn t of it has ``lengths[t]`` tokens and different log-probabilities."""
    result = SingleAgentEpisode(id_=name or f"played-{task}-{rewards}-{lengths}")
    result.custom_data[TASK_SEED] = task
    result.add_env_reset("Go.", {})
    messages: tuple[Message, ...] = (Message("user", "Go."),)
    for t, reward in enumerate(rewards):
        size, last = (lengths or [2] * len(rewards))[t], t == len(rewards) - 1
        generation = Generation(
            tuple(range(2, 5 + t)), tuple(range(10, 10 + size)), -0.1 * np.arange(1, size + 1, dtype=np.float32), True, 3
        )
        result.add_env_step(
            f"reply {t}",
            f"turn {t}",
            reward,
            {"success": success} if last and success is not None else {},
            terminated=last and not truncated,
            truncated=last and truncated,
            extra_model_outputs={GENERATION: generation, MESSAGES: messages},
        )
        messages = (*messages, Message("assistant", f"turn {t}"), Message("user", f"reply {t}"))
    return result
