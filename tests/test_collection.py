"""What an EnvRunner reports of its episodes, how many it plays, and what it remembers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import gymnasium as gym
import pytest
from scripted_engine import ScriptedEngine

from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import GENERATION, MESSAGES, episode_success
from rllib_nlac.sampling.env_runner import TextEnvRunner


class Countdown(gym.Env[str, str]):
    """Ends after as many replies as its task says, one to four; only episodes of an even number succeed."""

    observation_space = action_space = TextSpace()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.integers(1, 5))
        return f"{self.length} to go.", {"system_prompt": "Count."}

    def step(self, action):
        self.left -= 1
        info = {"success": self.length % 2 == 0, "stop_reason": f"after_{self.length}", "subgoals": {"two": self.length >= 2}}
        return f"{self.left} to go.", 0.5, self.left == 0, False, {} if self.left else info


@pytest.fixture()
def make(config, chat):
    def make(answer=lambda prompt, weights: "ok", env=Countdown, **settings):
        own = config.copy(copy_frozen=False)
        own.num_envs_per_env_runner = 3
        for key, value in settings.items():
            setattr(own, key, value)
        runner = TextEnvRunner(config=own, worker_index=0, env_creator=lambda context: env())
        runner.attach(ScriptedEngine(chat, answer))
        return runner

    return make


def test_the_metrics_are_those_of_the_episodes(make, chat):
    runner = make()
    episodes = runner.sample(num_episodes=20)
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
    assert values["action_parse_failures"] == 0 and values["tokens_per_s"] > 0 and values["sample_time_s"] > 0
    assert values["tokens_per_s"] * values["sample_time_s"] == pytest.approx(values["num_generated_tokens"])
    assert runner.num_env_steps_sampled_lifetime == sum(lengths)


def test_subgoals_are_shares_of_episodes(make):
    runner = make()
    lengths = [len(episode) for episode in runner.sample(num_episodes=20)]
    reached = float(runner.get_metrics()["subgoals"]["two"])
    assert reached == pytest.approx(sum(length >= 2 for length in lengths) / 20)


def test_branches_count_as_steps_and_not_as_the_policys_success(make):
    runner = make()
    episodes = [episode for episode in runner.sample(num_episodes=12) if len(episode) >= 3][:2]
    runner.get_metrics()
    branches = [branch for own in runner.branch([(episode, 1) for episode in episodes], 2) for branch in own]
    metrics = runner.get_metrics()
    assert float(metrics["num_env_steps_sampled"]) == sum(map(len, branches)) and float(metrics["num_episodes"]) == 4
    assert math.isnan(float(metrics["success_rate"])) and math.isnan(float(metrics["episode_return_mean"]))


def test_a_branch_begins_with_its_prefixs_turns_and_their_generations(make):
    runner = make()
    episode = next(e for e in runner.sample(num_episodes=40) if len(e) == 4)
    ((branch,),) = runner.branch([(episode, 2)], 1)
    assert len(branch) == 4 and branch.get_observations() == episode.get_observations()
    for t in range(4):
        same = branch.get_extra_model_outputs(GENERATION, t) is episode.get_extra_model_outputs(GENERATION, t)
        assert same is (t < 2)
        assert branch.get_extra_model_outputs(MESSAGES, t) == episode.get_extra_model_outputs(MESSAGES, t)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_by_steps_whole_episodes_are_played_until_there_are_enough(make, steps):
    runner = make(num_envs_per_env_runner=1)
    episodes = runner.sample(num_timesteps=steps)
    lengths = [len(episode) for episode in episodes]
    assert sum(lengths) >= steps > sum(lengths[:-1]) and all(episode.is_done for episode in episodes)


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
