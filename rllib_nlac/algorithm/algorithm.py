"""What NLAC and the baselines have in common: engines beside the learner, and one way around the loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_OPTIMIZER,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory

from rllib_nlac.activity import EPISODES, STEPS, activity
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.placement import check_cluster, trial_request
from rllib_nlac.checkpoints.checked import CheckedCheckpoints
from rllib_nlac.checkpoints.checkpoint import CheckpointError
from rllib_nlac.checkpoints.shards import is_divided, load_shards, save_shards, shard_facts
from rllib_nlac.checkpoints.storage import check_storage
from rllib_nlac.diagnostics.idle import IDLE, Stopwatch
from rllib_nlac.diagnostics.metrics import (
    SECONDS,
    compare_with_learner,
    log_collection,
    log_faults,
    log_sync,
    timed,
)
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.diagnostics.token_usage import IterationTokens
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.engine.make import make_engine
from rllib_nlac.engine.shared import NotFiniteError
from rllib_nlac.language.stages import LanguageStages
from rllib_nlac.language.variant import NLAC_AS_IT_IS, Variant, answered_by
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, shard_evenly, to_multi_agent_batch
from rllib_nlac.learner.group import (
    LearnerLost,
    LearnerSnapshots,
    is_lost,
    on_every_learner,
    watched,
    watched_update,
)
from rllib_nlac.learner.learner import SEQUENCE_LOSSES
from rllib_nlac.learner.stopped import StoppedSteps
from rllib_nlac.replay.dialogues import write_dialogues
from rllib_nlac.sampling.collector import Collector, check_age, end_unresponsive
from rllib_nlac.sync.sync import push_initial_weights, push_weights
from rllib_nlac.types import Weights

STATE = "nlac"  # key of our part of a checkpoint
STAGES_RNG = "stages_rng"  # key within it
Result = TypeVar("Result")
logger = logging.getLogger(__name__)
LEARNER = f"{COMPONENT_LEARNER_GROUP}/{COMPONENT_LEARNER}"
WEIGHTS = f"{LEARNER}/{COMPONENT_RL_MODULE}"  # alone, in a checkpoint
MAX_LEARNER_RESTARTS = 3  # in a row; more have a cause that a restart does not cure


class LanguageAlgorithm(CheckedCheckpoints):
    """Collects text episodes with vLLM, trains with DeepSpeed, and hands the new weights back.

    A baseline implements ``training_sequences``; an algorithm with another loop overrides ``training_step``.
    """

    config: Any
    learner_group: LearnerGroup
    stages: Any = None  # of an algorithm whose critic speaks
    engine: Any = None
    weight_version: int = 0
    _owes_sync = False  # whether the learners may have weights that no engine was given
    _is_stepping = False
    _absent_runners: Mapping[int, dict[str, Any]] = {}  # counters of remote runners that this configuration has not
    _recorded = -1, 0  # the iteration whose dialogues were written last, and how often
    nothing_to_learn = "neither a target nor a refined action came of it; see language_stages in the results"

    @override(Algorithm)
    def setup(self, config: LanguageAlgorithmConfig) -> None:
        self._own_gpu = check_cluster(super().default_resource_request, self.config)  # held as long as this refers to it
        self.stopped, self.notices = StoppedSteps(), Notices()
        self.watch = Watch(self)
        self.watch.setup(functools.partial(super().setup, config))
        if self.config.output:
            check_storage(Path(self.config.output).expanduser())  # later, a record that cannot be written is not worth the run
        self.rng = np.random.default_rng(self.config.seed or 0)
        self.chat = self.config.make_chat()
        if obstacle := self.chat.template.obstacle:
            text = f"each later turn's prompt is encoded from its text, which costs time and breaks nothing: {obstacle}"
            self.notices.update("template", text)
        if header := self.chat.template.header:
            text = f"its chat template ends a prompt without the header of an answer, so {header!r} is added, as in a dialogue"
            self.notices.update("header", text)
        self.prompts_for = functools.cache(self.config.prompts_for)
        activity.turn_to(f"starting the engine; an answer ends with {self.chat.ends}")
        self.engine = make_engine(self.config.engine_spec, self.chat)
        activity.turn_to(f"giving the engine its weights ({self.config.transfer})")
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None and group.local_env_runner is not None:
                group.local_env_runner.attach(self.engine)
        self.collector = self._make_collector()
        self.snapshots = LearnerSnapshots()
        self.num_learner_restarts = self._updates_since_snapshot = 0
        self.weight_version = 0
        self._take_snapshot()
        self.sync_weights()
        self.token_usage = IterationTokens(self.engine)  # engine actors have started by now

    def _make_collector(self) -> Collector | None:
        """None where the one EnvRunner is in this process."""
        config = self.config
        if not config.num_env_runners:
            return None
        shares: list[int | None] = [None] * config.num_env_runners
        if config.episodes_per_iteration is not None:
            shares = [share for i in range(config.num_env_runners) if (share := config.share_of_episodes(i + 1))]
        restore = functools.partial(self.restore_env_runners, self.env_runner_group)
        return Collector(self.env_runner_group, self.engine, restore, shares, config.max_staleness, config.sample_timeout_s)

    @override(Algorithm)
    def training_step(self) -> None:
        sequences = self.training_sequences(self.collect())
        self.check_lessons(sequences)
        if sequences:
            self.learn(sequences)
            self.sync_weights()

    def check_lessons(self, sequences: Sequence[object]) -> None:
        """Tells a person where an iteration has nothing to train on."""
        text = None if sequences else f"nothing was learned in iteration {self.iteration + 1}: {self.nothing_to_learn}"
        self.notices.update("nothing to learn", text)

    def training_sequences(self, episodes: list[SingleAgentEpisode]) -> list[TrainingSequence]:
        """What the learner trains on after these episodes."""
        raise NotImplementedError

    def make_stages(self, kind: type[LanguageStages] = LanguageStages, variant: Variant = NLAC_AS_IT_IS) -> LanguageStages:
        """The language stages of an algorithm with a critic in words.

        If a role uses the initial weights, the engine gets them here, before anything is learned or restored. With LoRA they
        are the base, which the engine has.
        """
        settings = self.config.stage_settings
        if Weights.INITIAL in answered_by(settings, variant).values() and self.config.lora is None:
            self._with_learners(lambda: push_initial_weights(self.learner_group, self.engine))
        return kind(self.engine, self.chat, self.prompts_for, settings, self.config.seed or 0, variant)

    def collect(self) -> list[SingleAgentEpisode]:
        """One iteration's episodes, played with the current weights."""
        with timed(self.metrics, "play", "playing", self.config.episodes_per_iteration or 0, EPISODES):
            if self.collector is None:
                episodes, results = self.env_runner.sample(), [self.env_runner.get_metrics()]
            else:
                episodes, results = self.collector.collect()
        self.metrics.aggregate(results, key=ENV_RUNNER_RESULTS)
        check_age(episodes, self.weight_version, self.collector.max_staleness if self.collector else 0)
        log_collection(self.metrics, episodes, self.weight_version)
        self._compare_with_learner(episodes)
        self._record_dialogues(episodes)
        return episodes

    def _compare_with_learner(self, episodes: Sequence[SingleAgentEpisode]) -> None:
        """Measures whether engine and learner agree, and how far the policy has moved from its base."""
        if not self.weight_version:
            return  # a model behind an endpoint has no learner
        version, sampling = self.weight_version, self.config.action_sampling
        with timed(self.metrics, "logprob_gap", "comparing engine and learner"):
            gap, moved = self._with_learners(lambda: compare_with_learner(self.learner_group, episodes, version, sampling))
        self.metrics.log_value("logprob_gap", gap, window=1)
        if moved is not None:
            self.metrics.log_value("kl_to_base", moved, window=1)

    def _record_dialogues(self, episodes: Sequence[SingleAgentEpisode]) -> None:
        """Writes episodes below ``output``, in a file that no other trial has, and no other call in this iteration."""
        if not self.config.output:
            return
        if self._recorded[0] != self.iteration:
            self._recorded = self.iteration, 0
        self._recorded = self.iteration, self._recorded[1] + 1
        trial = self.trial_id if self.trial_id != "default" else Path(self.logdir).name  # without Tune all have that one
        name = f"episodes_{trial}_{self.iteration + 1:08d}_{self._recorded[1]}.jsonl"
        write_dialogues(Path(self.config.output).expanduser() / name, episodes)

    def learn(self, sequences: Sequence[TrainingSequence], count: int = 0) -> dict[int, np.ndarray]:
        """One gradient step for each minibatch of the sequences.

        Args:
            sequences: What to train on.
            count: How many items they belong to.

        Returns:
            Each item's loss by role in its last gradient step, shape (count,); NaN where an item had no such sequence, infinite
            where its step was stopped because a loss or a gradient was not finite.

        Raises:
            NotFiniteError: The third step in a row was.
        """
        env_steps = count or len(sequences)
        shares = shard_evenly(sequences, max(self.config.num_learners, 1))
        steps = len({sequence.minibatch for sequence in sequences}) if self.learner_group.is_local else 0
        self._owes_sync = True
        with timed(self.metrics, "learner", "learning", steps, STEPS):
            results = self._with_learners(
                lambda: watched_update(
                    self.learner_group,
                    batch=to_multi_agent_batch(shares, env_steps=env_steps),
                    timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.env_steps_sampled()},
                ),
                changes_learners=True,
            )
        tables = [np.asarray(t) for result in results for t in result[DEFAULT_MODULE_ID].pop(SEQUENCE_LOSSES).peek()]
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        self.stopped.note(sequences, np.concatenate(tables))
        self.notices.update("stopped", self.stopped.notice)
        if self.stopped.too_many:
            raise NotFiniteError(
                f"{self.stopped.in_a_row} updates in a row were stopped, the last because "
                f"{self.stopped.last}. {self.watch.way_back()}"
            )
        return last_losses(tables, count)

    def sync_weights(self) -> None:
        """The learner's weights go to every engine, under a new version.

        Raises:
            NotFiniteError: They are not finite, and none was sent.
        """
        version, sets = self.weight_version + 1, self.config.learned_sets
        key = "sync" if self._is_stepping else "first_sync"  # what lies outside of an iteration is no part of its time
        with timed(self.metrics, key, activity.now.stage if not self.weight_version else "giving the engine the weights"):
            try:
                report = self._with_learners(lambda: push_weights(self.learner_group, self.engine, version, sets))
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}. {self.watch.way_back()}") from error
        self.weight_version, self._owes_sync = version, False
        log_sync(self.metrics, report)
        log_faults(self.metrics, self.engine, self.collector, self.num_learner_restarts)

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        self._is_stepping, stopwatch = True, Stopwatch(self.engine)
        try:
            self.flush_pending_sync()
            results = self.watch.step(super().step)
        finally:
            self._is_stepping = False
        results[IDLE] = stopwatch.shares(results.get(SECONDS, {}))
        return {**results, **self.token_usage.since_last()}

    def flush_pending_sync(self) -> None:
        """Makes good what an iteration left undone that was interrupted, as by Ctrl-C: engines get what was learned."""
        if self._owes_sync:
            self.sync_weights()

    def _with_learners(self, work: Callable[[], Result], changes_learners: bool = False) -> Result:
        """Does something with the learners; where one of them is lost or does not answer, from the last snapshot again."""
        for attempt in range(MAX_LEARNER_RESTARTS + 1):
            try:
                result = work()
                if changes_learners:
                    self._take_snapshot()
                return result
            except Exception as error:
                if attempt == MAX_LEARNER_RESTARTS or not self.config.learner_snapshot_interval:
                    raise
                if not isinstance(error, LearnerLost) and not is_lost(self.learner_group):
                    raise
                logger.warning("a learner was lost; starting again from the last snapshot: %s", error)
                self.learner_group = self.snapshots.rebuild(self.learner_group)
                self.num_learner_restarts += 1
        raise AssertionError("the last attempt returns or raises")

    def _take_snapshot(self) -> None:
        """Every ``learner_snapshot_interval`` updates, where learners have processes of their own."""
        interval = self.config.learner_snapshot_interval
        if interval and self.learner_group.is_remote:
            if self._updates_since_snapshot % interval == 0:
                self.snapshots.take(self.learner_group)
            self._updates_since_snapshot += 1

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Also has others play what runners owed that have been lost and are back."""
        restored = super().restore_env_runners(env_runner_group)
        if restored and env_runner_group is self.env_runner_group and self.collector is not None:
            self.collector.take_back(restored)
        return restored

    @override(Algorithm)
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's, which reads the learners' weights before it begins."""
        if not self._is_stepping:
            self.flush_pending_sync()

        def evaluate() -> dict[str, Any]:
            with watched(self.learner_group):
                return self.watch.evaluate(functools.partial(super(LanguageAlgorithm, self).evaluate, *args, **kwargs))

        return self._with_learners(evaluate)

    def env_steps_sampled(self) -> int:
        """Environment steps since the beginning of the run."""
        return int(self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0))

    def own_state(self) -> dict[str, Any]:
        """Our part of a checkpoint, beside RLlib's."""
        # Of the runners' own processes one may be lost just now.
        runners = dict(self.collector.runner_states if self.collector is not None else self._absent_runners)
        if self.env_runner is not None:
            runners[self.env_runner.worker_index] = self.env_runner.get_state(not_components=COMPONENT_RL_MODULE)
        stages = {} if self.stages is None else {STAGES_RNG: self.stages.rng.bit_generator.state}
        return {
            **stages,
            "weight_version": self.weight_version,
            "rng": self.rng.bit_generator.state,
            "env_runners": runners,
        }

    def set_own_state(self, state: dict[str, Any]) -> None:
        """Restores what ``own_state`` gave."""
        self.weight_version = state["weight_version"]
        self.rng.bit_generator.state = state["rng"]
        if self.stages is not None:
            self.stages.rng.bit_generator.state = state[STAGES_RNG]
        runners = dict(state["env_runners"])
        if self.env_runner is not None:
            self.env_runner.set_state(runners.pop(self.env_runner.worker_index, {}))
        if self.collector is not None:
            self.collector.forget(runners)
        else:
            self._absent_runners = runners

    @override(Algorithm)
    def get_weights(self, policies: Any = None) -> dict[str, Any]:
        """As RLlib's; whole, also where ZeRO 3 divides them."""
        return self._of_whole_weights(lambda: super(LanguageAlgorithm, self).get_weights(policies))

    @override(Algorithm)
    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """As RLlib's; the weights whole, also where ZeRO 3 divides them."""

        def state() -> dict[str, Any]:
            return super(LanguageAlgorithm, self).get_state(components, not_components=not_components, **kwargs)

        asks = self._check_component(COMPONENT_LEARNER_GROUP, components, not_components)
        return {**(self._of_whole_weights(state) if asks else state()), STATE: self.own_state()}

    def _of_whole_weights(self, read: Callable[[], Result]) -> Result:
        """Reads from the first learner what all of them must have put together before."""

        def prepared() -> Result:
            with watched(self.learner_group):
                on_every_learner(self.learner_group, _prepare_for_saving)
                return read()

        return self._with_learners(prepared)

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        """As RLlib's.

        Raises:
            CheckpointError: The state lacks optimizers that are divided among learners; or a learner could not take it.
        """
        learner = state.get(COMPONENT_LEARNER_GROUP, {}).get(COMPONENT_LEARNER, {})
        if COMPONENT_OPTIMIZER in learner and is_divided(self.config):
            raise CheckpointError(
                "get_state() has no optimizer where it is divided among learners (zero_optimization), so set_state() cannot "
                "restore it: use save_to_path() and restore_from_path()"
            )
        if learner:
            self._set_learners_state(state)
        else:
            super().set_state(state)
        if STATE in state:
            self.set_own_state(state[STATE])
        self.stopped, self._owes_sync = StoppedSteps(), True

    def _set_learners_state(self, state: dict[str, Any]) -> None:
        try:
            with watched(self.learner_group):
                super().set_state(state)
                on_every_learner(self.learner_group, _nothing)
        except LearnerLost as error:  # RLlib puts learners aside that raise; a snapshot would bring back what they had before
            raise CheckpointError(
                "a learner could not take this state; its process's log says why. The algorithm is half restored and must not "
                "go on"
            ) from error
        self._updates_since_snapshot = 0
        self._take_snapshot()

    @override(CheckedCheckpoints)
    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """As RLlib's; see ``CheckedCheckpoints``."""
        self.flush_pending_sync()

        def save() -> str:
            with watched(self.learner_group):
                on_every_learner(self.learner_group, _prepare_for_saving)
                return super(LanguageAlgorithm, self).save_to_path(path, **kwargs)

        self.watch.last_checkpoint = self._with_learners(save)
        return self.watch.last_checkpoint

    @override(CheckedCheckpoints)
    def save(self, *args: Any, **kwargs: Any) -> Any:
        return self.watch.save(functools.partial(super().save, *args, **kwargs))

    @override(CheckedCheckpoints)
    def save_parts(self, folder: Path) -> None:
        save_shards(self.learner_group, folder)

    @override(CheckedCheckpoints)
    def load_parts(self, folder: Path) -> None:
        load_shards(self.learner_group, folder)

    @override(CheckedCheckpoints)
    def facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of this algorithm."""
        return {**super().facts(), "shards": shard_facts(self.config), "weight_version": self.weight_version}

    @override(CheckedCheckpoints)
    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, or with ``component`` a part of one; see ``CheckedCheckpoints``.

        Raises:
            CheckpointError: It is damaged or does not fit, or optimizers that are divided among learners are not part of it.
        """
        if kwargs.get("component") in (COMPONENT_LEARNER_GROUP, LEARNER) and is_divided(self.config):
            raise CheckpointError(
                f"{path}: each learner's part of the optimizer (zero_optimization) is kept beside this component. Restore the "
                f"whole checkpoint, or the weights alone: component={WEIGHTS!r}"
            )

        def restore() -> None:
            with watched(self.learner_group):
                super(LanguageAlgorithm, self).restore_from_path(path, **kwargs)
                component = kwargs.get("component")
                whole = component is None
                if component is not None and component.startswith(WEIGHTS):
                    on_every_learner(self.learner_group, lambda learner: learner.take_over())
                if whole and None in on_every_learner(self.learner_group, lambda learner: learner.restored_from):
                    raise LearnerLost("a learner has not read it")
                self._updates_since_snapshot = 0
                self._take_snapshot()

        try:
            self._with_learners(restore)
        except (LearnerLost, IndexError) as error:  # RLlib puts learners aside that raise, and then looks for the first of none
            raise CheckpointError(
                f"{path}: a learner could not be restored; its process's log says why. The algorithm is half restored and must "
                "not go on"
            ) from error
        self.stopped = StoppedSteps()
        if kwargs.get("component") is None:
            self.watch.last_checkpoint = str(path)
        if self.collector is not None:
            self.collector.forget()
        # The engines still serve the weights that they were started with.
        self.weight_version -= 1
        self.sync_weights()

    @classmethod
    @override(Algorithm)
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """RLlib's request and a bundle for each engine actor; refused where the cluster has no room for it."""
        resolved = cls.get_default_config().update_from_dict(config)
        return trial_request(super().default_resource_request(config), resolved)

    @override(Algorithm)
    def cleanup(self) -> None:
        # A setup that failed may have made neither of them.
        for group in (getattr(self, "env_runner_group", None), getattr(self, "eval_env_runner_group", None)):
            if group is not None:
                end_unresponsive(group)
        if self.engine is not None:
            self.engine.stop()
        activity.withdraw()
        super().cleanup()


def last_losses(tables: Sequence[np.ndarray], count: int) -> dict[int, np.ndarray]:
    """Each item's loss by role in its last gradient step.

    Args:
        tables: One table for each learner, with rows of item, role, gradient step, loss and norm of the step's gradient. With
            several epochs the steps of an item may be with different learners.
        count: How many items there are; of any other nothing is kept.

    Returns:
        By role, shape (count,); NaN where an item had no such sequence, infinite where no step of its was made, because the
        gradient was not finite.
    """
    losses = {CRITIC: np.full(count, np.nan), POLICY: np.full(count, np.nan)}
    rows = np.concatenate([table.reshape(-1, 5) for table in tables])
    for item, role, _, loss, norm in rows[np.argsort(rows[:, 2], kind="stable")]:
        own = losses.get(int(role))
        if own is not None and 0 <= item < count and (np.isfinite(norm) or np.isnan(own[int(item)])):
            own[int(item)] = loss if np.isfinite(norm) else np.inf
    return losses


def _nothing(learner: Any) -> None:
    """Asks for nothing but an answer."""


def _prepare_for_saving(learner: Any) -> None:
    learner.prepare_for_saving()
