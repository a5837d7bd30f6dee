"""The EnvRunner on a scripted engine: slots, episodes, seeds, and environments that misbehave."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import gymnasium as gym
import pytest
from faulty import Faulty
from scripted_engine import ScriptedEngine, dialogue_of

from rllib_nlac.envs.base import EpisodeLost
from rllib_nlac.envs.twenty_questions import TwentyQuestions, oracle_action
from rllib_nlac.episode import GENERATION, MESSAGES, task_seed_of
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.sampling.player import TextPlayer
from rllib_nlac.types import Message, dialogue_after

ORACLE_WORLD = TwentyQuestions(num_objects=16, num_attributes=8, max_turns=6)


def oracle(prompt: str, weights) -> str:
    return oracle_action(ORACLE_WORLD, dialogue_of(prompt))


@pytest.fixture()
def make(config, chat):
    def make(answer=oracle, env_creator=None, **settings):
        own = config.copy(copy_frozen=False)
        for key, value in settings.items():
            setattr(own, key, value)
        runner = TextEnvRunner(config=own, worker_index=0, **({"env_creator": env_creator} if env_creator else {}))
        runner.attach(ScriptedEngine(chat, answer, version=7))
        return runner

    return make


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_whole_episodes_exactly_as_many_as_asked_for(make, slots):
    episodes = make(num_envs_per_env_runner=slots).sample(num_episodes=20)
    assert len(episodes) == 20 and all(episode.is_done for episode in episodes)
    assert all(episode.get_return() == 1.0 for episode in episodes)


def test_episodes_do_not_depend_on_the_number_of_slots(make):
    played = [make(num_envs_per_env_runner=slots).sample(num_episodes=12) for slots in (1, 5)]
    assert [e.get_observations() for e in played[0]] == [e.get_observations() for e in played[1]]
    assert [e.get_actions() for e in played[0]] == [e.get_actions() for e in played[1]]


def test_sampled_ids_prompts_and_versions_are_kept(make, chat):
    for episode in make().sample(num_episodes=5):
        for t, action in enumerate(episode.get_actions()):
            generation = episode.get_extra_model_outputs(GENERATION, t)
            assert chat.decode(generation.token_ids) == action and generation.weight_version == 7
            assert generation.prompt_ids == chat.prompt_ids(episode.get_extra_model_outputs(MESSAGES, t))


def test_training_never_plays_the_same_tasks_twice(make):
    runner = make()
    first, second = (runner.sample(num_episodes=12) for _ in range(2))
    for told in (lambda e: e.id_, task_seed_of):  # two of the world's 16 objects may well be the same
        assert len({told(e) for e in first}) == len({told(e) for e in second}) == 12
        assert not {told(e) for e in first} & {told(e) for e in second}


def test_tokens_are_booked_to_play_or_to_evaluation(make):
    """By the role of each request, whoever plays: an evaluation's runner, or any that is given tasks."""
    for evaluation, role in ((False, "play"), (True, "evaluation")):
        runner = make(in_evaluation=evaluation)
        runner.sample(num_episodes=3)
        assert {request.role for _, request in runner.engine.requests} == {role}
    runner = make()
    runner.sample_tasks(range(3))
    assert {request.role for _, request in runner.engine.requests} == {"evaluation"}


def test_metrics(make):
    runner = make()
    runner.sample(num_episodes=10)
    runner.sample(num_episodes=6)
    metrics = runner.get_metrics()
    assert float(metrics["success_rate"]) == 1.0 and int(metrics["num_episodes"]) == 16
    assert int(metrics["stop_reason_success"]) == 16 and int(metrics["action_parse_failures"]) == 0


def test_turns_whose_prompts_are_made_anew_are_counted(make):
    """None where the dialogue grows; with a window, those from which it has moved on."""
    for settings, expected in (({}, 0), ({"history_turns": 2}, 3)):
        runner = make(answer=lambda prompt, weights: "Is it big?", **settings)
        (episode,) = runner.sample(num_episodes=1)
        assert len(episode) == 6 and int(runner.get_metrics()["retokenised_turns"]) == expected


def test_the_prefix_cache_is_in_the_metrics(make, monkeypatch):
    """The share of all prompts' tokens, not the mean of the shares."""
    runner = make()
    answer = runner.engine._generation
    monkeypatch.setattr(
        runner.engine,
        "_generation",
        lambda *a: replace(answer(*a), cached_tokens=len(a[0].prompt_ids) if len(a[0].prompt_ids) > 30 else 0),
    )
    (episode,) = runner.sample(num_episodes=1)
    sizes = [len(generation.prompt_ids) for generation in episode.get_extra_model_outputs(GENERATION)]
    expected = sum(size for size in sizes if size > 30) / sum(sizes)
    assert 0 < expected < 1 and float(runner.get_metrics()["prefix_cache_hit_rate"]) == pytest.approx(expected)


def test_turns_that_end_together_are_encoded_and_asked_for_together(make, chat):
    """Fails where each is asked for alone, so that an engine far away is called once a turn."""
    runner = make(num_envs_per_env_runner=6)
    asked: list[int] = []
    submit, poll = runner.engine.submit, runner.engine.poll
    runner.engine.submit = lambda requests: asked.append(len(requests)) or submit(requests)

    def poll_all(patience_s=None):
        finished = []
        while some := poll():
            finished += some
        return finished

    runner.engine.poll = poll_all
    runner.sample(num_episodes=6)
    assert asked[0] == 6 and len(asked) <= 6


def test_an_empty_generation_reaches_the_environment_as_an_empty_action_and_is_counted(make):
    runner = make(lambda prompt, weights: "")
    (episode,) = runner.sample(num_episodes=1)
    assert episode.get_observations()[1] == "I do not know." and len(episode) == 6
    assert int(runner.get_metrics()["action_parse_failures"]) == 6


def test_react_sends_only_the_action_part(make):
    runner = make(
        lambda prompt, weights: "Thought: dog? ship?\nAction: Is it a dog?", action_format="react", max_action_tokens=24
    )
    (episode,) = runner.sample(num_episodes=1)
    assert episode.get_observations()[1] in ("No.", "Correct!") and episode.get_actions()[0].startswith("Thought")


def test_an_environment_that_raises_loses_its_episode_and_nothing_else(make):
    runner = make(lambda *_: "x", env_creator=lambda context: Faulty(fails=7), num_envs_per_env_runner=4)
    episodes = runner.sample(num_episodes=15)
    assert len(episodes) == 15 and all(episode.is_done for episode in episodes)
    assert int(runner.get_metrics()["env_failures"]) > 0


def test_an_environment_that_always_raises_ends_with_its_own_error(make):
    runner = make(lambda *_: "x", env_creator=lambda context: Faulty(fails=1), num_envs_per_env_runner=1)
    with pytest.raises(RuntimeError, match=r"failed 21 times in a row.*OSError: the simulator fell over"):
        runner.sample(num_episodes=2)


def test_environments_that_each_fail_once_end_no_run(make):
    """Fails where as many failures are borne by a hundred environments as by one."""

    class FailsAtFirst(Faulty):
        resets = 0

        def reset(self, *, seed=None, options=None):
            FailsAtFirst.resets += 1
            if FailsAtFirst.resets <= 40:
                raise OSError("still starting")
            return super().reset(seed=seed)

    runner = make(lambda *_: "x", env_creator=lambda context: FailsAtFirst(fails=10**9), num_envs_per_env_runner=32)
    assert len(runner.sample(num_episodes=32)) == 32 and int(runner.get_metrics()["env_failures"]) == 40


@pytest.mark.parametrize("threads", [0, 2])
def test_every_environment_is_closed_once_it_is_replaced_or_the_run_ends(make, threads):
    made, closed = [], []

    class Closed(Faulty):
        def __init__(self):
            super().__init__(fails=7)
            made.append(self)

        def close(self):
            closed.append(self)
            raise LookupError("it is broken")

    runner = make(lambda *_: "x", env_creator=lambda context: Closed(), num_envs_per_env_runner=4, env_threads=threads)
    assert len(runner.sample(num_episodes=10)) == 10
    assert len(closed) == len(made) - 4 > 0 and not set(closed) & {slot.env for slot in runner.player.slots}
    runner.stop()
    assert len(closed) == len(made) and set(closed) == set(made)


@pytest.mark.parametrize("last", ["raises", "is no text"])
def test_an_environment_that_fails_at_every_end_ends_with_its_own_error(make, last):
    """Fails where a step that goes well makes up for all episodes that were lost."""

    class FailsAtTheEnd(Faulty):
        def step(self, action):
            self.number += 1
            if self.number == 3 and last == "raises":
                raise LookupError("no score")
            return ("Hm." if self.number < 3 else None), 0.0, self.number == 3, False, {}

        def reset(self, *, seed=None, options=None):
            self.number = 0
            return super().reset(seed=seed)

    runner = make(lambda *_: "x", env_creator=lambda context: FailsAtTheEnd(fails=10**9))
    with pytest.raises(
        RuntimeError, match=r"lost 2\d\d episodes in a row and brought none to its end.*(no score|must be a str)"
    ):
        runner.sample(num_episodes=2)


@pytest.mark.parametrize(
    ("how", "episodes", "counted"), [("discards", 60, "episodes_discarded"), ("raises", 300, "env_failures")]
)
def test_an_environment_that_loses_every_second_episode_ends_no_run(make, how, episodes, counted):
    """Fails where an episode that comes to its end does not make up for those that were lost before it."""

    class LosesEverySecond(Faulty):
        number = 0  # of the episode, whichever environment plays it

        def reset(self, *, seed=None, options=None):
            LosesEverySecond.number += 1
            self.turns = 0
            return super().reset(seed=seed)

        def step(self, action):
            self.turns += 1
            ends = self.turns == 2
            lost = ends and LosesEverySecond.number % 2 == 1
            if lost and how == "raises":
                raise OSError("the simulator fell over")
            return "Hm.", 0.0, ends, False, {"discard": lost}

    runner = make(lambda *_: "x", env_creator=lambda context: LosesEverySecond(fails=10**9), num_envs_per_env_runner=1)
    assert len(runner.sample(num_episodes=episodes)) == episodes
    assert int(runner.get_metrics()[counted]) >= episodes - 1


def test_what_ends_a_rollout_leaves_nothing_with_the_engine(make, monkeypatch):
    runner = make(num_envs_per_env_runner=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TextPlayer, "record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        runner.sample(num_episodes=8)
    assert runner.engine.poll() == []
    assert len(runner.sample(num_episodes=8)) == 8


@pytest.mark.parametrize("threads", [0, 2])
def test_an_episode_that_is_lost_in_its_reset_is_left_out_and_its_environment_kept(make, threads):
    """Fails where the same start is tried again in new environments until the run ends."""
    made, lost = [], set()

    class LosesSome(Faulty):
        def __init__(self):
            super().__init__(fails=10**9)
            made.append(self)

        def reset(self, *, seed=None, options=None):
            if seed % 2 == 0:
                lost.add(seed)
                raise EpisodeLost("page_timeout", "the page hangs")
            return super().reset(seed=seed)

    runner = make(lambda *_: "x", env_creator=lambda context: LosesSome(), num_envs_per_env_runner=2, env_threads=threads)
    episodes = runner.sample(num_episodes=10)
    metrics = runner.get_metrics()
    assert len(episodes) == 10 and len(made) == 2 and "env_failures" not in metrics
    assert int(metrics["episodes_discarded"]) == int(metrics["stop_reason_page_timeout"]) == len(lost) > 0


def test_an_episode_that_its_reset_discards_is_left_out(make):
    """Fails where only a step's word counts, and a simulator that fails at once is played and learned from."""
    told = []

    class Fails(Faulty):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            told.append(seed % 2 == 0)
            return observation, {**info, "discard": told[-1], "stop_reason": "user_failed"}

    runner = make(lambda *_: "x", env_creator=lambda context: Fails(fails=10**9), num_envs_per_env_runner=2)
    episodes, metrics = runner.sample(num_episodes=10), runner.get_metrics()
    assert len(episodes) == int(metrics["num_episodes"]) == told.count(False) == 10
    assert int(metrics["episodes_discarded"]) == int(metrics["stop_reason_user_failed"]) == told.count(True) > 0


def test_an_observation_that_is_no_text_counts_as_a_failure(make):
    runner = make(lambda *_: "x", env_creator=lambda context: Faulty(fails=10**9, observation=3.5))
    with pytest.raises(RuntimeError, match="the observation must be a str, and it is a float"):
        runner.sample(num_episodes=1)


def test_a_dialogue_that_outgrows_the_context_is_truncated(make):
    Faulty.steps = 0
    runner = make(lambda *_: "x", env_creator=lambda context: Faulty(fails=10**9, observation="word " * 100))
    Faulty.steps = 1
    episodes = runner.sample(num_episodes=2)
    reasons = [episode.get_infos(-1).get("stop_reason") for episode in episodes if episode.is_truncated]
    assert reasons and set(reasons) == {"context_limit"}


def test_a_dialogue_that_outgrows_the_context_is_no_success_whatever_it_was_paid(make):
    class Pays(Faulty):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return (observation, 1.0, *rest)

    runner = make(lambda *_: "x", env_creator=lambda context: Pays(fails=10**9, observation="word " * 100))
    Faulty.steps = 1
    cut_off = [e for e in runner.sample(num_episodes=2) if e.get_infos(-1).get("stop_reason") == "context_limit"]
    assert cut_off and all(episode.get_infos(-1)["success"] is False for episode in cut_off)


def test_a_configuration_whose_first_prompts_never_fit_is_an_error(make):
    with pytest.raises(RuntimeError, match=r"lost \d+ episodes in a row \(context_limit\).*exceeds the context of 512"):
        make(max_action_tokens=511).sample(num_episodes=1)


def test_an_environment_that_is_not_text_is_refused(make):
    with pytest.raises(ValueError, match="NLAC needs text"):
        make(env_creator=lambda context: gym.make("CartPole-v1"))


def test_sampling_without_an_engine(config):
    with pytest.raises(RuntimeError, match="attach"):
        TextEnvRunner(config=config, worker_index=0).sample(num_episodes=1)


class Slow(TwentyQuestions):
    """Waits in every step, as somebody behind an endpoint does, and counts how many wait at the same time."""

    waiting = most = 0
    lock = threading.Lock()

    def step(self, action):
        with Slow.lock:
            Slow.waiting += 1
            Slow.most = max(Slow.most, Slow.waiting)
        time.sleep(0.01)
        with Slow.lock:
            Slow.waiting -= 1
        return super().step(action)


def test_threads_change_nothing_in_what_is_played(make):
    played = {}
    for threads in (0, 8):
        Slow.most = 0
        creator = lambda context: Slow(num_objects=16, num_attributes=8, max_turns=6)  # noqa: E731
        episodes = make(env_creator=creator, num_envs_per_env_runner=8, env_threads=threads).sample(num_episodes=24)
        played[threads] = [(e.id_, e.get_observations(), e.get_actions(), e.get_return()) for e in episodes]
        assert (Slow.most > 1) == (threads > 0)  # without threads one after the other
    assert played[0] == played[8]


def test_as_many_environments_as_there_are_threads_are_stepped_side_by_side(make):
    """No step ends before all eight have begun. Fails where fewer are at work at the same time."""
    meeting = threading.Barrier(8, timeout=60)

    class Meets(Faulty):
        def reset(self, *, seed=None, options=None):
            self.turns = 0
            return super().reset(seed=seed)

        def step(self, action):
            meeting.wait()
            self.turns += 1
            return "Hm.", 0.0, self.turns == 3, False, {}

    creator = lambda context: Meets(fails=10**9)  # noqa: E731
    runner = make(lambda *_: "x", env_creator=creator, num_envs_per_env_runner=8, env_threads=8)
    assert [len(episode) for episode in runner.sample(num_episodes=8)] == [3] * 8
    assert "env_failures" not in runner.get_metrics()


def test_threads_and_environments_that_raise(make):
    Faulty.steps = 0
    runner = make(lambda p, w: "x", env_creator=lambda context: Faulty(7), num_envs_per_env_runner=4, env_threads=3)
    assert len(runner.sample(num_episodes=10)) == 10 and int(runner.get_metrics()["env_failures"]) > 0


def test_an_episode_ends_at_its_limit_of_generated_tokens(make, chat):
    length = len(chat.encode("Is it big?"))
    runner = make(lambda prompt, weights: "Is it big?", max_response_tokens=3 * length)
    (episode,) = runner.sample(num_episodes=1)
    assert len(episode) == 3 and episode.is_truncated and episode.get_infos(-1)["stop_reason"] == "response_limit"
    assert episode.get_infos(-1)["success"] is False


def test_of_a_long_dialogue_the_opening_and_the_latest_turns_are_shown(make, chat):
    """What the policy sees next is also the next state that a backup asks for; the stored episode keeps everything."""

    def play(**settings):
        return make(answer=lambda prompt, weights: "Is it big?", **settings).sample(num_episodes=1)[0]

    whole, window = play(), play(history_turns=2)
    assert whole.get_observations() == window.get_observations() and len(window) == 6
    for t in range(6):
        full, shown = (episode.get_extra_model_outputs(MESSAGES, t) for episode in (whole, window))
        opening = len(whole.get_extra_model_outputs(MESSAGES, 0))
        assert shown == (*full[:opening], *full[opening:][-4:])
        assert window.get_extra_model_outputs(GENERATION, t).prompt_ids == chat.prompt_ids(shown)
    for t in range(5):
        step = transition_at("TwentyQuestions", window, t, first_id=0)
        assert step.next_state == window.get_extra_model_outputs(MESSAGES, t + 1)
    assert dialogue_after(whole.get_extra_model_outputs(MESSAGES, 5), "a", "o") == (
        *whole.get_extra_model_outputs(MESSAGES, 5),
        Message("assistant", "a"),
        Message("user", "o"),
    )
