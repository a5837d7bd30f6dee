"""RFT (rejection fine-tuning): imitate the turns of the episodes that succeeded, and nothing else."""

from __future__ import annotations

from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.episode import episode_success
from rllib_nlac.learner.batch import TrainingSequence, into_minibatches, turn_sequences


class RFTConfig(LanguageAlgorithmConfig):
    """Configures RFT. ``minibatch_size`` counts turns."""

    trains_by_imitation = True
    RANGES = {"min_return": ranges.Range(optional=True), "pool_size": ranges.WHOLE_NOT_NEGATIVE}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or RFT)
        self.min_return: float | None = None
        self.pool_size = 0

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self, *, min_return: float | None = NotProvided, pool_size: int | None = NotProvided, **kwargs: Any
    ) -> Self:
        """Sets RFT's hyper-parameters.

        Args:
            min_return: The least return of an episode that is imitated; None asks for success.
            pool_size: Accepted episodes that are kept and imitated again in later iterations; 0 keeps none.

        Returns:
            This updated config.
        """
        arguments = locals()
        super().training(**kwargs)
        return self._set(arguments)


class RFT(LanguageAlgorithm):
    """The accepted episodes, of this iteration or of a pool of the latest, supervised.

    Metrics (top level):
        accepted_rate: RFT: share of episodes that are imitated.
    """

    nothing_to_learn = (
        "no episode was accepted: none succeeded, or none reached min_return. Begin with a model that sometimes succeeds, with "
        "easier tasks, or play more episodes (episodes_per_iteration)"
    )

    @classmethod
    @override(LanguageAlgorithm)
    def get_default_config(cls) -> RFTConfig:
        return RFTConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        self.pool: list[SingleAgentEpisode] = []
        super().setup(config)

    @override(LanguageAlgorithm)
    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        accepted = [episode for episode in episodes if self.accepts(episode)]
        self.metrics.log_value("accepted_rate", len(accepted) / max(len(episodes), 1), window=1)
        pool = [*self.pool, *accepted]
        self.pool = pool[max(len(pool) - max(self.config.pool_size, len(accepted)), 0) :]
        sequences = [sequence for episode in self.pool for sequence in turn_sequences(episode)]
        return into_minibatches(sequences, self.config.minibatch_size, self.config.num_epochs, self.rng)

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "pool": [episode.get_state() for episode in self.pool]}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        super().set_own_state(state)
        self.pool = [SingleAgentEpisode.from_state(episode) for episode in state["pool"]]

    def accepts(self, episode: SingleAgentEpisode) -> bool:
        """Whether an episode is imitated."""
        if self.config.min_return is None:
            return episode_success(episode)
        return episode.get_return() >= self.config.min_return
