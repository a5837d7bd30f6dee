"""What runs ahead of the learner, and what an interrupted iteration leaves behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import rllib_nlac
from rllib_nlac.algorithm.idle import OF_ENGINE, OF_LEARNER, Stopwatch
from rllib_nlac.checkpoints import checkpoint
from rllib_nlac.engine.actor import EngineActor
from rllib_nlac.engine.remote import RemoteEngines
from rllib_nlac.episode import generations_of
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Request


@pytest.fixture()
def small(config):
    """A configuration whose iteration takes a second or two."""
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=24, minibatch_size=12, lr=1e-3, tau=0.5)
    config.training(replay_buffer_config={"beta_final_timesteps": 1000})
    config.num_envs_per_env_runner = 8
    return config


@pytest.fixture()
def apart(small):
    """The same with an engine in a process of its own."""
    return small.engines(num_engines=1, engine_config={"cpu_kv_cache_gib": 0.25, "timeout_s": 120})


@pytest.mark.long
def test_an_evaluation_in_this_process_sees_the_last_sync_whatever_is_played_ahead(apart, ray_session):
    apart.env_runners(num_env_runners=1, max_staleness=1)
    apart.evaluation(evaluation_interval=2, evaluation_duration=8, evaluation_repeats={"tasks": 0})
    algorithm = apart.build_algo()
    played = []
    try:
        algorithm.examine = lambda episodes, group: played.extend(episodes)
        results = [algorithm.train() for _ in range(2)]
        assert [result["collection"]["staleness_max"] for result in results] == [0, 1]
        assert results[1]["evaluation"]["env_runners"]["num_tasks"] == 8
        assert {g.weight_version for episode in played for g in generations_of(episode)} == {algorithm.weight_version}
    finally:
        algorithm.stop()


class TestWaves:
    """``stage_staleness: 1`` with a learner in a process of its own, and the engine in this one."""

    def trained(self, config, slow: str) -> dict:
        """Two iterations of which one part is made slow; what must be the same, and when the parts were at work."""
        algorithm, spans = config.copy(copy_frozen=False).build_algo(), []

        def timed(name, function):
            def work(*arguments, **named):
                started = time.monotonic()
                if name == slow:
                    time.sleep(3)
                result = function(*arguments, **named)
                spans.append((name, started, time.monotonic()))
                return result

            return work

        algorithm.learn = timed("learner", algorithm.learn)
        algorithm.stages.run = timed("waves", algorithm.stages.run)
        try:
            results = [algorithm.train() for _ in range(2)]
            weights = export_weights(algorithm.learner_group)
            ready = algorithm.ahead.ready
        finally:
            algorithm.stop()
        said = [
            [g.token_ids if (g := each.generation) else None for each in part] for part in (ready.targets, ready.refinements)
        ]
        versions = {
            g.weight_version for each in (*ready.targets, *ready.refinements) if (g := each.generation) and not kept(each)
        }
        return {"weights": weights, "said": said, "versions": versions, "spans": spans, "results": results}

    def test_they_run_beside_the_gradient_steps_and_timing_changes_no_number(self, small, ray_session, lent_engine):
        small.training(stage_staleness=1).learners(num_learners=1)
        runs = [self.trained(small, slow) for slow in ("learner", "waves")]
        for run in runs:
            waves, steps = ([span[1:] for span in run["spans"] if span[0] == name] for name in ("waves", "learner"))
            assert len(waves) == 3 and len(steps) == 2  # the first iteration fills what runs ahead
            for (began, ended), (stepped, done) in zip(waves[1:], steps, strict=True):
                assert began < done and stepped < ended  # both at once
            # Of the weights before the second update, which is version 3.
            assert run["versions"] == {2} and run["results"][1]["sync"]["weight_version"] == 3
            assert all(result["logprob_gap"] < 1e-3 for result in run["results"])
            assert all(0 <= share <= 1 for result in run["results"] for share in result["idle"].values())
        slow_learner, slow_waves = (run["results"][1]["idle"] for run in runs)
        assert slow_learner["engine"] > slow_waves["engine"] and slow_learner["learner"] > 0
        assert runs[0]["said"] == runs[1]["said"]
        for which, state in runs[0]["weights"].items():
            assert all(torch.equal(tensor, runs[1]["weights"][which][name]) for name, tensor in state.items())


def kept(each) -> bool:
    """Whether it is the stored turn, which is older."""
    return getattr(each, "kept", False)


class TestIdle:
    def test_an_engine_actor_counts_the_time_without_requests(self):
        class Slow:
            mixes_sets = True

            def submit(self, requests):
                return [0]

            def poll(self, patience_s=None):
                time.sleep(0.3)
                return [(0, "answer")]

        actor = EngineActor(Slow)
        time.sleep(0.2)
        before = actor.seconds_rested()
        assert actor.generate([Request((1,), 1)], {}) == ["answer"]
        after = actor.seconds_rested()
        assert before >= 0.2 and after - before < 0.2  # not the time in which it answered
        time.sleep(0.2)
        assert actor.seconds_rested() - after >= 0.2

    def test_every_part_of_an_iteration_is_the_engines_or_the_learners_work(self):
        """Fails where a part that generates or trains counts as idle; keeping and drawing transitions is neither's."""
        source = "\n".join(path.read_text() for path in Path(rllib_nlac.__file__).parent.rglob("*.py"))
        parts = set(re.findall(r'stage\(self\.metrics, "(\w+)"', source)) | set(re.findall(r'\(SECONDS, "(\w+)"\)', source))
        assert {"play", "waves", "teacher", "branches", "second_attempts"} <= parts
        assert parts - {*OF_ENGINE, *OF_LEARNER} == {"replay"}

    def test_shares_of_what_actors_say_and_of_the_parts_of_an_iteration(self, monkeypatch):
        now, rested = [100.0], [[3.0, 50.0]]
        monkeypatch.setattr("rllib_nlac.algorithm.idle.time.perf_counter", lambda: now[0])
        monkeypatch.setattr(RemoteEngines, "seconds_rested", lambda self: rested[0])
        watches = Stopwatch(RemoteEngines([], 1.0)), Stopwatch(None)
        now[0], rested[0] = 110.0, [7.0, 2.0]  # the second has started again
        seconds = {"play": 1.0, "waves": 2.0, "wave_1": 2.0, "learner": 4.0, "sync": 1.0, "replay": 0.5}
        assert watches[0].shares(seconds) == pytest.approx({"engine": (4 + 2) / 2 / 10, "learner": 0.5})
        assert watches[1].shares(seconds) == pytest.approx({"engine": 0.6, "learner": 0.5})
        rested[0] = None  # one did not answer
        assert watches[0].shares({}) == {"learner": 1.0}


def gap(algorithm) -> float:
    """How far the engine's weights are from the learner's."""
    prompt = algorithm.local_replay_buffer.episodes[0].get_extra_model_outputs("generation", 0).prompt_ids
    (answer,) = algorithm.engine.generate([Request(prompt, 8, seed=1)])
    (own,) = algorithm.learner_group._learner.logprobs_of([answer.prompt_ids], [answer.token_ids])
    return float(np.abs(own - answer.logprobs).max())


class TestInterrupted:
    """Ctrl-C between gradient steps and sync: whatever comes next is done with what was learned."""

    @pytest.fixture()
    def algorithm(self, small, ray_session, lent_engine, monkeypatch):
        small.evaluation(evaluation_duration=8, evaluation_repeats={"tasks": 0})
        algorithm = small.build_algo()
        algorithm.train()

        def interrupted(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("rllib_nlac.algorithm.algorithm.push_weights", interrupted)
            with pytest.raises(KeyboardInterrupt):
                algorithm.train()
        assert algorithm.weight_version == 2 and gap(algorithm) > 1e-2
        yield algorithm
        algorithm.stop()

    def test_the_next_iteration(self, algorithm):
        result = algorithm.train()
        assert result["logprob_gap"] < 1e-3 and result["collection"]["staleness_max"] == 0
        assert algorithm.weight_version == 4 and gap(algorithm) < 1e-3

    def test_a_checkpoint(self, algorithm, tmp_path):
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        assert checkpoint.read_manifest(path)["weight_version"] == algorithm.weight_version == 3 and gap(algorithm) < 1e-3
        algorithm.save_to_path(str(tmp_path / "checkpoint"))
        assert algorithm.weight_version == 3  # nothing is owed any more

    def test_an_evaluation(self, algorithm):
        algorithm.evaluate()
        assert algorithm.weight_version == 3 and gap(algorithm) < 1e-3
