"""Branches: what is played again is what was played, what differs is dropped, and they count as steps and nothing else."""

from __future__ import annotations

import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from countdown import Countdown, runner_of

from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.envs.twenty_questions import TwentyQuestions
from rllib_nlac.episode import GENERATION, MESSAGES
from rllib_nlac.sampling.branches import play_branches

World = partial(TwentyQuestions, num_objects=16, num_attributes=8, max_turns=6)


@pytest.fixture()
def make(config, chat):
    return partial(runner_of, config, chat)


def test_branches_count_as_steps_and_not_as_the_policys_success(make):
    runner = make()
    episodes = [episode for episode in runner.sample(num_episodes=12) if len(episode) >= 3][:2]
    runner.get_metrics()
    prefixes = [(episode, 1) for episode in episodes]
    branches = [b for own in play_branches(prefixes, 2, np.random.default_rng(0), runner.play_forks) for b in own]
    metrics = runner.get_metrics()
    assert float(metrics["num_env_steps_sampled"]) == sum(map(len, branches)) and float(metrics["num_episodes"]) == 4
    sampled = [branch.get_extra_model_outputs(GENERATION, turn) for branch in branches for turn in range(1, len(branch))]
    assert int(metrics["num_generated_tokens"]) == sum(len(generation.token_ids) for generation in sampled)  # not the prefixes
    assert math.isnan(float(metrics["success_rate"])) and math.isnan(float(metrics["episode_return_mean"]))


def test_a_branch_begins_with_its_prefixs_turns_and_their_generations(make):
    runner = make()
    episode = next(e for e in runner.sample(num_episodes=40) if len(e) == 4)
    ((branch,),) = play_branches([(episode, 2)], 1, np.random.default_rng(0), runner.play_forks)
    assert len(branch) == 4 and branch.get_observations() == episode.get_observations()
    for t in range(4):
        same = branch.get_extra_model_outputs(GENERATION, t) is episode.get_extra_model_outputs(GENERATION, t)
        assert same is (t < 2)
        assert branch.get_extra_model_outputs(MESSAGES, t) == episode.get_extra_model_outputs(MESSAGES, t)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_branch_whose_prefix_is_answered_otherwise_is_dropped_and_counted(make, threads):
    class Moody(Countdown):
        games = 0

        def reset(self, **arguments):
            Moody.games += 1
            return super().reset(**arguments)

        def step(self, action):
            observation, *rest = super().step(action)
            return f"{observation} {'Well!' * (Moody.games > played)}", *rest

    played = 10**9
    runner = make(env=Moody, env_threads=threads)
    episodes = [episode for episode in runner.sample(num_episodes=12) if len(episode) >= 2][:2]
    prefixes, rng = [(episode, 1) for episode in episodes], np.random.default_rng(0)
    assert [len(own) for own in play_branches(prefixes, 2, rng, runner.play_forks)] == [2, 2]
    played = Moody.games
    runner.get_metrics()
    assert play_branches(prefixes, 2, rng, runner.play_forks) == [[], []]
    assert int(runner.get_metrics()["branch_mismatches"]) == 4


@pytest.mark.parametrize("ends", [2, 9])
def test_a_branch_that_ends_elsewhere_is_dropped_and_counted(make, ends):
    """Though it was answered alike. Fails where a game that ended before the turn counts as what came of it."""

    class Slippery(Countdown):
        def reset(self, **arguments):
            self.turns = 0
            return "Go.", {}

        def step(self, action):
            self.turns += 1
            return "Ok.", 0.0, self.turns >= length, False, {"success": self.turns >= length}

    length = 5
    runner = make(env=Slippery)
    (episode,) = runner.sample(num_episodes=1)
    length = ends
    assert play_branches([(episode, 5 if ends > 5 else 4)], 2, np.random.default_rng(0), runner.play_forks) == [[]]
    assert int(runner.get_metrics()["branch_mismatches"]) == 2


def test_a_branch_repeats_the_prefix_in_the_same_task_and_goes_on_alone(make):
    rng = np.random.default_rng(0)
    moves = ["Is it big?", "Is it alive?", "Can it fly?", "Is it found in water?", "Is it a duck?"]
    runner = make(lambda prompt, w: moves[rng.integers(5)], env=World)
    episodes = runner.sample(num_episodes=6)
    before = runner.get_metrics()
    branches = play_branches([(e, 2) for e in episodes], 3, np.random.default_rng(0), runner.play_forks)
    assert [len(group) for group in branches] == [3] * 6
    for e, group in zip(episodes, branches, strict=True):
        for branch in group:
            assert branch.get_actions()[:2] == e.get_actions()[:2] and branch.is_done
            assert branch.get_observations()[:3] == e.get_observations()[:3]
            assert branch.get_infos(0)["task_id"] == e.get_infos(0)["task_id"]
    assert len({tuple(b.get_actions()) for group in branches for b in group}) > 6
    after = runner.get_metrics()
    assert before["num_episodes"].peek() == 6 and after["num_episodes"].peek() == 18
    assert math.isnan(after["success_rate"].peek())  # branches begin on the way, so they say nothing of success


def test_a_branch_of_an_ended_episode_is_that_episode(make):
    runner = make(lambda prompt, w: "Is it big?", env=World)
    (e,) = runner.sample(num_episodes=1)
    ((branch,),) = play_branches([(e, len(e))], 1, np.random.default_rng(0), runner.play_forks)
    assert branch.get_observations() == e.get_observations()


def test_an_environment_that_does_not_repeat_itself_is_dropped_and_counted(make):
    class Moody(gym.Env):
        def __init__(self):
            self.observation_space = self.action_space = TextSpace()
            self.said = 0

        def reset(self, *, seed=None, options=None):
            self.turn = 0
            return "Go.", {}

        def step(self, action):
            self.said, self.turn = self.said + 1, self.turn + 1
            return f"reply {self.said}", 0.0, self.turn == 3, False, {}

    runner = make(lambda prompt, w: "a", env=Moody, num_envs_per_env_runner=1)
    (e,) = runner.sample(num_episodes=1)
    assert play_branches([(e, 2)], 2, np.random.default_rng(0), runner.play_forks) == [[]]
    assert int(runner.get_metrics()["branch_mismatches"]) == 2
