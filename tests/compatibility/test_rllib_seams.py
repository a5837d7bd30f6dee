"""RLlib's private seams. When one of these fails after an upgrade, the named module needs a look, and only that one."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import ray
from micro import save_micro_model
from ray.actor import ActorMethod
from ray.experimental import internal_kv
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.learner_group import LearnerGroup, RLlibBackendExecutor
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.actor_manager import CallResult, FaultTolerantActorManager
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer
from ray.train._internal import backend_executor
from ray.train._internal.storage import StorageContext
from ray.train._internal.worker_group import WorkerGroup
from ray.tune import CheckpointConfig
from ray.tune.experiment import Experiment, Trial
from ray.tune.trainable import Trainable

import rllib_nlac
from rllib_nlac import NLACConfig
from rllib_nlac.checkpoints.storage import TUNES_LOGGERS
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.sampling.means import WholeMean, hand_on_whole_means


def episode(length: int = 3) -> SingleAgentEpisode:
    result = SingleAgentEpisode()
    result.add_env_reset("o0", {})
    for t in range(length):
        result.add_env_step(f"o{t + 1}", f"a{t}", 0.0, {}, terminated=t == length - 1, extra_model_outputs={"x": (t,)})
    return result


class TestReplayBuffer:
    """``replay/buffer.py``: the sum tree of RLlib's buffer and its index from tree to (episode, t)."""

    def test_attributes(self):
        buffer = PrioritizedEpisodeReplayBuffer(capacity=8, alpha=1.0)
        buffer.add([episode()])
        assert buffer._num_timesteps == 3 and buffer._num_episodes_evicted == 0
        assert buffer._sum_segment.sum() == 3.0 and buffer._min_segment.min() == 1.0
        node = buffer._sum_segment.find_prefixsum_idx(1.5)
        assert buffer._indices[buffer._tree_idx_to_sample_idx[node]][:2] == (0, 1)

    def test_update_priorities_uses_the_last_sampled_indices_and_alpha(self):
        buffer = PrioritizedEpisodeReplayBuffer(capacity=8, alpha=0.5)
        buffer.add([episode()])
        buffer._last_sampled_indices = [1]
        buffer.update_priorities([4.0])
        assert buffer._sum_segment[1] == 2.0 and buffer._max_priority == 4.0

    def test_adding_nothing_evicts_down_to_the_capacity(self):
        buffer = PrioritizedEpisodeReplayBuffer(capacity=100, alpha=1.0)
        for _ in range(4):
            buffer.add([episode()])
        buffer.capacity = 7
        buffer.add([])
        assert buffer._num_timesteps == 6 and len(buffer.episodes) == 2


class TestEpisodes:
    """``sampling/env_runner.py``: episodes keep strings and objects as they are, as long as they stay lists."""

    def test_strings_and_extra_outputs_stay_whole(self):
        whole = episode()
        assert whole.get_observations() == ["o0", "o1", "o2", "o3"] and whole.get_actions() == ["a0", "a1", "a2"]
        assert whole.get_extra_model_outputs("x") == [(0,), (1,), (2,)] and whole.get_extra_model_outputs("x", 1) == (1,)


class TestLearner:
    """``learner/learner.py``: one hook runs the gradient step, another wraps the module for torch's own DDP."""

    def test_update_calls_the_hook(self):
        assert "self._update(" in inspect.getsource(Learner.update)
        assert list(inspect.signature(TorchLearner._update).parameters)[:2] == ["self", "batch"]
        assert "_make_modules_ddp_if_necessary" in inspect.getsource(TorchLearner.build)

    def test_state_hooks(self):
        source = inspect.getsource(Learner.get_state) + inspect.getsource(Learner.set_state)
        assert "_get_optimizer_state" in source and "_set_optimizer_state" in source


class TestLearnerGroup:
    """``learner/group.py``: the learners of a group, one by one, and what makes another group like it."""

    def test_a_learner_in_this_process(self, tmp_path):
        config = NLACConfig().language(language_model=save_micro_model(tmp_path / "model"))
        spec = config.get_multi_rl_module_spec(spaces={"default_policy": (TextSpace(), TextSpace())})
        group = config.build_learner_group(rl_module_spec=spec)
        assert group.is_local and len(group) == 0 and group._workers is None and group._module_spec is spec
        assert isinstance(group._learner, Learner) and group._learner._learner_index == 0
        assert group.config.learner_timeout_s > 0 and group._is_shut_down is False
        group.shutdown()
        assert group._is_shut_down is True

    def test_learners_in_other_processes(self):
        source = inspect.getsource(LearnerGroup.__init__)
        assert "self._workers = [w.actor for w in backend_executor.worker_group.workers]" in source
        assert "for idx, worker in enumerate(self._workers)" in source and "learner_index=idx" in source
        assert "self._learner_index = learner_index" in inspect.getsource(Learner._set_learner_index_and_placement_group)
        assert "train_cls=learner_class" in source and list(inspect.signature(Learner.apply).parameters)[:2] == ["self", "func"]
        assert {"ok", "get", "actor_id"} <= {*dir(CallResult), *inspect.signature(CallResult).parameters}

    def test_learners_are_started_without_the_name_of_a_bundle(self):
        """``learner/placed.py`` adds it to the one call that starts them, in the class that RLlib looks up there."""
        assert (
            "self._remote_cls.options(\n                placement_group=self._placement_group\n            )"
            in inspect.getsource(WorkerGroup.add_workers)
        )
        assert "self.worker_group = WorkerGroup(" in inspect.getsource(backend_executor.BackendExecutor.start)
        assert issubclass(RLlibBackendExecutor, backend_executor.BackendExecutor) and "start" not in vars(RLlibBackendExecutor)

    def test_env_runners_take_the_bundles_behind_the_trials_own(self):
        assert "self._pg_offset + worker_index" in inspect.getsource(EnvRunnerGroup._make_worker)
        source = inspect.getsource(Algorithm.default_resource_request)
        order = ("[main_process]", "+ env_runner_bundles", "+ eval_env_runner_bundles", "+ learner_bundles")
        places = [source.index(part) for part in order]
        assert places == sorted(places)

    def test_no_other_file_knows_their_private_names(self):
        """What the others need they ask ``learner/group.py`` for."""
        names = re.compile(r"group\._(learner|workers|module_spec|is_shut_down)\b|(?<!self)\._learner_index\b")
        package = Path(rllib_nlac.__file__).parent
        users = {str(path.relative_to(package)) for path in package.rglob("*.py") if names.search(path.read_text())}
        assert users == {"learner/group.py"}

    def test_a_group_that_was_ended_is_not_shut_down_again(self):
        assert "if not self._is_shut_down:" in inspect.getsource(LearnerGroup.__del__)


class TestAlgorithm:
    """``nlac.py`` and ``sampling/env_runner.py``."""

    def test_runners_can_be_given_a_function_each(self):
        parameters = inspect.signature(EnvRunnerGroup.foreach_env_runner).parameters
        assert {"func", "remote_worker_ids", "local_env_runner", "timeout_seconds"} <= set(parameters)
        assert "List[" in str(parameters["func"].annotation)

    def test_runners_that_hang_can_be_taken_out(self):
        """``sampling/collector.py`` does so before RLlib stops them all, without a limit."""
        parameters = inspect.signature(FaultTolerantActorManager.foreach_actor).parameters
        assert {"func", "healthy_only", "timeout_seconds"} <= set(parameters)
        assert list(inspect.signature(FaultTolerantActorManager.remove_actor).parameters) == ["self", "actor_id"]
        assert "self._worker_manager = FaultTolerantActorManager(" in inspect.getsource(EnvRunnerGroup.__init__)
        assert "timeout_seconds" not in inspect.getsource(EnvRunnerGroup.stop)

    def test_asynchronous_algorithms_hand_weights_over_by_a_server(self):
        assert "env_runner._env_runner_state_server = server" in inspect.getsource(IMPALA.setup)
        source = inspect.getsource(SingleAgentEnvRunner.sample)
        assert "pull_if_newer.remote(" in source and "self.set_state(_server_state)" in source

    def test_the_replay_buffer_is_made_by_a_hook(self):
        assert "self._create_local_replay_buffer_if_necessary(" in inspect.getsource(Algorithm.setup)

    def test_means_are_made_by_the_class_that_a_logger_looks_up_and_hand_on_what_they_hold(self):
        """``sampling/means.py``; RLlib's own would give (1 + 4) / 2 here."""
        loggers = [MetricsLogger(root=root) for root in (False, False, True)]
        *runners, whole = loggers
        for runner, values in zip(runners, ([1.0], [4.0, 4.0, 4.0]), strict=True):
            hand_on_whole_means(runner)
            for value in values:
                runner.log_value("x", value, reduce="mean")
        whole.aggregate([runner.reduce() for runner in runners])
        assert whole.peek("x") == 3.25
        assert runners[0].stats["x"].values == [] and isinstance(runners[0].stats["x"], WholeMean)

    def test_runners_are_given_the_env_creator(self):
        assert "env_creator=env_creator" in inspect.getsource(EnvRunnerGroup._make_worker)

    def test_environments_are_found_by_name(self):
        name, creator = Algorithm._get_env_id_and_creator("TwentyQuestions", _Config())
        assert name == "TwentyQuestions" and callable(creator)


class TestActivity:
    """``activity.py``: a process says in Ray's key-value store what it does, and the driver reads it."""

    def test_the_store_is_called_by_key_and_value(self):
        assert list(inspect.signature(internal_kv._internal_kv_put).parameters)[:2] == ["key", "value"]
        assert next(iter(inspect.signature(internal_kv._internal_kv_get).parameters)) == "key"


class TestCheckpoints:
    """``checkpoints/checked.py``: what RLlib and Tune call, and where Tune saves."""

    def test_a_new_algorithm_is_restored_by_its_own_method(self):
        """So a restore is verified, also where ``from_checkpoint`` is called on RLlib's own class."""
        assert "obj.restore_from_path(path, filesystem=filesystem" in inspect.getsource(Checkpointable.from_checkpoint)
        assert "super().from_checkpoint(path, filesystem=filesystem" in inspect.getsource(Algorithm.from_checkpoint)
        assert "self.restore_from_path(checkpoint_dir)" in inspect.getsource(Algorithm.load_checkpoint)
        assert Algorithm.from_checkpoint.__func__.__module__ == Algorithm.__module__

    def test_an_actors_class_says_which_class_it_was_derived_from(self):
        """A checkpoint names that one."""
        derived = ray.remote(PPO).__ray_metadata__.modified_class
        assert derived is not PPO and derived.__ray_actor_class__ is PPO

    def test_tunes_way_in_and_out(self):
        source = inspect.getsource(Trainable.restore)
        assert "_DICT_CHECKPOINT_FILE_NAME" in source and "self.load_checkpoint(checkpoint_dir)" in source
        assert "self._storage = storage" in inspect.getsource(Trainable.__init__)
        assert {"checkpoint_fs_path", "trial_fs_path", "storage_filesystem"} <= {
            *dir(StorageContext),
            *_assigned(StorageContext),
        }

    def test_what_a_trial_was_begun_with_is_part_of_its_state(self):
        """``--resume`` compares it with what is asked for."""
        began = {
            "config": {"lr": 1},
            "restore_path": "/one",
            "stopping_criterion": {"training_iteration": 2},
            "max_failures": 3,
        }
        checkpoints = CheckpointConfig(num_to_keep=2, checkpoint_frequency=4)
        trial = Trial(Experiment.get_trainable_name(PPO), stub=True, checkpoint_config=checkpoints, **began)
        state, (_, metadata) = trial.__getstate__(), trial.get_json_state()
        assert {key: state[key] for key in began} == began and state["trainable_name"] == "PPO"
        other = Trial("PPO", stub=True)
        other.restore_run_metadata(metadata)
        assert other.run_metadata.checkpoint_manager.checkpoint_config == checkpoints

    def test_the_loggers_that_print_tunes_storage_errors(self):
        for name in TUNES_LOGGERS:
            assert importlib.import_module(name).logger.name == name


def _assigned(kind: type) -> set[str]:
    return set(re.findall(r"self\.(\w+)", inspect.getsource(kind.__init__)))


class _Config:
    env = "TwentyQuestions"
    disable_env_checking = True

    def __getattr__(self, name):
        return None

    def get(self, name, default=None):
        return default


def test_a_call_of_an_actor_can_go_without_rays_repetitions():
    """Weights that a lost engine did not receive are not sent again to the one that starts in its place."""
    assert "max_task_retries" in inspect.signature(ActorMethod._remote).parameters
    assert "no_restart" in inspect.signature(ray.kill).parameters
