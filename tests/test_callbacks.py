"""RLlib's callbacks fire as they do under its own algorithms."""

from __future__ import annotations

from collections import Counter

import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

NAMES = [name for name in dir(RLlibCallback) if name.startswith("on_")]
fired: list[tuple[str, dict]] = []


class Recorder(RLlibCallback):
    """Writes down every call."""


def _recording(name: str):
    return lambda self, **kwargs: fired.append((name, kwargs))


for _name in NAMES:
    setattr(Recorder, _name, _recording(_name))


def run(config, tmp_path) -> list[tuple[str, dict]]:
    fired.clear()
    algorithm = config.callbacks(Recorder).build_algo()
    try:
        algorithm.train()
        calls = list(fired)
        algorithm.save(str(tmp_path / "checkpoint"))
        fired.clear()
        algorithm.restore(str(tmp_path / "checkpoint"))
        calls += [call for call in fired if call[0] == "on_checkpoint_loaded"]
    finally:
        algorithm.stop()
    return calls


@pytest.fixture()
def small(config):
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=16, minibatch_size=16)
    config.num_envs_per_env_runner = 4
    return config.evaluation(evaluation_interval=1, evaluation_duration=6, evaluate_before_training=False)


def test_the_same_callbacks_as_under_ppo(small, ray_session, lent_engine, tmp_path):
    ppo = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    ppo.training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1)
    ppo.evaluation(evaluation_interval=1, evaluation_duration=2)
    theirs, ours = run(ppo, tmp_path / "ppo"), run(small, tmp_path / "nlac")
    assert {name for name, _ in ours} == {name for name, _ in theirs}
    arguments = {name: set(kwargs) for name, kwargs in theirs}
    for name, kwargs in ours:
        assert set(kwargs) == arguments[name], name


def test_every_episode_is_told_from_its_beginning_to_its_end(small, ray_session, lent_engine, tmp_path):
    calls = run(small, tmp_path)
    count = Counter(name for name, _ in calls)
    assert count["on_episode_created"] == count["on_episode_start"] == count["on_episode_end"] == 8 + 6
    samples = [kwargs["samples"] for name, kwargs in calls if name == "on_sample_end"]
    assert [len(episodes) for episodes in samples] == [8, 6]
    assert count["on_episode_step"] == sum(len(episode) for episodes in samples for episode in episodes)
    of_one = [name for name, kwargs in calls if kwargs.get("episode") is samples[0][0]]
    assert of_one == ["on_episode_created", "on_episode_start", *["on_episode_step"] * len(samples[0][0]), "on_episode_end"]
    assert (count["on_algorithm_init"], count["on_train_result"], count["on_checkpoint_loaded"]) == (1, 1, 1)
    assert count["on_evaluate_start"] == count["on_evaluate_end"] == 1
