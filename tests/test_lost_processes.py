"""What is asked of whom when processes are lost, without any process: rounds, shares, limits of time, ages."""

from __future__ import annotations

import os
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from faulty import Faulty
from numbered_episodes import episode as numbered_episode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from scripted_engine import ScriptedEngine

from rllib_nlac.activity import EPISODES, activity
from rllib_nlac.algorithm import evaluation
from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.algorithm.evaluation import _TaskRounds, _tasks
from rllib_nlac.baselines.stock_runner import StockTextEnvRunner
from rllib_nlac.engine.protocol import EngineError
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import step_outputs, task_of
from rllib_nlac.learner.group import LearnerLost
from rllib_nlac.sampling.collector import MAX_LOSSES, Answer, CollectionError, CollectionRound, Collector, check_age
from rllib_nlac.sampling.env_runner import NEXT_EPISODE, TextEnvRunner
from rllib_nlac.types import Generation, Weights


class Group:
    """Runners that answer at once, or are lost with what they owe; RLlib's names."""

    def __init__(self, make, size: int, fatal=lambda runner, index, asked: False):
        self.make, self.fatal = make, fatal
        self.runners = {index + 1: make(index + 1) for index in range(size)}
        self.ready, self.lost, self.asked = [], set(), 0

    def num_remote_env_runners(self):
        return len(self.runners)

    def healthy_env_runner_ids(self):
        return [index for index in self.runners if index not in self.lost]

    def foreach_env_runner_async(self, function, *, tag, remote_worker_ids):
        (index,) = remote_worker_ids
        self.asked += 1
        if self.fatal(self.runners[index], index, self.asked):
            self.lost.add(index)
            self.runners[index] = self.make(index)  # as Ray starts it again: its counters are those of a new one
        else:
            self.ready.append((tag, index, function(self.runners[index])))

    def fetch_ready_async_reqs(self, *, tags, timeout_seconds):
        answers = [(index, answer) for tag, index, answer in self.ready if tag in tags]
        self.ready = [each for each in self.ready if each[0] not in tags]
        return answers

    def restore(self):
        self.lost.clear()


@pytest.fixture()
def make(config, chat):
    def make(index: int, creator=None, kind=TextEnvRunner, **settings):
        own = config.copy(copy_frozen=False)
        for key, value in {"num_envs_per_env_runner": 4, **settings}.items():
            setattr(own, key, value)
        return kind(config=own, worker_index=index, **({"env_creator": creator} if creator else {}))

    return make


@pytest.fixture()
def engine(chat):
    return ScriptedEngine(chat, lambda prompt, weights: "Is it big?")


def player(group: Group | None, engine, config: SimpleNamespace) -> SimpleNamespace:
    """As much of an algorithm as has tasks played; the group is that of its training."""
    return SimpleNamespace(
        engine=engine, restore_env_runners=lambda group: group.restore(), env_runner_group=group, config=config
    )


def collector(group: Group, engine, **settings) -> Collector:
    arguments = {"shares": [4] * len(group.runners), "max_staleness": 0, "timeout_s": 60.0, **settings}
    return Collector(group, engine, group.restore, **arguments)


def test_a_runner_needs_nothing_but_its_request(make, engine):
    """It has no engine of its own, before and after, and no counters after a restart; no episode comes twice."""
    group = Group(make, 2, fatal=lambda runner, index, asked: asked in (1, 4, 5, 8))
    rounds = collector(group, engine)
    names = []
    for _ in range(4):
        episodes, metrics = rounds.collect()
        group.restore()
        assert len(episodes) == 8 and metrics
        assert all(runner.engine is None for runner in group.runners.values())
        names += [episode.id_ for episode in episodes]
    assert len(set(names)) == 32 and rounds.num_lost_shares == 4


def test_a_runner_of_no_certain_number_of_episodes_is_not_asked_for_those_that_it_had_begun(make, engine):
    """It begins one in each environment, and the seventh ends its process. Fails where they are begun again one by one."""

    class Deadly(Group):
        def foreach_env_runner_async(self, function, *, tag, remote_worker_ids):
            first = function.keywords["request"].keywords["state"][NEXT_EPISODE]
            self.fatal = lambda *_: first <= 7 < first + 8
            super().foreach_env_runner_async(function, tag=tag, remote_worker_ids=remote_worker_ids)

    def eight(index):
        return make(index, num_envs_per_env_runner=8, episodes_per_iteration=None, rollout_fragment_length=6)

    rounds = collector(Deadly(eight, 1), engine, shares=[None])
    names = [episode.id_ for _ in range(2) for episode in rounds.collect()[0]]
    assert names and len(set(names)) == len(names) and rounds.num_lost_shares == 1


def test_after_an_error_the_next_call_asks_again_and_keeps_what_others_have_played(make, engine):
    """Fails where the answer stays owed: nobody will send it, and the wait ends with a guess at what hangs."""
    passing = ["a passing trouble"]

    def first_fails(index):
        runner = make(index)
        sample = runner.sample

        def failing(**arguments):
            if index == 1 and passing:
                raise RuntimeError(passing.pop())
            return sample(**arguments)

        runner.sample = failing
        return runner

    group = Group(first_fails, 2)
    rounds = collector(group, engine, timeout_s=5.0)
    with pytest.raises(CollectionError, match=r"EnvRunner 1 .*failed: RuntimeError: a passing trouble"):
        rounds.collect()
    episodes, metrics = rounds.collect()
    assert len(episodes) == 8 and len(metrics) == 2 and group.asked == 3


def test_what_a_lost_runner_played_and_nobody_read_is_not_taken_twice(make, engine):
    """Asked ahead before its last answer was read, a runner that starts again plays the same tasks again."""
    group = Group(make, 1)
    rounds = collector(group, engine, max_staleness=1)
    original = group.foreach_env_runner_async

    def restarted(function, **arguments):
        group.runners[1] = make(1)  # after each answer
        original(function, **arguments)

    group.foreach_env_runner_async = restarted
    names = [episode.id_ for _ in range(3) for episode in rounds.collect()[0]]
    assert len(set(names)) == len(names) == 12


def test_a_restored_checkpoint_takes_a_running_runner_back(make, engine):
    group = Group(make, 1)
    rounds = collector(group, engine)
    rounds.collect()
    states = dict(rounds.runner_states)
    first = [(e.id_, e.get_actions()) for e in rounds.collect()[0]]
    rounds.forget(states)
    assert [(e.id_, e.get_actions()) for e in rounds.collect()[0]] == first
    rounds.forget({})  # a checkpoint from before the first iteration
    assert min(e.id_ for e in rounds.collect()[0]).endswith("-0000000000")


def test_a_share_that_ends_every_process_ends_the_run(make, engine):
    group = Group(make, 2, fatal=lambda runner, index, asked: True)
    with pytest.raises(
        CollectionError, match=r"of EnvRunner \d .*, then of EnvRunner \d .* ended, one after the other.*os\._exit"
    ) as caught:
        collector(group, engine).collect()
    assert len(re.findall(r"EnvRunner \d", str(caught.value))) == MAX_LOSSES == 5 and group.asked < 15


def test_an_evaluation_task_that_ends_every_process_is_named(make, engine):
    algorithm = player(None, engine, SimpleNamespace(evaluation_sample_timeout_s=60.0))
    played = []

    class Asked(Group):
        def foreach_env_runner_async(self, function, *, tag, remote_worker_ids):
            tasks = function.keywords["request"].keywords["items"]
            self.fatal = lambda *_: 11 in tasks
            played.extend(() if 11 in tasks else tasks)
            super().foreach_env_runner_async(function, tag=tag, remote_worker_ids=remote_worker_ids)

    group = Asked(make, 2)
    rounds = _TaskRounds(algorithm, group, partial(_tasks, attempts=1))
    with pytest.raises(CollectionError, match=r"while they played task 11\. Its environment ends the process") as caught:
        rounds.play([tuple(range(0, 16, 2)), tuple(range(1, 16, 2))])
    assert len(re.findall(r"EnvRunner \d", str(caught.value))) == MAX_LOSSES == 5
    assert sorted(played) == [task for task in range(16) if task != 11]  # each once: of what was lost the halves are asked


def test_tasks_are_no_answer_to_who_plays_ahead(make, engine):
    """On the runners that play ahead, as NLRL's rollouts. Fails where the rounds of both number their requests alike."""
    group = Group(make, 2)
    rounds = collector(group, engine, max_staleness=1)
    before = [episode.id_ for episode in rounds.collect()[0]]
    assert group.ready  # what was played ahead waits
    algorithm = SimpleNamespace(
        engine=engine,
        restore_env_runners=lambda group: group.restore(),
        env_runner_group=group,
        config=SimpleNamespace(sample_timeout_s=60.0),
    )
    played, _ = _TaskRounds(algorithm, group, partial(_tasks, attempts=1)).play([(3, 5), (7,)])
    assert sorted(task_of(episode) for episode in played) == [3, 5, 7]
    after = [episode.id_ for episode in rounds.collect()[0]]
    assert len({*before, *after}) == 16


@pytest.mark.parametrize(("is_training", "key"), [(True, "sample_timeout_s"), (False, "evaluation_sample_timeout_s")])
def test_tasks_have_the_time_of_the_runners_that_play_them(make, engine, is_training, key):
    group = Group(make, 1)
    limits = SimpleNamespace(**{"sample_timeout_s": 1e9, "evaluation_sample_timeout_s": 1e9, key: 0.2})
    own = group if is_training else None
    algorithm = SimpleNamespace(
        engine=engine, restore_env_runners=lambda group: group.restore(), env_runner_group=own, config=limits
    )
    group.foreach_env_runner_async = lambda *_, **__: None
    with pytest.raises(CollectionError, match=rf"no episode came for .*\({key}\)"):
        _TaskRounds(algorithm, group, partial(_tasks, attempts=1)).play([(3,)])


def test_nobody_answers_and_the_message_names_who_owes(make, engine):
    group = Group(make, 2)
    rounds = collector(group, engine, timeout_s=0.2)
    rounds.collect()
    group.foreach_env_runner_async = lambda *_, **__: None
    with pytest.raises(CollectionError, match=r"\(sample_timeout_s\); EnvRunners that owe some: EnvRunner 1 \(pid \d+\), Env"):
        rounds.collect()


def test_episodes_of_weights_too_old_are_refused(make, chat, engine):
    engine.version = 4
    runner = make(1)
    runner.attach(engine)
    episodes = runner.sample(num_episodes=2)
    check_age(episodes, version=5, max_staleness=1)
    with pytest.raises(EngineError, match=r"was played with version 4 of the weights, and at version 6 it may be 1 syncs old"):
        check_age(episodes, version=6, max_staleness=1)


def test_what_is_collected_is_not_too_old_either():
    """Fails where their age is left to whoever collects."""
    run = SimpleNamespace(
        config=SimpleNamespace(episodes_per_iteration=1),
        collector=None,
        weight_version=5,
        metrics=SimpleNamespace(log_value=lambda *_, **__: None, aggregate=lambda *_, **__: None),
        env_runner=SimpleNamespace(sample=lambda: [numbered_episode(4)], get_metrics=dict),
    )
    with pytest.raises(EngineError, match="was played with version 4"):
        LanguageAlgorithm.collect(run)


def test_what_is_delivered_is_in_the_order_of_the_requests():
    """Fails where the faster runner's episodes come first, so that a run depends on who was faster."""
    tags = ["000000000001", "000000000002"]
    found = CollectionRound([], delivered={tag: Answer(tag, [tag], {"of": tag}, {}, 0, 1) for tag in reversed(tags)})
    assert found.results() == tags and [metrics["of"] for metrics in found.metrics()] == tags


def test_an_evaluations_episodes_are_in_the_order_of_its_tasks(monkeypatch):
    class Rounds:
        def __init__(self, *_):
            pass

        def play(self, shares):
            return [numbered_episode(2), numbered_episode(1)], []

    monkeypatch.setattr(evaluation, "_TaskRounds", Rounds)
    episodes, _ = evaluation.on_runners(None, SimpleNamespace(num_remote_env_runners=lambda: 2), [1, 2], None)
    assert [episode.id_ for episode in episodes] == ["episode-1", "episode-2"]


def test_a_turn_that_the_initial_weights_have_refined_is_not_too_old():
    """As under ``rllib evaluate --refined`` with ``judge_weights: initial``; their version is that of the start for ever."""

    def episode(weights: Weights) -> SingleAgentEpisode:
        turn = Generation((1,), (2,), np.zeros(1, np.float32), True, 0, weights)
        own = SingleAgentEpisode(id_="task-0")
        own.add_env_reset("Go.", {})
        own.add_env_step("End.", "a", 0.0, {}, terminated=True, extra_model_outputs=step_outputs(turn, ()))
        return own

    check_age([episode(Weights.INITIAL)], version=3, max_staleness=0)
    for weights in (Weights.POLICY, Weights.TARGET):
        with pytest.raises(EngineError, match="played with version 0"):
            check_age([episode(weights)], version=3, max_staleness=0)


class Hanging(gym.Env):
    """Never returns from its first steps and resets."""

    observation_space = action_space = TextSpace()
    calls = 0
    hang_in: frozenset[int] = frozenset()
    release = threading.Event()

    def reset(self, *, seed=None, options=None):
        self._call()
        return "Go.", {}

    def step(self, action):
        self._call()
        return "Hm.", 1.0, True, False, {}

    def _call(self):
        Hanging.calls += 1
        if Hanging.calls in Hanging.hang_in:
            Hanging.release.wait()


@pytest.mark.parametrize("threads", [0, 3])
def test_an_environment_that_never_returns_loses_its_episode(make, engine, threads, caplog):
    """Resets too, the one in the place of a lost episode included; and its thread keeps no process from ending."""
    Hanging.calls, Hanging.hang_in = 0, frozenset({2, 3, 6, 9, 10})
    runner = make(1, creator=lambda context: Hanging(), env_threads=threads, env_step_timeout_s=0.2)
    runner.attach(engine)
    started = time.monotonic()
    assert len(runner.sample(num_episodes=10)) == 10
    assert time.monotonic() - started < 10
    assert int(runner.get_metrics()["env_failures"]) == 5
    assert "raised TimeoutError: no answer within 0.2 s (env_step_timeout_s)" in caplog.text
    mine = [thread for thread in threading.enumerate() if thread.name == "env"]
    assert mine and all(thread.daemon for thread in mine)


def test_an_environment_that_hangs_and_whose_close_hangs_is_left_behind(make, engine, monkeypatch):
    asked = []

    class Stuck(Hanging):
        def close(self):
            asked.append(self)
            Hanging.release.wait()

    monkeypatch.setattr("rllib_nlac.sampling.player.CLOSE_S", 0.1)
    Hanging.calls, Hanging.hang_in = 0, frozenset({2, 5})
    runner = make(1, creator=lambda context: Stuck(), env_step_timeout_s=0.2)
    runner.attach(engine)
    started = time.monotonic()
    assert len(runner.sample(num_episodes=10)) == 10 and len(asked) == 2
    runner.stop()
    assert len(asked) == 2 + len(runner.player.slots) and time.monotonic() - started < 10


@pytest.mark.parametrize("threads", [0, 3])
def test_where_nothing_limits_the_wait_it_is_said_whom_one_waits_for(make, engine, threads, monkeypatch, caplog):
    """In the log and in the line that a person reads; once for each doubling, and no more when the answer is there."""
    monkeypatch.setattr("rllib_nlac.sampling.env_watch.LATE_S", 0.1)
    Hanging.calls, Hanging.hang_in = 0, frozenset({6})
    monkeypatch.setattr(Hanging, "release", release := threading.Event())
    runner = make(1, creator=lambda context: Hanging(), env_threads=threads)
    runner.attach(engine)
    with activity.stage("playing", 8, EPISODES):
        seen: list[str] = []
        threading.Timer(0.9, lambda: (seen.append(str(activity.now)), release.set())).start()
        assert len(runner.sample(num_episodes=8)) == 8
        assert "not answered" not in str(activity.now)
    said = re.findall(r"TwentyQuestions \(environment \d of pid (\d+)\) has not answered for \d+ s", caplog.text)
    assert 2 <= len(said) <= 4 and set(said) == {str(os.getpid())} and "env_step_timeout_s ends such a wait" in caplog.text
    assert re.search(r"playing, \d of 8 episodes; TwentyQuestions \(environment \d of pid \d+\) has not answered", seen[0])
    assert not [thread for thread in threading.enumerate() if thread.name == "env watch"]


def test_a_limit_that_nobody_reaches_changes_nothing(make, engine):
    played = []
    for limit in (None, 60.0):
        runner = make(1, env_step_timeout_s=limit)
        runner.attach(engine)
        played.append([(e.id_, e.get_observations(), e.get_actions()) for e in runner.sample(num_episodes=12)])
    assert played[0] == played[1]


def test_an_environment_that_calls_sys_exit_loses_its_episode(make, engine, monkeypatch):
    Faulty.steps = 0
    monkeypatch.setattr("faulty.OSError", SystemExit, raising=False)
    runner = make(1, creator=lambda context: Faulty(fails=7))
    runner.attach(engine)
    assert len(runner.sample(num_episodes=8)) == 8 and int(runner.get_metrics()["env_failures"]) > 0


def test_under_rllibs_own_algorithms_a_restarted_runner_gets_the_weights_of_the_local_one(make):
    """Without them it has no engine, and ends at its first sample, again and again."""
    local, restarted = (make(index, kind=StockTextEnvRunner) for index in range(2))
    local.set_state({"rl_module": {"default_policy": {"w": 1}}, "weights_seq_no": 3})
    restarted.set_state(local.get_state())
    assert restarted._weights == {"w": 1} and restarted._weights_version == 3
    for left_out in ([], ["rl_module"]):  # checkpoints have them from the learner
        assert "rl_module" not in local.get_state(not_components=left_out)
    local._weights = restarted._weights = None


class TestRestarts:
    """Learners that are lost are started again, at most three times in a row."""

    def run(self, losses: int, error: type[Exception] = LearnerLost, interval: int = 1) -> None:
        a, groups = LanguageAlgorithm.__new__(LanguageAlgorithm), []
        a.config, a.num_learner_restarts = SimpleNamespace(learner_snapshot_interval=interval), 0
        a.learner_group = SimpleNamespace(number=0, is_local=True)
        a.snapshots = SimpleNamespace(rebuild=lambda group: SimpleNamespace(number=group.number + 1, is_local=True))

        def work():
            groups.append(a.learner_group.number)
            if len(groups) <= losses:
                raise error("gone")
            return "done"

        try:
            assert a._with_learners(work) == "done"
        finally:
            self.groups, self.restarts = groups, a.num_learner_restarts

    @pytest.mark.parametrize("losses", [0, 1, 3])
    def test_the_work_is_done_again_by_new_ones(self, losses):
        self.run(losses)
        assert self.groups == list(range(losses + 1)) and self.restarts == losses

    def test_a_fourth_loss_is_raised(self):
        with pytest.raises(LearnerLost):
            self.run(4)
        assert self.groups == [0, 1, 2, 3] and self.restarts == 3

    @pytest.mark.parametrize(("error", "interval"), [(ValueError, 1), (LearnerLost, 0)])
    def test_another_error_and_a_loss_without_snapshots_are_raised_at_once(self, error, interval):
        with pytest.raises(error, match="gone"):
            self.run(1, error, interval)
        assert self.groups == [0] and self.restarts == 0
