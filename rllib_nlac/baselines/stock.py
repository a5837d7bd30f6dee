"""RLlib's own PPO and APPO on text environments: their training steps, learners, connectors and losses, unchanged.

What RLlib asks users to bring is brought here: an EnvRunner, an RLModule, a learner connector. ``rllib train`` takes these
classes for ``run: PPO`` and ``run: APPO`` wherever the environment is text.
"""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPO, APPOConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_nlac.baselines.token_module import TextToTokens, TokenValueModule
from rllib_nlac.checkpointing import CheckedCheckpoints
from rllib_nlac.language_config import LanguageConfig


class StockConfig(LanguageConfig):
    """Makes one of RLlib's configurations fit for text. A mixin: it goes before RLlib's class.

    Each EnvRunner has an engine of its own, in its process; RLlib's own sync feeds it. The turn limit ends an episode
    (``truncation_ends``), as it does for NLAC; RLlib would otherwise bootstrap from a state that nobody ever acts in.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.truncation_ends = True
        self.learners(learner_connector=self._text_to_tokens)
        self.gamma = 1.0
        self.lambda_ = 0.95
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.entropy_coeff = 0.0

    def _text_to_tokens(self, *spaces: Any) -> TextToTokens:
        chat = self.make_chat()
        return TextToTokens(
            *spaces, chat=chat, max_prompt_tokens=chat.max_context, max_action_tokens=self.max_action_tokens,
            history_turns=self.history_turns,
        )  # fmt: skip

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=TokenValueModule, model_config=self.model_settings)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check(self.action_temperature > 0, "action_temperature", "must be positive: a greedy policy has no gradient")
        self._check(self.action_top_p == 1.0, "action_top_p",
                    "must be 1: RLlib's losses compare probabilities under the whole distribution")  # fmt: skip
        self._check(self.num_engines == 0, "num_engines",
                    "must be 0: under RLlib's own algorithms each EnvRunner has its engine; raise num_env_runners")  # fmt: skip


class TextPPOConfig(StockConfig, PPOConfig):
    """RLlib's ``PPOConfig`` with ``.language()`` and ``.engines()``.

    .. testcode::

        from rllib_nlac.baselines.stock import TextPPOConfig

        config = (
            TextPPOConfig()
            .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
            .language(language_model="tiny", prompts="compact", max_action_tokens=12)
            .training(lr=1e-3, train_batch_size_per_learner=256, minibatch_size=64, num_epochs=4)
        )
        print(config.build_algo().train()["env_runners"]["success_rate"])
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or TextPPO)


class TextPPO(CheckedCheckpoints, PPO):
    """RLlib's PPO; its default configuration differs, and its checkpoints have checksums."""

    @classmethod
    @override(PPO)
    def get_default_config(cls) -> AlgorithmConfig:
        return TextPPOConfig()


class TextAPPOConfig(StockConfig, APPOConfig):
    """RLlib's ``APPOConfig`` with ``.language()`` and ``.engines()``."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or TextAPPO)


class TextAPPO(CheckedCheckpoints, APPO):
    """RLlib's APPO; its default configuration differs, and its checkpoints have checksums."""

    @classmethod
    @override(APPO)
    def get_default_config(cls) -> AlgorithmConfig:
        return TextAPPOConfig()
