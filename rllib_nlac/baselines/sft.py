"""SFT: supervised fine-tuning on conversations, the warm-up from which every other algorithm can start."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.logs import LOGGED, check_logs, played_env, take_logs
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.learner.batch import TrainingSequence, into_minibatches
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.replay.conversations import ConversationData, epochs

SFT_RESULTS = "sft"  # key of its own results
HELD_OUT_AT_MOST = 256  # turns, whose loss is computed


class SFTConfig(LanguageAlgorithmConfig):
    """Configures SFT.

    An iteration trains on ``train_batch_size_per_learner`` conversations, or groups of them, for each learner;
    ``minibatch_size`` counts their turns. ``evaluation_interval`` plays the environment, as under any other algorithm.
    """

    learns_from_logs = True
    trains_by_imitation = True
    input_: Any  # RLlib's
    env: Any
    RANGES = {"held_out_fraction": ranges.Range(0, 0.5)}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or SFT)
        self.offline_data_class = ConversationData
        self.train_batch_size_per_learner = 128
        self.held_out_fraction = 0.02

    @override(AlgorithmConfig)
    def offline_data(self, *, held_out_fraction: float | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets the conversations; of RLlib's own keys ``input_`` is taken: files, patterns or folders of JSONL or parquet.

        Args:
            held_out_fraction: Share of the conversations that is not trained; its loss is the metric ``sft/held_out_loss``.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().offline_data(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def validate(self) -> None:
        take_logs(self, "conversations")
        if not self.is_offline:
            raise ValueError(
                "config.input_ must name the conversations: a file, a pattern or a folder of .jsonl or .parquet, or a list of "
                "them. `rllib env expert ENV --out chats.jsonl` writes some"
            )
        super().validate()
        check_logs(self, alone=True)
        self._check(
            self.in_evaluation or not self.evaluation_interval or played_env(self) != LOGGED,
            "evaluation_interval",
            "needs an environment to play: set env",
        )


class SFT(LanguageAlgorithm):
    """Trains the assistant turns of conversations, token by token.

    Metrics (sft):
        held_out_loss: Loss of conversations that are not trained on (`held_out_fraction`).
        epochs, num_conversations: Passes done, and the number of conversations.
    """

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> SFTConfig:
        return SFTConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        self.num_drawn = 0
        super().setup(config)
        data = self.offline_data
        assert isinstance(data, ConversationData)
        read = data.sequences(self.chat)
        self.notices.update("logs", data.notice)
        num_held_out = min(int(len(read) * self.config.held_out_fraction), len(read) - 1)
        chosen = set(np.random.default_rng([self.config.seed or 0, 1]).permutation(len(read))[:num_held_out].tolist())
        self.held_out = [sequence for place in sorted(chosen) for sequence in read[place]][:HELD_OUT_AT_MOST]
        self.conversations = [own for place, own in enumerate(read) if place not in chosen]
        self.named_data = self.known_data = data.fingerprint

    @override(LanguageAlgorithm)
    def training_step(self) -> None:
        if self.named_data != self.known_data:
            raise CheckpointError(
                "config.input_ names other conversations than those that the checkpoint was trained on, and a restored run "
                "goes on as it was: set input_ as it was, or begin a run from the exported model (rllib export)"
            )
        self.learn(self.next_batch())
        self.sync_weights()
        if self.held_out:
            self.metrics.log_value((SFT_RESULTS, "held_out_loss"), self.held_out_loss(), window=1)

    def next_batch(self) -> list[TrainingSequence]:
        """The turns of the next conversations, in gradient steps."""
        size = self.config.total_train_batch_size
        places, passes = epochs(len(self.conversations), self.num_drawn, size, self.config.seed or 0)
        self.num_drawn += size
        turns = [sequence for place in places for sequence in self.conversations[place]]
        self.metrics.log_value((SFT_RESULTS, "epochs"), passes, window=1)
        self.metrics.log_value((SFT_RESULTS, "num_conversations"), len(self.conversations), window=1)
        return into_minibatches(turns, self.config.minibatch_size, self.config.num_epochs, None)

    def held_out_loss(self) -> float:
        """Mean negative log-likelihood of a token of the held-out turns, in nats."""
        prompts, answers = [s.prompt_ids for s in self.held_out], [s.answer_ids for s in self.held_out]
        found = self._with_learners(
            lambda: on_every_learner(self.learner_group, lambda learner: learner.logprobs_of(prompts, answers))[0]
        )
        return -float(np.concatenate(found).mean())

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "num_drawn": self.num_drawn, "data": self.known_data}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        super().set_own_state(state)
        self.num_drawn, self.known_data = state["num_drawn"], state["data"]
