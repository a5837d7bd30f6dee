"""What an environment returns: what runs cannot read costs the episode, is counted, and says what was wrong."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from rllib_nlac.envs.answers import AnswerError, MetricNames, checked_reset, checked_step, info_of, reward_of, truth_of
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import episode_success
from rllib_nlac.sampling.env_runner import TextEnvRunner


@pytest.mark.parametrize("value", [1, 0.5, -3, True, np.bool_(True), np.float16(0.5), np.int64(7)])
def test_rewards_that_count(value):
    assert type(reward_of(value)) is float and reward_of(value) == float(value)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (float("nan"), "the reward must be a finite number of at most 3.4e.38, and it is float nan"),
        (math.inf, "float inf"),
        (-math.inf, "float -inf"),
        (np.float32("inf"), "finite"),
        (10**400, "finite"),
        pytest.param(10**5000, "int that cannot be printed", id="huge"),
        (1e39, "float 1e.39"),
        ("1.0", "the reward must be a number, and it is str '1.0'"),
        (None, "must be a number, and it is None"),
        (np.array(1.0), "must be a number, and it is ndarray"),
        (np.array([1.0]), "ndarray"),
        (torch.tensor(1.0), "Tensor"),
        ([1.0], "list"),
        (1j, "complex"),
    ],
)
def test_rewards_that_do_not(value, complaint):
    with pytest.raises(AnswerError, match=complaint):
        reward_of(value)


@pytest.mark.parametrize(("value", "truth"), [(True, True), (np.bool_(False), False), (1, True), (0, False), (1.0, True)])
def test_flags_that_count(value, truth):
    assert truth_of(value, "it") is truth


@pytest.mark.parametrize(
    "value", [float("nan"), "no", "yes", "", 0.5, 2, None, [], np.array(True), np.array([1, 0]), torch.tensor(1), {}]
)
def test_flags_that_do_not(value):
    with pytest.raises(AnswerError, match="it must be true or false, and it is"):
        truth_of(value, "it")


GOOD_INFO = {
    "success": np.bool_(True),
    "discard": 0,
    "system_prompt": "Guess.",
    "stop_reason": "turn_limit",
    "task_id": 3,
    "subgoals": {"door": True, "key": 0.5},
    "privileged": {},
    "turn": "whatever is not read may be anything",
}


def test_info_keeps_everything_and_makes_flags_bools():
    info = info_of(GOOD_INFO)
    assert info == GOOD_INFO and info["success"] is True and info["discard"] is False
    assert info_of(dict.fromkeys(GOOD_INFO)) == dict.fromkeys(GOOD_INFO) and info_of({}) == {}


@given(st.integers(0, 127), st.sampled_from([int, np.int8, np.uint16, np.int64]))
def test_info_is_plain_where_it_is_kept(number, kind):
    """Fails where JSON or pickle refuses what an environment may say."""
    info = info_of({"task_id": kind(number), "subgoals": defaultdict(lambda: False, door=True)})
    assert type(info["task_id"]) is int and json.loads(json.dumps(info["task_id"])) == number
    assert type(info["subgoals"]) is dict and info["subgoals"] == {"door": True}


BAD_INFO = [
    (None, "info must be a dict, and it is None: return {}"),
    ([("success", True)], "info must be a dict, and it is list"),
    ({"success": "no"}, r"info\['success'\] must be true or false, and it is str 'no'"),
    ({"success": float("nan")}, r"info\['success'\] must be true or false, and it is float nan"),
    ({"success": np.array([True, False])}, r"info\['success'\] must be true or false"),
    ({"discard": "false"}, r"info\['discard'\] must be true or false"),
    ({"system_prompt": 7}, r"info\['system_prompt'\] must be a str, and it is int 7"),
    ({"task_id": ["a"]}, r"info\['task_id'\] must be a str or an int"),
    ({"privileged": "the answer"}, r"info\['privileged'\] must be a dict"),
    ({"stop_reason": ["won"]}, r"info\['stop_reason'\] becomes the name of a metric"),
    ({"stop_reason": "won/lost"}, "without '/'"),
    ({"stop_reason": "x" * 1_000_000}, "at most 64"),
    ({"stop_reason": "a\nb"}, "printable"),
    ({"subgoals": ["door"]}, r"info\['subgoals'\] must be a dict"),
    ({"subgoals": {"door": float("nan")}}, r"info\['subgoals'\]\['door'\] must be a finite number"),
    ({"subgoals": {"door": "open"}}, r"info\['subgoals'\]\['door'\] must be a number"),
    ({"subgoals": {3: True}}, r"a name in info\['subgoals'\] becomes the name of a metric"),
    ({"subgoals": {f"d{i}": 1 for i in range(65)}}, "has 65 names"),
]


@pytest.mark.parametrize(("info", "complaint"), BAD_INFO)
def test_info_that_cannot_be_read(info, complaint):
    with pytest.raises(AnswerError, match=complaint) as raised:
        info_of(info)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("answer", [None, "hello", ("hello",), ("hello", {}, 3), ["hello", {}]])
def test_a_reset_that_is_no_pair(answer):
    with pytest.raises(AnswerError, match=r"reset\(\) must return \(observation, info\), and it returned"):
        checked_reset(answer)


@pytest.mark.parametrize("answer", [None, ("hello", 0.0, True, {}), ("hello", 0.0, True, False, {}, 1)])
def test_a_step_that_is_no_five(answer):
    with pytest.raises(AnswerError, match=r"step\(\) must return \(observation, reward, terminated, truncated, info\)"):
        checked_step(answer)


@pytest.mark.parametrize("place", [2, 3])
def test_whether_it_ended_is_a_flag(place):
    answer = ["hello", 0.0, False, False, {}]
    answer[place] = "no"
    with pytest.raises(AnswerError, match="terminated" if place == 2 else "truncated"):
        checked_step(tuple(answer))


def test_so_many_names_and_then_one_for_the_rest():
    name = MetricNames(limit=2)
    assert [name(text) for text in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_every_name_is_one_that_mlflow_takes():
    """Its rule for metrics; at another name it raises, which ends the run at its first result."""
    name = MetricNames(limit=20)
    for text in ("won [easy]", "50%", "the user's fault", "key=value", "a:b c-d.e", "étage"):
        assert re.fullmatch(r"[/\w.\- :]*", name(text))
    assert name("a:b c-d.e") == "a:b c-d.e" and name("won [easy]") == "won _easy_"


class Odd(gym.Env):
    """Every third of its episodes ends with an answer that cannot be read; the others pay 1."""

    observation_space = action_space = TextSpace()
    episodes = 0

    def __init__(self, answer=None, first=None):
        self.answer, self.first = answer, first

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Odd.episodes += 1
        return "Go.", (self.first if self.first and Odd.episodes % 3 == 0 else {})

    def step(self, action):
        good = ("Hm.", 1.0, True, False, {"success": True, "stop_reason": f"reason {Odd.episodes}"})
        return self.answer if self.answer and Odd.episodes % 3 == 0 else good


@pytest.fixture()
def play(config, chat, caplog):
    def play(count: int, **settings):
        Odd.episodes = 0
        config.num_envs_per_env_runner = 1
        runner = TextEnvRunner(config=config, worker_index=0, env_creator=lambda context: Odd(**settings))
        runner.attach(ScriptedEngine(chat, lambda *_: "x"))
        with caplog.at_level(logging.WARNING):
            episodes = runner.sample(num_episodes=count)
        return episodes, runner.get_metrics(), caplog.text

    return play


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (("Hm.", float("nan"), True, False, {}), "the reward must be a finite number"),
        (("Hm.", 10**400, True, False, {}), "the reward must be a finite number"),
        (("Hm.", np.array(1.0), True, False, {}), "the reward must be a number"),
        (("Hm.", 1.0, True, False, None), "info must be a dict, and it is None"),
        *[(("Hm.", 1.0, True, False, info), None) for info, _ in BAD_INFO if info is not None],
    ],
)
def test_an_answer_that_cannot_be_read_loses_its_episode_and_is_named(play, answer, complaint):
    episodes, metrics, log = play(12, answer=answer)
    assert len(episodes) == 12 and all(episode.get_return() == 1.0 and episode_success(episode) for episode in episodes)
    assert int(metrics["env_failures"]) >= 4 and "step() raised AnswerError: " in log
    assert complaint is None or complaint in log


def test_at_a_reset_as_well(play):
    episodes, metrics, log = play(12, first={"system_prompt": 7})
    assert (
        len(episodes) == 12 and int(metrics["env_failures"]) >= 4 and "reset() raised AnswerError: info['system_prompt']" in log
    )


def test_an_environment_makes_no_more_metrics_than_its_share(play):
    _, metrics, _ = play(100)
    names = [name for name in metrics if name.startswith("stop_reason_")]
    assert len(names) == 65 and int(metrics["stop_reason_other"]) == 100 - 64
