"""ReAct prompting (Yao et al., arXiv 2210.03629): the model as it is plays the environment, and nothing is trained.

The model is the engine's own, or one behind an OpenAI-compatible endpoint. Set ``action_format: react`` for turns of thought
and action; with "plain" the same algorithm measures a base model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.algorithm.model_defaults import ModelDefaults
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.endpoint_engine import ENDPOINT_KEYS, EndpointChat
from rllib_nlac.engine.make import EngineSpec
from rllib_nlac.names import unknown_key


class ReActConfig(LanguageAlgorithmConfig):
    """Configures ReAct prompting."""

    trains = False
    NESTED_RANGES = {
        "endpoint": {"max_concurrency": ranges.COUNT, "max_retries": ranges.WHOLE_NOT_NEGATIVE, "timeout_s": ranges.POSITIVE}
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ReAct)
        self.action_format = "react"
        self.endpoint: dict[str, Any] = {}

    @override(AlgorithmConfig)
    def training(self, *, endpoint: dict[str, Any] | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets who plays.

        Args:
            endpoint: ``base_url`` and ``model`` of an OpenAI-compatible endpoint, ``api_key_env`` (the name of the variable
                that holds its key), ``max_concurrency``, ``max_retries``, ``timeout_s``. Empty plays ``language_model``.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)

    @property
    @override(LanguageConfig)
    def _brought(self) -> ModelDefaults:
        """With an endpoint only the tokenizer of a shipped model is used: its prompts and limits suit no other."""
        brought = super()._brought
        return ModelDefaults(folder=brought.folder) if self.endpoint else brought

    @property
    @override(LanguageConfig)
    def engine_spec(self) -> EngineSpec:
        # An adapter that nobody trains changes nothing, and an engine would wait for one.
        return replace(super().engine_spec, endpoint=self.endpoint, lora=None, merges_lora=None)

    @override(LanguageConfig)
    def make_chat(self) -> Chat:
        """With an endpoint the tokenizer of ``language_model`` only keeps the books, and its context limits nothing."""
        chat = super().make_chat()
        return EndpointChat(chat, self.max_context) if self.endpoint else chat

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        return NoLearner

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=NoModule)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        if self.endpoint:
            for key in ("num_env_runners", "evaluation_num_env_runners", "num_engines"):
                complaint = "must be 0 with an endpoint; for more at a time raise max_concurrency of endpoint, or env_threads"
                self._check(not getattr(self, key), key, complaint)
        super().validate()
        for key in self.endpoint:
            if key not in ENDPOINT_KEYS:
                raise ValueError(f"config.endpoint: {unknown_key(key, ENDPOINT_KEYS)}")
        if self.endpoint and not {"base_url", "model"} <= set(self.endpoint):
            raise ValueError("config.endpoint needs 'base_url', as in http://localhost:8000/v1, and 'model'")
        key = "min_train_timesteps_per_iteration"
        self._check(not getattr(self, key), key, "is never reached, for nothing is trained: leave it out")


class NoModule(TorchRLModule):
    """RLlib wants a module; there is nothing to train."""

    def setup(self) -> None:
        self.nothing = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def set_state(self, state: Any) -> None:
        pass


class NoLearner(TorchLearner):
    """RLlib wants a learner; it is never asked for an update, and a checkpoint has nothing of it."""

    restored_from = "nothing"  # what every learner says of itself after a restore; here there is nothing to read

    def prepare_for_saving(self) -> None:
        pass

    def get_shard(self) -> None:
        pass

    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("ReAct trains nothing")


class ReAct(LanguageAlgorithm):
    """Plays ``episodes_per_iteration`` episodes an iteration, and that is all."""

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> ReActConfig:
        return ReActConfig(algo_class=cls)

    @override(Algorithm)
    def training_step(self) -> None:
        self.collect()

    @override(LanguageAlgorithm)
    def sync_weights(self) -> None:
        """The engine serves the model's own weights from the start, which are version 0, also after a restore."""
        self.weight_version = 0
