"""Two EnvRunners, two learners and two engines: right together, and each of them lost or stopped in the middle of work.

``python -m research.faults`` does the same at random moments.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray
from fault_runs import EPISODES, processes, small_config, verdict, wrong_weights

from rllib_nlac.engine.protocol import EngineError, WeightsMissing
from rllib_nlac.sampling import collector
from rllib_nlac.sampling.collector import CollectionError
from rllib_nlac.types import Request, Weights


@pytest.fixture(scope="module")
def algorithm(ray_session):
    config = small_config().evaluation(evaluation_num_env_runners=1, evaluation_interval=100, evaluation_duration=16)
    config.deepspeed(deepspeed_config={"zero_optimization": {"stage": 2}})
    algorithm = config.build_algo()
    yield algorithm
    # A runner that is stopped for good does not keep the run from ending.
    victim = processes(algorithm)["EnvRunner"][0]
    os.kill(victim, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "STOP_S", 3.0)
        algorithm.stop()
    assert time.monotonic() - started < 120


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


@pytest.mark.parametrize(
    "kind", [pytest.param("EnvRunner", marks=pytest.mark.long), pytest.param("engine", marks=pytest.mark.long), "learner"]
)
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


@pytest.mark.long
def test_an_evaluation_runner_that_was_killed_while_idle_plays(algorithm, first):
    before = algorithm.evaluate()["env_runners"]
    os.kill(processes(algorithm)["evaluation EnvRunner"][0], signal.SIGKILL)
    after = algorithm.evaluate()["env_runners"]
    assert after["num_tasks"] == 16 and after["success_rate"] == before["success_rate"]


@pytest.mark.long
def test_engines_lost_together_serve_the_current_weights_or_refuse(algorithm, first):
    """Also to whoever asks first; nobody else knows the weights, for there is nobody else."""
    algorithm.sync_weights()
    engines, victims = algorithm.engine, processes(algorithm)["engine"]
    restarts = engines.num_restarts
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for weights in Weights.TARGET, Weights.POLICY:
        ask, numbers = [Request((3, 4, 5), 2, weights=weights)], {weights: engines._announced[weights].number}
        with pytest.raises(WeightsMissing, match=f"has started again without the {weights} weights"):
            ray.get(engines._actors[0].generate.remote(ask, numbers))
    assert not wrong_weights(algorithm)
    assert engines.num_restarts == restarts + 2


def test_an_env_runner_and_an_engine_killed_together(algorithm, first):
    before = int(algorithm.metrics.peek(("env_runners", "num_episodes_lifetime")))
    running = processes(algorithm)
    for kind in ("EnvRunner", "engine"):
        threading.Timer(0.3, os.kill, (running[kind][1], signal.SIGKILL)).start()
    for iteration in range(2):
        assert not verdict(algorithm.train(), before + iteration * EPISODES) and not wrong_weights(algorithm)


def test_an_environment_that_ends_its_process_costs_its_runner(algorithm, first):
    def spoil(runner):
        runner.player.slots[0].env.step = lambda action: os._exit(3)

    before = int(algorithm.metrics.peek(("env_runners", "num_episodes_lifetime")))
    algorithm.env_runner_group.foreach_env_runner(spoil, local_env_runner=False, remote_worker_ids=[1])
    lost = algorithm.collector.num_lost_shares
    assert not verdict(algorithm.train(), before)
    assert algorithm.collector.num_lost_shares == lost + 1


@pytest.mark.long
def test_a_learner_that_is_stopped_counts_as_lost(algorithm, first, caplog):
    before = int(algorithm.metrics.peek(("env_runners", "num_episodes_lifetime")))
    victim = processes(algorithm)["learner"][1]
    restarts, group = algorithm.num_learner_restarts, algorithm.learner_group
    group.config.learner_timeout_s = 15.0
    os.kill(victim, signal.SIGSTOP)
    result = algorithm.train()
    algorithm.learner_group.config.learner_timeout_s = 300.0
    assert not verdict(result, before) and not wrong_weights(algorithm)
    assert algorithm.num_learner_restarts == restarts + 1 and algorithm.learner_group is not group
    assert f"learner 1 (pid {victim}) did not answer within 15 s (learner_timeout_s)" in caplog.text
    with pytest.raises(ProcessLookupError):  # its memory is free again
        for _ in range(100):
            os.kill(victim, 0)
            time.sleep(0.1)


def test_collecting_ahead_is_bounded_and_reported(algorithm, first):
    algorithm.collector.max_staleness = 1
    try:
        ages = [int(algorithm.train()["collection"]["staleness_max"]) for _ in range(3)]
    finally:
        algorithm.collector.max_staleness = 0
        algorithm.collector.forget()  # what was asked ahead
    assert ages == [0, 1, 1]


def test_an_error_of_an_environment_ends_the_run_with_its_text(algorithm, first):
    group = algorithm.env_runner_group

    def spoil(runner):
        for slot in runner.player.slots:
            slot.env.reset = lambda **arguments: 1 / 0
        runner.player.make_env = lambda index: runner.player.slots[index].env

    group.foreach_env_runner(spoil, local_env_runner=False)
    with pytest.raises(
        CollectionError, match=r"EnvRunner \d \(pid \d+\) failed: RuntimeError: .*failed \d+ times in a row.*ZeroDivisionError"
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
