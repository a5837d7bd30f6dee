"""Seeds of tasks, turns, runners and evaluations; and the steps that a stored episode is cut into."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from scripted_engine import ScriptedEngine

from rllib_nlac.episode import GENERATION, MESSAGES, TASK, TASK_SEED
from rllib_nlac.replay.buffer import transition_at
from rllib_nlac.sampling.branches import play_branches
from rllib_nlac.sampling.env_runner import TextEnvRunner
from rllib_nlac.types import hash_seed


@pytest.fixture()
def make(config, chat):
    def make(answer=lambda prompt, weights: "Is it big?", **settings):
        own = config.copy(copy_frozen=False)
        for key, value in settings.items():
            setattr(own, key, value)
        runner = TextEnvRunner(config=own, worker_index=0)
        runner.attach(ScriptedEngine(chat, answer))
        return runner

    return make


class TestSeeds:
    def starts(self, make, count, **settings):
        worker = settings.pop("worker", 0)
        runner = make(**settings)
        runner.worker_index = worker
        return [runner._next_start() for _ in range(count)]

    @pytest.mark.parametrize("seed", [0, 3, None])
    def test_evaluation_plays_no_task_of_training_and_samples_with_no_seed_of_it(self, make, config, seed):
        """Fails with equal seeds, in this process and on remote runners, also where no seed was given."""
        config.seed = seed
        runner = make(num_envs_per_env_runner=1)
        evaluation = runner.sample_tasks(range(12), attempts=2)
        tasks = {episode.custom_data[TASK_SEED] for episode in evaluation}
        asked = {request.seed for _, request in runner.engine.requests}
        assert len(tasks) == 12
        for worker in (0, 1, 2):
            training = make(num_envs_per_env_runner=1)
            training.worker_index = worker
            played = training.sample(num_episodes=40)
            assert not tasks & {episode.custom_data[TASK_SEED] for episode in played}
            assert not asked & {request.seed for _, request in training.engine.requests}

    def test_every_turn_is_sampled_with_a_seed_of_its_own(self, make):
        runner = make(num_envs_per_env_runner=3)
        runner.sample(num_episodes=5)
        runner.sample_tasks(range(5), attempts=3)
        seeds = [request.seed for _, request in runner.engine.requests]
        assert len(seeds) == 6 * (5 + 15) and None not in seeds and len(set(seeds)) == len(seeds)

    def test_turns_are_sampled_as_configured(self, make):
        runner = make(action_temperature=0.3, action_top_p=0.7, max_action_tokens=17)
        (episode,) = runner.sample(num_episodes=1)
        prompts = [episode.get_extra_model_outputs(MESSAGES, t) for t in range(len(episode))]
        asked = [request for _, request in runner.engine.requests]
        assert {(r.max_tokens, r.temperature, r.top_p) for r in asked} == {(17, 0.3, 0.7)}
        assert [r.messages for r in asked] == prompts

    @pytest.mark.parametrize("seed", [0, None])
    def test_no_two_runners_and_no_two_runs_share_an_episode(self, make, config, seed):
        """Fails with RLlib's seeds of runners: without a seed all are alike, and runner 2 of seed 0 is runner 1 of seed 1."""
        config.seed = seed
        starts = [start for worker in (0, 1, 2, 3) for start in self.starts(make, 50, worker=worker)]
        config.seed = 1
        starts += [start for worker in (0, 1, 2) for start in self.starts(make, 50, worker=worker)]
        for seeds in ([s.task_seed for s in starts], [s.sampling_seed for s in starts]):
            assert len(set(seeds)) == 350

    def test_the_runner_in_the_algorithms_process_plays_what_it_always_played(self, make):
        starts = self.starts(make, 2)
        assert [(s.name, s.task_seed, s.sampling_seed) for s in starts] == [
            ("0000-0-0000000000", hash_seed(0, 0), hash_seed(0, 0)),
            ("0000-0-0000000001", hash_seed(0, 1), hash_seed(0, 1)),
        ]
        assert (hash_seed(0, 0), hash_seed(0, 1), hash_seed(1_000_000, 7)) == (1484405855, 1982462498, 1646512453)

    def test_episodes_of_a_task_share_its_seed_and_not_their_sampling(self, make):
        starts = self.starts(make, 12, episodes_per_task=4)
        assert [s.task_seed for s in starts] == [starts[4 * (i // 4)].task_seed for i in range(12)]
        assert len({s.task_seed for s in starts}) == 3 and len({s.sampling_seed for s in starts}) == 12

    def test_attempts_share_a_task_and_not_their_sampling(self, make):
        runner = make(num_envs_per_env_runner=2)
        runner.sample_tasks([3, 5], attempts=3)
        episodes = make().sample_tasks([3, 5], attempts=3)
        assert [e.id_ for e in episodes] == [f"task-{t:08d}-{a:04d}" for t in (3, 5) for a in range(3)]
        assert [e.custom_data[TASK] for e in episodes] == [3, 3, 3, 5, 5, 5]
        assert [e.custom_data[TASK_SEED] for e in episodes] == [hash_seed(1_000_000, t) for t in (3, 3, 3, 5, 5, 5)]
        first = [request.seed for _, request in runner.engine.requests if len(request.messages) == 1]
        expected = {hash_seed(hash_seed(1_000_000, 3 * t + a), 0) for t in (3, 5) for a in range(3)}
        assert set(first) == expected

    def test_branches_are_sampled_with_seeds_of_their_own(self, make):
        runner = make(num_envs_per_env_runner=2)
        episodes = runner.sample(num_episodes=2)
        before, rng = len(runner.engine.requests), np.random.default_rng(0)
        for _ in range(2):
            branches = play_branches([(episode, 2) for episode in episodes], 3, rng, runner.play_forks)
            assert [len(own) for own in branches] == [3, 3] and {len(e) for own in branches for e in own} == {6}
            assert [[e.id_ for e in own] for own in branches] == [[f"{e.id_}/2/{i}" for i in range(3)] for e in episodes]
        seeds = [request.seed for _, request in runner.engine.requests]
        assert len(seeds) - before == 2 * 2 * 3 * 4 and len(set(seeds)) == len(seeds)


class TestSteps:
    @pytest.mark.parametrize(
        ("n_step", "lengths"),
        [(1, [0, 0, 0, 0, 0, 0]), (2, [1, 1, 1, 1, 1, 0]), (3, [2, 2, 2, 2, 1, 0]), (9, [5, 4, 3, 2, 1, 0])],
    )
    def test_a_chain_holds_n_stored_steps_and_not_one_more(self, make, n_step, lengths):
        (episode,) = make().sample(num_episodes=1)
        steps = [transition_at("E", episode, t, first_id=70, n_step=n_step) for t in range(6)]
        assert [len(step.following) for step in steps] == lengths
        for t, step in enumerate(steps):
            assert [later.id for later in step.following] == [70 + t + 1 + i for i in range(lengths[t])]
            assert [later.ended for later in step.following] == [t + 1 + i == 5 for i in range(lengths[t])]
            assert all(not later.following for later in step.following)
            assert (step.next_messages is None) is (t == 5)

    def test_rewards_to_go_and_ends(self):
        episode = SingleAgentEpisode(id_="e")
        episode.add_env_reset("Go.", {})
        for t, reward in enumerate((1.0, 2.0, 4.0)):
            outputs = {GENERATION: None, MESSAGES: (f"state {t}",)}
            info = {"success": t == 1}  # of a step on the way nobody asks
            episode.add_env_step(f"o{t}", f"a{t}", reward, info, truncated=t == 2, extra_model_outputs=outputs)
        steps = [transition_at("E", episode, t) for t in range(3)]
        assert [s.returns_to_go for s in steps] == [7.0, 6.0, 4.0] and [s.reward for s in steps] == [1.0, 2.0, 4.0]
        assert [(s.terminated, s.truncated) for s in steps] == [(False, False), (False, False), (False, True)]
        assert [s.episode_success for s in steps] == [False] * 3 and [s.state for s in steps] == [
            (f"state {t}",) for t in range(3)
        ]
        assert [(s.action, s.observation) for s in steps] == [("a0", "o0"), ("a1", "o1"), ("a2", "o2")]
        assert [s.next_messages for s in steps] == [("state 1",), ("state 2",), None]
