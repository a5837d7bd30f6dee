"""Two EnvRunners, two learners and two engines: right together, and each of them lost with SIGKILL in the middle of work.

``python -m benchmarks.faults`` does the same thirty times at random moments.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray

from benchmarks.faults import EPISODES, processes, small_config, verdict
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.sampling.engine import EngineError


@pytest.fixture(scope="module")
def algorithm(ray_session):
    config = small_config().evaluation(evaluation_num_env_runners=1, evaluation_interval=100, evaluation_duration=16)
    config.deepspeed(zero_stage=2)
    algorithm = config.build_algo()
    yield algorithm
    algorithm.stop()


@pytest.fixture(scope="module")
def first(algorithm) -> dict:
    return algorithm.train()


def test_all_together_are_right(algorithm, first):
    """All episodes, one update of both learners, and engines that serve it."""
    second = algorithm.train()
    assert not verdict(first, 0) and not verdict(second, EPISODES)
    names = [episode.id_ for episode in algorithm.local_replay_buffer.episodes]
    assert len(set(names)) == 2 * EPISODES and {name[:4] for name in names} == {"0001", "0002"}
    assert first["collection"]["staleness_max"] == 0


def test_separate_evaluation_runners_play_the_same_tasks_as_one_in_process(algorithm, first):
    remote = algorithm.evaluate()["env_runners"]
    local = algorithm.env_runner.sample_tasks(range(16))
    assert remote["num_tasks"] == 16
    assert remote["success_rate"] == pytest.approx(sum(episode.get_return() for episode in local) / 16)


@pytest.mark.parametrize("kind", ["EnvRunner", "engine", "learner"])
def test_a_killed_process_is_made_good(algorithm, first, kind):
    before = int(algorithm.metrics.peek(("env_runners", "num_episodes_lifetime")))
    faults = "num_remote_worker_restarts" if kind == "EnvRunner" else f"num_{kind}_restarts"
    victim = processes(algorithm)[kind][0]
    # In the middle of its own work: the first two while episodes are played, a learner while it makes its update.
    if kind == "learner":
        update = algorithm.learner_group.update
        algorithm.learner_group.update = lambda **arguments: (os.kill(victim, signal.SIGKILL), update(**arguments))[1]
    else:
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    # RLlib restarts an EnvRunner beside the training: its return may be counted some iterations later.
    for iteration in range(20):
        result = algorithm.train()
        assert not verdict(result, before + iteration * EPISODES)
        counted = {**result["faults"], **result["fault_tolerance"]}
        if iteration > 0 and counted[faults]:
            break
        time.sleep(0.5)
    assert counted[faults] == 1
    assert algorithm.local_replay_buffer.get_num_episodes() == before + (iteration + 1) * EPISODES
    assert victim not in processes(algorithm)[kind]


def test_collecting_ahead_is_bounded_and_reported(algorithm, first):
    algorithm.collector._max_staleness = algorithm.config.max_staleness = 1
    try:
        ages = [int(algorithm.train()["collection"]["staleness_max"]) for _ in range(3)]
    finally:
        algorithm.collector._max_staleness = algorithm.config.max_staleness = 0
        algorithm.collector.forget()  # what was asked ahead
    assert ages == [0, 1, 1]


def test_an_error_of_an_environment_ends_the_run_with_its_text(algorithm, first):
    group = algorithm.env_runner_group

    def spoil(runner):
        for slot in runner._slots:
            slot.env.reset = lambda **arguments: 1 / 0
        runner._create_env = lambda index: runner._slots[index].env

    group.foreach_env_runner(spoil, local_env_runner=False)
    with pytest.raises(
        CollectionError, match=r"EnvRunner \d \(pid \d+\) failed: RuntimeError: .*failed 20 times in a row.*ZeroDivisionError"
    ):
        algorithm.train()


def test_a_stalled_engine_ends_in_a_timeout_with_the_cause(algorithm, first):
    (pid, _) = processes(algorithm)["engine"]
    algorithm.engine._timeout_s = 3.0
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"engine 0 \(pid \d+\) did not answer set_weights\(\) within 3 s"):
            algorithm.sync_weights()
        assert time.monotonic() - started < 30
    finally:
        os.kill(pid, signal.SIGCONT)
        algorithm.engine._timeout_s = 300.0
