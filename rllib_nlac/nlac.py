"""Natural Language Actor-Critic: ``NLACConfig`` says what to do, ``NLAC.training_step`` does it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

from rllib_nlac.activity import activity
from rllib_nlac.algorithm import ranges
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.critic_config import CriticConfig
from rllib_nlac.algorithm.evaluation import play_forks
from rllib_nlac.algorithm.replay import ReplayAlgorithm, ReplayConfig
from rllib_nlac.diagnostics.examination import FIXED_STATES, CriticExamination, ExaminationSettings
from rllib_nlac.diagnostics.metrics import SECONDS, log_replay, log_stages, timed
from rllib_nlac.diagnostics.record import Learned, RecordSettings
from rllib_nlac.diagnostics.recorder import CriticisedBatch, Recorder
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Variant
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.learner.losses import priorities
from rllib_nlac.names import unknown_key
from rllib_nlac.replay.buffer import ReplaySample
from rllib_nlac.types import BellmanTarget, Refinement, Weights

#: Settings by name. The documentation's page "Ablations" says what some of these keys are worth.
PRESETS: dict[str, dict[str, Any]] = {
    # The defaults: our reading of the paper.
    "paper": {},
    # For long episodes with a reward at their end, and a model whose advice is as weak as its play.
    "long_horizon": {
        # A stored action is judged by what really followed, a refined one by what the critic predicts.
        "critic_input": "backed_up",
        "n_step": 3,
        # Up to four rounds of refinement, until the evaluator says yes. An action without its yes has a small weight.
        "num_refinements": 4,
        "rejected_weight": 0.05,
        "judge_temperatures": {"critique": 1.0},
        "train_on_yes": "always",
        # Of three sampled next actions the backup uses the first that the evaluator approves, which is what the policy is
        # learning to do.
        "num_next_actions": 3,
        # Evaluator, refinement and backup are not trained, and would be forgotten as the weights change.
        "judge_weights": "initial",
        # The critic has facts to learn: five epochs, and half of the batch trains it alone. Most refined actions are guesses,
        # and their noise would slow it.
        "num_epochs": 5,
        "judged_fraction": 0.5,
        "policy_loss_coeff": 0.3,
        # Rare transitions are drawn often and count in full. So are the first episodes that succeed, among hundreds that fail:
        # by priorities alone most of their turns would never be drawn.
        "replay_buffer_config": {"alpha": 1.0, "beta": 0.0, "beta_final": 0.0, "success_share": 0.25},
    },
}


class NLACConfig(ReplayConfig, CriticConfig):
    """Configures Natural Language Actor-Critic.

    .. testcode::

        from rllib_nlac import NLACConfig

        config = (
            NLACConfig()
            .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
            .language(language_model="tiny")
            .training(lr=1e-3, episodes_per_iteration=64)
        )
        algorithm = config.build_algo()
        print(algorithm.train()["env_runners"]["success_rate"])
    """

    RANGES = {
        "num_futures": ranges.COUNT,
        "num_next_actions": ranges.COUNT,
        "num_refinements": ranges.WHOLE_NOT_NEGATIVE,
        "rejected_weight": ranges.SHARE,
        "judged_fraction": ranges.Range(0, 1, above=True),
    }
    NESTED_RANGES = {
        "evaluation_critic": {
            "states": ranges.Range(0, whole=True, optional=True),
            "futures": ranges.COUNT,
            "fixed_states": ranges.WHOLE_NOT_NEGATIVE,
            "branches": ranges.WHOLE_NOT_NEGATIVE,
        },
        "record": {
            "transitions": ranges.WHOLE_NOT_NEGATIVE,
            "tokens": ranges.WHOLE_NOT_NEGATIVE,
            "episodes": ranges.WHOLE_NOT_NEGATIVE,
        },
    }
    SETTINGS = {"evaluation_critic": ExaminationSettings, "record": RecordSettings}

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or NLAC)
        self.num_futures = 1
        self.num_next_actions = 1
        self.num_refinements = 1
        self.critic_input = "predicted"
        self.rejected_weight = 1.0
        self.judged_fraction = 1.0
        self.preset: str | None = None
        # evaluation(...) and reporting(...)
        self.evaluation_critic: dict[str, Any] = {}
        self.record: dict[str, Any] = {}

    @override(AlgorithmConfig)
    def training(  # type: ignore[override]
        self,
        *,
        preset: str | None = NotProvided,
        num_futures: int | None = NotProvided,
        num_next_actions: int | None = NotProvided,
        num_refinements: int | None = NotProvided,
        critic_input: str | None = NotProvided,
        rejected_weight: float | None = NotProvided,
        judged_fraction: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets NLAC's own hyper-parameters.

        An iteration draws ``train_batch_size_per_learner`` transitions for each learner. ``minibatch_size`` of them, of all
        learners together, make one gradient step, and each target and refinement is trained on ``num_epochs`` times. Gradient
        steps are cheap compared with generating their data.

        Args:
            preset: A name of ``PRESETS``, "paper" or "long_horizon". Its settings are applied first, in place of those of the
                preset before; any other key overrides them.
            num_futures: k, futures that the evaluator sees for each action.
            num_next_actions: Number of next actions a' sampled in s'. The backup uses the first one that the evaluator approves
                (1: the current policy's, as in the paper). Each target costs this many futures and critiques.
            num_refinements: m, rounds of critique and refinement; with 0 the policy imitates what the evaluator accepts.
            critic_input: What the evaluator reads. "predicted": futures, as in the paper. "backed_up": for a stored action its
                Bellman target, which contains the real reply, and for a refined action predicted futures. So the policy uses
                what an episode has shown before the critic has learned it.
            rejected_weight: Below 1 the evaluator judges refined actions, too. One that it rejects gets this weight in the
                policy's loss, relative to the rest of its minibatch; if it rejects all, all count in full. For models whose
                advice is weak. 0: the policy learns approved actions only. A small value: it still tries the advice. 1:
                refined actions are not judged, as in the paper.
            judged_fraction: Share of the sampled transitions whose actions are judged and refined. The others train the critic
                only, which costs a third of the generation or less. Below 1, replay priorities are those of L1 alone.

        Returns:
            This updated config.
        """
        arguments = locals()
        if isinstance(preset, str):
            self._take(preset)
        super().training(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def evaluation(self, *, evaluation_critic: dict[str, Any] | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets how evaluations examine the critic; also accepts all other keys of evaluation.

        Results are under ``evaluation/critic``, and the time they take under ``seconds/evaluation_critic``.

        Args:
            evaluation_critic: The fields of ``ExaminationSettings`` (states, futures, fixed_states, branches).

        Returns:
            This updated config.
        """
        arguments = locals()
        super().evaluation(**kwargs)
        return self._set(arguments)

    @override(AlgorithmConfig)
    def reporting(self, *, record: dict[str, Any] | None = NotProvided, **kwargs: Any) -> Self:  # type: ignore[override]
        """Sets what is recorded for ``rllib inspect`` and the report; also accepts RLlib's own keys.

        Args:
            record: The fields of ``RecordSettings`` (transitions, tokens, episodes).

        Returns:
            This updated config.
        """
        arguments = locals()
        super().reporting(**kwargs)
        return self._set(arguments)

    @property
    def examination(self) -> ExaminationSettings:
        """What evaluation asks the critic, the number of turns resolved."""
        asked = ExaminationSettings(**self.evaluation_critic)
        return asked.resolved(self.total_train_batch_size, self.evaluation_interval)

    @property
    def record_settings(self) -> RecordSettings:
        """How much is recorded."""
        return RecordSettings(**self.record)

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: dict[str, Any]) -> Self:  # type: ignore[override]
        """Takes a mapping, as of a YAML file: its preset first, whatever the order of its keys."""
        if (name := config_dict.get("preset")) is not None:
            self._take(name)
        return super().update_from_dict(config_dict)

    def _take(self, preset: str) -> None:
        if preset not in PRESETS:
            raise ValueError(f"config.preset: {unknown_key(preset, PRESETS, 'preset')}")
        if self.preset is not None:
            defaults = self.algo_class.get_default_config() if self.algo_class else type(self)()
            self._set({key: getattr(defaults, key) for key in PRESETS[self.preset]})
        self._set({**copy.deepcopy(PRESETS[preset]), "preset": preset})

    @override(AlgorithmConfig)
    def validate(self) -> None:
        super().validate()
        self._check_choice("critic_input", "predicted", "backed_up")
        variant = NLAC_AS_IT_IS if self.algo_class is None else self.algo_class.variant
        self._check(
            not variant.judges_new_actions or self.critic_input != "backed_up",
            "critic_input",
            "speaks of stored actions, and this algorithm judges new ones: set it to predicted",
        )
        asked = self.examination
        self._check(
            variant.predicts or not (asked.states or asked.fixed_states),
            "evaluation_critic",
            "asks for predictions, and this algorithm reads what came: leave it out, or set states and fixed_states to 0",
        )


class NLAC(ReplayAlgorithm):
    """Natural Language Actor-Critic (arXiv 2512.04601)."""

    stages: LanguageStages
    stages_class: type[LanguageStages] = LanguageStages
    variant: Variant = NLAC_AS_IT_IS  # what an ablation does otherwise

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> NLACConfig:
        return NLACConfig(algo_class=cls)

    @override(LanguageAlgorithm)
    def setup(self, config: Any) -> None:
        super().setup(config)
        self.stages = self.make_stages(self.stages_class, self.variant)
        self.recorder = Recorder(self, self.token_logprobs)
        self.examination = CriticExamination(self, self.recorder, partial(play_forks, self))
        self.watch.examine = self.examination

    @override(LanguageAlgorithm)
    def training_step(self) -> None:
        episodes = self.collect()  # stages 1 and 2: environments and engine make episodes
        sample = self.replay(episodes)  # 3: the buffer keeps them and draws transitions
        batch = self.ask_critic(sample)  # 4, 5 and 6: backup, critique and refinement share three waves
        if self.learn_from(batch):  # 7: two losses; each transition's become its priority
            self.sync_weights()  # 8: the new weights go to every engine

    def ask_critic(self, sample: ReplaySample) -> CriticisedBatch:
        """Bellman target and refined action of each transition."""
        started = time.perf_counter()
        with activity.stage("asking the critic"):
            batch = CriticisedBatch(sample, *self.stages.run(sample.transitions), self.weight_version)
        self.metrics.log_value((SECONDS, "waves"), time.perf_counter() - started, reduce="sum")
        log_stages(self.metrics, batch.report, batch.targets, batch.refinements)
        self.watch.check_stages(batch.report)
        self.recorder.begin(batch)
        return batch

    def learn_from(self, batch: CriticisedBatch) -> bool:
        """Takes one gradient step per minibatch, and gives the transitions their priorities.

        Returns:
            Whether there was anything to learn.
        """
        sample, refinements = batch.sample, batch.refinements
        sequences = self.sequences_of(sample, batch.targets, refinements)
        self.check_lessons(sequences)
        if sequences:
            losses = self.learn(sequences, count=len(sample.transitions))
            with timed(self.metrics, "replay", "keeping the priorities"):
                new = priorities(losses[CRITIC], self.policy_losses(losses[POLICY], refinements))
                if not self.variant.trains_critic:  # who was not judged taught nothing, and keeps its priority
                    new = np.where([r.reason == "not_judged" for r in refinements], np.nan, new)
                self.prioritise(sample, new)
            self.recorder.end(Learned(losses[CRITIC], losses[POLICY], new, sample.weights))
            log_replay(self.metrics, self.local_replay_buffer, sample, self.weight_version)
        else:
            self.recorder.end(None)
        return bool(sequences)

    def policy_losses(self, losses: np.ndarray, refinements: Sequence[Refinement]) -> np.ndarray:
        """L2 as the priorities take it: 0 where the policy has nothing to learn, NaN where that is not known.

        Args:
            losses: L2 of the transitions that the policy was trained on, NaN elsewhere; shape (N,).
            refinements: Refinements of the same transitions.

        Returns:
            Shape (N,). All are NaN where only part of the batch is judged and the critic's loss tells of all: otherwise judged
            transitions would be drawn more often by chance.
        """
        if self.config.judged_fraction < 1 and self.variant.trains_critic:
            return np.full(len(losses), np.nan)
        nothing = np.array([r.generation is None and not r.is_unknown for r in refinements], bool)
        return np.where(nothing, 0.0, losses)

    def sequences_of(
        self, sample: ReplaySample, targets: Sequence[BellmanTarget], refinements: Sequence[Refinement]
    ) -> list[TrainingSequence]:
        """At most one critic and one policy sequence per transition and epoch, importance-weighted.

        Each loss is the mean over its sequences of a minibatch, weighted as the refinements say, L2's times its coefficient.
        """
        sequences: list[TrainingSequence] = []
        size, count, epochs = self.config.minibatch_size, len(targets), self.config.num_epochs
        orders = [range(count), *(self.rng.permutation(count).tolist() for _ in range(epochs - 1))]
        steps = [order[start : start + size] for order in orders for start in range(0, count, size)]
        for minibatch, members in enumerate(steps):
            critic = [(i, g) for i in members if (g := targets[i].generation) and self.variant.trains_critic]
            policy = [(i, g) for i in members if (g := refinements[i].generation) and self.config.policy_loss_coeff]
            total = sum(refinements[item].weight for item, _ in policy)
            for item, answer in critic:
                weight = float(sample.weights[item]) / len(critic)
                origin = f"transition {sample.transitions[item].id}"
                ids = targets[item].prompt_ids
                sequences.append(TrainingSequence(ids, answer.token_ids, CRITIC, item, minibatch, weight, origin=origin))
            for item, answer in policy:
                # The prompt is the one that the engine saw when it sampled the stored action.
                ids = sample.transitions[item].generation.prompt_ids
                weight = self.config.policy_loss_coeff * float(sample.weights[item]) * refinements[item].weight / total
                origin = f"transition {sample.transitions[item].id}"
                sequences.append(TrainingSequence(ids, answer.token_ids, POLICY, item, minibatch, weight, origin=origin))
        return sequences

    def token_logprobs(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[Weights, Any]:
        """What each set of the learner's weights says of the tokens of answers."""
        return self._with_learners(
            lambda: on_every_learner(self.learner_group, lambda learner: learner.token_logprobs(prompts, answers))
        )[0]

    @override(LanguageAlgorithm)
    def own_state(self) -> dict[str, Any]:
        """Also the states that every evaluation asks about."""
        return {**super().own_state(), FIXED_STATES: self.examination.fixed}

    @override(LanguageAlgorithm)
    def set_own_state(self, state: dict[str, Any]) -> None:
        super().set_own_state(state)
        self.examination.fixed = tuple(state[FIXED_STATES])

    @override(LanguageAlgorithm)
    def cleanup(self) -> None:
        if getattr(self, "recorder", None) is not None:
            self.recorder.close()
        super().cleanup()
