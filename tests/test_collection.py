"""What an EnvRunner reports of its episodes, how many it plays, and what it remembers."""

from __future__ import annotations

import math
import pickle
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from countdown import Countdown, runner_of
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from scripted_engine import ScriptedEngine, last_message
from scripted_roles import script

from rllib_nlac.ablations import FrozenCritic, PermutedFutures
from rllib_nlac.baselines import stock_runner
from rllib_nlac.baselines.grpo import GRPOConfig
from rllib_nlac.baselines.stock_runner import StockTextEnvRunner
from rllib_nlac.engine.shared import NotFiniteError
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.episode import MESSAGES, environment_of, episode_success, task_seed_of
from rllib_nlac.replay.buffer import TextReplayBuffer, transition_at
from rllib_nlac.replay.dialogues import parse_dialogue, write_dialogues
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import Weights


@pytest.fixture()
def make(config, chat):
    return partial(runner_of, config, chat)


def test_the_metrics_are_those_of_the_episodes(make, chat):
    runner, started = make(), time.perf_counter()
    episodes = runner.sample(num_episodes=20)
    elapsed = time.perf_counter() - started
    lengths = [len(episode) for episode in episodes]
    assert set(lengths) == {1, 2, 3, 4} and all(episode.is_terminated for episode in episodes)
    metrics = {key: value for key, value in runner.get_metrics().items() if not isinstance(value, dict)}
    values = {key: float(value) for key, value in metrics.items()}
    assert values["episode_len_mean"] == pytest.approx(sum(lengths) / 20)
    assert values["episode_return_mean"] == pytest.approx(0.5 * sum(lengths) / 20)
    assert values["success_rate"] == pytest.approx(sum(length % 2 == 0 for length in lengths) / 20)
    assert values["num_env_steps_sampled"] == values["num_env_steps_sampled_lifetime"] == sum(lengths)
    assert values["num_episodes"] == values["num_episodes_lifetime"] == 20
    assert values["num_generated_tokens"] == sum(lengths) * len(chat.encode("ok"))
    assert {n: values[f"stop_reason_after_{n}"] for n in range(1, 5)} == {n: lengths.count(n) for n in range(1, 5)}
    assert values["action_parse_failures"] == 0 and values["tokens_per_s"] > 0 and 0 < values["sample_time_s"] < elapsed
    assert 0 < values["episode_duration_sec_mean"] < elapsed
    assert values["tokens_per_s"] * values["sample_time_s"] == pytest.approx(values["num_generated_tokens"])
    assert runner.num_env_steps_sampled_lifetime == sum(lengths)


def test_subgoals_are_shares_of_episodes(make):
    runner = make()
    lengths = [len(episode) for episode in runner.sample(num_episodes=20)]
    reached = float(runner.get_metrics()["subgoals"]["two"])
    assert reached == pytest.approx(sum(length >= 2 for length in lengths) / 20)


def test_success_is_told_by_the_partner_of_the_episode(make):
    class Met(Countdown):
        def step(self, action):
            *answer, info = super().step(action)
            return *answer, {**info, "partner": "first" if self.length < 3 else "second"}

    runner = make(env=Met)
    lengths = [len(episode) for episode in runner.sample(num_episodes=20)]
    found = {name: float(value) for name, value in runner.get_metrics()["success_by_partner"].items()}
    for name, met in (("first", [n for n in lengths if n < 3]), ("second", [n for n in lengths if n >= 3])):
        assert found.pop(name) == pytest.approx(sum(n % 2 == 0 for n in met) / len(met))
    assert not found


def test_subgoals_after_64_are_counted_together(make):
    """Fails where an environment that names each task's own makes a metric of each."""

    class Names(Countdown):
        number = 0

        def reset(self, **arguments):
            Names.number += 1
            self.name = f"goal {Names.number}"
            return super().reset(**arguments)

        def step(self, action):
            return "Hm.", 0.0, True, False, {"subgoals": {self.name: Names.number <= 82}}

    runner = make(env=Names, num_envs_per_env_runner=1)
    assert len(runner.sample(num_episodes=100)) == 100
    found = {name: float(value) for name, value in runner.get_metrics()["subgoals"].items()}
    assert found == {**{f"goal {number}": 1.0 for number in range(1, 65)}, "other": 0.5}  # of 65 to 100 the first half


def test_means_of_unequal_shares_are_over_their_episodes(make):
    """Fails where they are RLlib's: means of the runners' means, by which an episode of a small share counts for more."""
    runner, root = make(), MetricsLogger(root=True)
    lengths: list[int] = []
    for shares in ((1, 20), (2,)):
        results = []
        for share in shares:
            lengths += [len(episode) for episode in runner.sample(num_episodes=share)]
            results.append(pickle.loads(pickle.dumps(runner.get_metrics())))  # as of another process
        root.aggregate(results, key="env_runners")
        state, root = root.get_state(), MetricsLogger(root=True)
        root.set_state(state)  # as after a restore
    found = root.compile()["env_runners"]
    assert found["episode_len_mean"] == pytest.approx(np.mean(lengths))
    assert found["episode_return_mean"] == pytest.approx(0.5 * np.mean(lengths))
    assert found["success_rate"] == pytest.approx(np.mean([length % 2 == 0 for length in lengths]))
    assert found["subgoals"]["two"] == pytest.approx(np.mean([length >= 2 for length in lengths]))
    assert math.isnan(root.compile()["env_runners"]["success_rate"])  # of the next iteration nothing is known


def test_a_step_that_says_so_loses_its_episode_under_the_reason_that_it_gives(make):
    class Gone(Countdown):
        def step(self, action):
            *answer, info = super().step(action)
            return *answer, {**info, "discard": True, "stop_reason": "gone"} if self.length == 3 else info

    runner = make(env=Gone)
    lengths = [len(episode) for episode in runner.sample(num_episodes=20)]
    metrics = runner.get_metrics()
    assert len(lengths) == 20 and set(lengths) == {1, 2, 4}
    assert int(metrics["stop_reason_gone"]) == int(metrics["episodes_discarded"]) > 0


def test_the_engine_goes_on_while_an_environment_takes_its_time(make):
    class Patient(Countdown):
        def step(self, action):
            if self.length == 2:
                waited.append(others.wait(10))
            elif self.left == 1:
                others.set()
            return super().step(action)

    others, waited = threading.Event(), list[bool]()
    episodes = make(env=Patient, env_threads=3).sample(num_episodes=12)
    assert len(episodes) == 12 and waited and all(waited)


def test_an_environment_that_is_ready_need_not_wait_for_anothers_long_turn(make):
    """The first turn ends when all others have, and the engine waits for it only while no environment is at work."""

    class Unhurried(Countdown):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    runner, held, in_vain = make(env=Unhurried, env_threads=3), [], []
    poll, submit, asked = runner.engine.poll, runner.engine.submit, []

    def slow_poll(patience_s=None):
        while some := poll():
            held.extend(answer for answer in some if answer[0] == 0)
            if others := [answer for answer in some if answer[0] != 0]:
                return others
        if patience_s is not None and len(asked) < 8:
            time.sleep(patience_s)
            return []
        in_vain.append(len(asked) < 8)
        released, held[:] = held[:], []
        return released

    runner.engine.poll = slow_poll
    runner.engine.submit = lambda requests: asked.extend(requests) or submit(requests)
    assert len(runner.sample(num_episodes=6)) == 6
    assert not any(in_vain)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_by_steps_whole_episodes_are_played_until_there_are_enough(make, steps):
    runner = make(num_envs_per_env_runner=1)
    episodes = runner.sample(num_timesteps=steps)
    lengths = [len(episode) for episode in episodes]
    assert sum(lengths) >= steps > sum(lengths[:-1]) and all(episode.is_done for episode in episodes)


def test_where_the_last_step_ends_an_episode_no_further_one_begins(make):
    lengths = [len(episode) for episode in make(num_envs_per_env_runner=1).sample(num_episodes=6)]
    for count in range(1, 7):
        episodes = make(num_envs_per_env_runner=1).sample(num_timesteps=sum(lengths[:count]))
        assert [len(episode) for episode in episodes] == lengths[:count]


@pytest.mark.parametrize(("wanted", "fragment", "count"), [(5, 8, 5), (None, 8, None)])
def test_without_a_number_a_runner_plays_its_share_or_a_fragment_of_each_environment(make, wanted, fragment, count):
    runner = make(episodes_per_iteration=wanted, rollout_fragment_length=fragment)
    episodes = runner.sample()
    assert len(episodes) == count if count else sum(map(len, episodes)) >= fragment * 3
    if not count:
        assert sum(map(len, episodes)) <= fragment * 3 + 3 * 4


def test_evaluation_plays_the_same_tasks_every_time_and_training_never(make):
    for evaluation in (True, False):
        runner = make(in_evaluation=evaluation)
        first, second = ([e.id_ for e in runner.sample(num_episodes=4)] for _ in range(2))
        assert (first == second) is evaluation
        assert all(name.split("-")[1] == str(int(evaluation)) for name in first)


def test_an_evaluations_runner_resets_with_other_seeds_than_one_of_training(make):
    def seeds(evaluation: bool) -> set[int]:
        return {task_seed_of(e) for e in make(in_evaluation=evaluation).sample(num_episodes=8)}

    assert len(seeds(True)) == len(seeds(False)) == 8 and not seeds(True) & seeds(False)


def test_what_a_runner_remembers(make):
    runner = make()
    runner.sample(num_episodes=7)
    state = runner.get_state()
    assert state["next_episode"] == 7
    other = make()
    other.set_state(state)
    assert [e.id_ for e in other.sample(num_episodes=2)] == ["0000-0-0000000007", "0000-0-0000000008"]
    assert other.num_env_steps_sampled_lifetime > runner.num_env_steps_sampled_lifetime
    other.set_state({})
    assert other.get_state()["next_episode"] == 9


@pytest.mark.parametrize("ends", [True, False])
def test_a_limit_ends_an_episode_as_the_algorithm_asks(make, ends):
    runner = make(max_response_tokens=1, truncation_ends=ends)
    episodes = [e for e in runner.sample(num_episodes=12) if e.get_infos(-1)["stop_reason"] == "response_limit"]
    assert episodes and {(e.is_terminated, e.is_truncated) for e in episodes} == {(ends, not ends)}
    assert all(len(e) == 1 and e.get_infos(-1)["success"] is False for e in episodes)


@pytest.mark.parametrize(
    ("success", "reward", "expected"),
    [(True, 0.0, True), (False, 1.0, False), (None, 1.0, True), (None, 0.0, False), (None, -1.0, False)],
)
def test_success_is_the_environments_word_or_else_a_positive_return(success, reward, expected):
    episode = SimpleNamespace(get_infos=lambda place: {"success": success}, get_return=lambda: reward)
    assert episode_success(episode) is expected


def test_every_turn_of_a_dialogue_is_asked_with_all_before_it(make, chat):
    runner = make(lambda prompt, weights: f"turn {prompt.count('<|assistant|>')}", prompts="default")
    for episode in runner.sample(num_episodes=4):
        for t in range(len(episode)):
            messages = episode.get_extra_model_outputs(MESSAGES, t)
            assert [m.role for m in messages] == ["system", "user", *["assistant", "user"] * t]
            assert messages[0].content == "Count." and [m.content for m in messages[2::2]] == episode.get_actions()[:t]
            assert [m.content for m in messages[1::2]] == episode.get_observations()[: t + 1]
            assert episode.get_actions(t) == f"turn {t + 1}"


def test_callbacks_are_told_of_the_episode_its_environment_and_its_slot(make):
    told: list[tuple[str, dict]] = []
    names = ("on_environment_created", "on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")

    class Told(RLlibCallback):
        pass

    for name in (*names, "on_sample_end"):
        setattr(Told, name, lambda self, name=name, **arguments: told.append((name, arguments)))
    by_function: list[dict] = []
    runner = make(callbacks_class=Told, callbacks_on_episode_end=lambda **arguments: by_function.append(arguments))
    episodes = runner.sample(num_episodes=5)
    assert {name for name, _ in told} == {*names, "on_sample_end"}
    assert all(a["env_runner"] is runner and a["metrics_logger"] is runner.metrics for _, a in told)
    assert [a["env_context"].vector_index for name, a in told if name == "on_environment_created"] == [0, 1, 2]
    for name, arguments in told:
        if "episode" in arguments:
            assert arguments["env"] is runner.player.slots[arguments["env_index"]].env and arguments["rl_module"] is None, name
    ends = [a for name, a in told if name == "on_episode_end"]
    assert sorted(a["episode"].id_ for a in ends) == [e.id_ for e in episodes] and ends[0]["prev_episode_chunks"] == []
    assert [a["episode"] for a in by_function] == [a["episode"] for a in ends]
    assert [a["samples"] for name, a in told if name == "on_sample_end"] == [episodes]


class Talkative(Countdown):
    """Says more than is read, in types of its own, and all of it in every step."""

    def more(self, info):
        own = {"lock": threading.Lock(), "environment": "level 7", "privileged": {"lock": threading.Lock()}}
        return {"system_prompt": "Count. " * 9, "task_id": np.int64(self.length), **info, **own}

    def reset(self, **arguments):
        observation, info = super().reset(**arguments)
        return observation, self.more(info)

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, self.more(info)


def test_whole_episodes_keep_of_an_info_what_is_read_and_callbacks_see_all_of_it(make):
    """Fails where an info that cannot be copied ends the run, or a long system prompt is kept once a step."""
    seen: list[bool] = []

    def on_episode_end(episode, **_):
        seen.append(all("lock" in info for info in episode.get_infos()))

    episodes = make(env=Talkative, callbacks_on_episode_end=on_episode_end).sample(num_episodes=6)
    assert seen and all(seen)
    buffer = TextReplayBuffer(env="E")
    buffer.add(episodes)
    for episode in pickle.loads(pickle.dumps(list(buffer.episodes))):
        first, *others, last = episode.get_infos()
        assert first == {"system_prompt": "Count.", "task_id": len(episode)}
        assert others == [{"task_id": len(episode)}] * (len(episode) - 1)
        assert last.keys() == {"task_id", "success", "stop_reason", "subgoals"}


def test_a_task_that_is_a_number_of_numpys_is_written_and_read_back(make, tmp_path):
    episodes = make(env=Talkative).sample(num_episodes=6)
    write_dialogues(tmp_path / "log.jsonl", episodes)
    read = [parse_dialogue(row) for row in read_rows(str(tmp_path / "log.jsonl"))]
    assert [dialogue.task_id for dialogue in read] == [str(len(episode)) for episode in episodes]


def test_a_users_word_for_its_environment_does_not_choose_the_prompts(make):
    """Fails where the prompts that are written for the environment are left out."""
    asked: list[str] = []
    runner = make(env=Talkative)
    prompts_for = runner.player._prompts_for
    runner.player._prompts_for = lambda env: asked.append(env) or prompts_for(env)
    (episode,) = runner.sample(num_episodes=1)
    assert set(asked) == {runner.config.env}
    assert environment_of(episode) is None and transition_at("E", episode, 0).env == "E"


def test_an_environment_that_says_nothing_of_its_spaces_is_refused_by_name(make):
    with pytest.raises(ValueError, match=r"has the observation space None, and NLAC needs text"):
        make(env=lambda: SimpleNamespace(close=lambda: None))


def test_spaces_are_those_of_the_environment(make):
    spaces = make(num_envs_per_env_runner=1).get_spaces()
    assert spaces.keys() == {"__env__", "default_policy", "default_agent"}
    assert all(own == (Countdown.observation_space, Countdown.action_space) for own in spaces.values())


def test_a_turn_is_refined_as_the_algorithm_has_it(chat):
    """Fails where the critic of ``NLAC_FrozenCritic`` predicts by other weights in evaluation than in training."""
    game = {"num_objects": 16, "num_attributes": 8, "max_turns": 1}
    config = FrozenCritic.get_default_config().environment("TwentyQuestions", env_config=game).language(language_model="tiny")
    config.num_envs_per_env_runner = 1
    runner = TextEnvRunner(config=config, worker_index=0)
    runner.attach(ScriptedEngine(chat, script()))
    runner.sample_tasks([0], refined=True)
    asked = {weights for weights, request in runner.engine.requests if last_message(runner.engine.text(request)) == "Predict."}
    assert asked == {Weights.INITIAL}


def test_a_policy_without_a_critic_in_words_cannot_be_refined(chat):
    config = GRPOConfig().environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
    config.language(language_model="tiny")
    runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Countdown())
    runner.attach(ScriptedEngine(chat, lambda *_: "ok"))
    with pytest.raises(ValueError, match="GRPOConfig has no critic in words, so its policy cannot be refined"):
        runner.sample_tasks([0], refined=True)


def test_futures_that_are_exchanged_within_a_batch_refine_no_turn_that_is_played(chat):
    config = PermutedFutures.get_default_config().environment("TwentyQuestions").language(language_model="tiny")
    runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Countdown())
    runner.attach(ScriptedEngine(chat, lambda *_: "ok"))
    with pytest.raises(ValueError, match="cannot be refined before it is played: this algorithm exchanges futures"):
        runner.sample_tasks([0], refined=True)


class TestWeightsOfRLlibsSync:
    """Under RLlib's own algorithms a runner holds the weights itself, and starts an engine for them."""

    def weights(self, number: float) -> dict[str, torch.Tensor]:
        return {"w": torch.full((2,), number)}

    def sent(self, number: float, version: int) -> dict:
        return {"rl_module": {"default_policy": self.weights(number)}, "weights_seq_no": version}

    def held(self, runner) -> tuple[float, int]:
        return runner._weights["w"][0].item(), runner._weights_version

    def test_older_ones_are_ignored_and_unnumbered_ones_never(self, make):
        runner = make(kind=StockTextEnvRunner)
        for number, version, expected in (
            (1.0, 3, (1.0, 3)),
            (2.0, 2, (1.0, 3)),
            (3.0, 3, (1.0, 3)),
            (4.0, 4, (4.0, 4)),
            (5.0, 0, (5.0, 4)),
        ):
            runner.set_state(self.sent(number, version))
            assert self.held(runner) == expected
        runner.set_state({"rl_module": {"default_policy": {}}, "weights_seq_no": 9})  # as before the first sync
        assert self.held(runner) == (5.0, 4)
        runner.set_state({"rl_module": self.weights(6.0)})  # neither a module's name nor a number
        assert self.held(runner) == (6.0, 4)

    def test_a_reference_is_followed(self, make, monkeypatch):
        monkeypatch.setattr(stock_runner.ray, "get", lambda reference: {"default_policy": self.weights(7.0)})
        runner = make(kind=StockTextEnvRunner)
        runner.set_state({"rl_module": ray.ObjectRef.nil(), "weights_seq_no": 1})
        assert self.held(runner) == (7.0, 1)

    def test_who_asks_for_everything_or_for_them_is_given_them(self, make):
        runner = make(kind=StockTextEnvRunner)
        assert "rl_module" not in runner.get_state()
        runner.set_state(self.sent(1.0, 3))
        for asked in ({}, {"components": "rl_module"}, {"components": ["rl_module"], "not_components": "x"}):
            state = runner.get_state(**asked)
            assert state["rl_module"]["default_policy"]["w"].tolist() == [1.0, 1.0] and state["weights_seq_no"] == 3
            assert ("next_episode" in state) is (not asked)  # other runners have episodes of their own
        for asked in ({"not_components": ["rl_module"]}, {"not_components": []}, {"components": ["x"]}):
            assert "rl_module" not in runner.get_state(**asked)

    def test_newer_ones_are_fetched_where_a_server_has_them(self, make, monkeypatch):
        runner, asked = make(kind=StockTextEnvRunner), []
        answers = iter([self.sent(1.0, 5), None, ray.exceptions.RayError("gone"), self.sent(2.0, 6)])

        def get(reference):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(stock_runner.ray, "get", get)
        remote = SimpleNamespace(remote=lambda version: asked.append(version))
        runner._env_runner_state_server = SimpleNamespace(pull_if_newer=remote)
        for expected in ((1.0, 5), (1.0, 5), (1.0, 5), (2.0, 6)):
            runner._fetch_weights()
            assert self.held(runner) == expected
        assert asked == [0, 5, 5, 5] and int(runner.get_metrics()["weight_fetch_failures"]) == 1

    def test_the_engine_is_given_what_it_does_not_hold(self, make, chat, monkeypatch):
        taken = []

        class Local(ScriptedEngine):
            def holds(self, weights):
                return bool(taken) and taken[-1][2] is weights

            def set_weights(self, weights, version, state):
                taken.append((weights, version, state))

        local = Local(chat, lambda *_: "ok")
        monkeypatch.setattr(stock_runner, "local_engine", lambda config, chat: local)
        runner = make(kind=StockTextEnvRunner)
        runner.set_state(self.sent(1.0, 3))
        for _ in range(2):
            assert len(runner.sample(num_episodes=2)) == 2 and runner.engine is local
        assert [(which, version) for which, version, _ in taken] == [(Weights.POLICY, 3)]
        runner.set_state(self.sent(math.nan, 4))
        with pytest.raises(NotFiniteError, match="the weights that RLlib's sync brought are not finite in 1 of 1 tensors"):
            runner.sample(num_episodes=1)
        assert len(taken) == 1
        runner.stop()
        assert runner.engine is None and runner.player.speaker is None and "rl_module" not in runner.get_state()

    def test_a_runner_with_an_engine_of_others_keeps_it_when_it_stops(self, make):
        runner, closed = make(kind=StockTextEnvRunner), []
        for slot in runner.player.slots:
            slot.env.close = lambda: closed.append(1)
        engine = runner.engine
        runner.stop()
        assert runner.engine is engine and len(closed) == 3
