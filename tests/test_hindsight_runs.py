"""Whole runs of what learns from hindsight, SDPO, ERL, RLTF-SD and NLAC_Hindsight: they go on exactly where they were, and they
run on several EnvRunners and learners."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from conftest import WORLD

from rllib_nlac import algorithms
from rllib_nlac.episode import task_seed_of
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Weights

NAMES = ("SDPO", "ERL", "RLTF-SD", "NLAC_Hindsight")
FIGURES = ("internalised_rate", "second_attempt_success", "taught_rate", "kl_to_teacher")  # those that an algorithm has


def config_of(name: str):
    config = algorithms.OURS["ERL" if name == "RLTF-SD" else name].get_default_config()
    config.environment("TwentyQuestions", env_config=dict(WORLD)).debugging(seed=0).language(language_model="tiny")
    config.training(lr=1e-3, episodes_per_iteration=16, train_batch_size_per_learner=32, minibatch_size=16)
    config.num_envs_per_env_runner = 16
    return config.training(internalise="advantage") if name == "RLTF-SD" else config


def weights_of(algorithm) -> dict[str, torch.Tensor]:
    """Weights of all roles that the algorithm's learner has, the target's too."""
    exported = export_weights(algorithm.learner_group)
    return {f"{which}/{name}": tensor.clone() for which, state in exported.items() for name, tensor in state.items()}


def facts_of(algorithm, result: dict[str, Any]) -> dict[str, Any]:
    """Everything else that must be the same after an iteration."""
    own = algorithm.own_state()
    buffer = getattr(algorithm, "local_replay_buffer", None)
    drawn = [t.action for t in buffer.sample_transitions(20, beta=0.4).transitions] if buffer is not None else []
    learned = result["learners"]["default_policy"]
    return pickle.loads(
        pickle.dumps(
            {
                **{key: own[key] for key in ("weight_version", "rng", "env_runners")},
                **{key: result["env_runners"][key] for key in ("num_episodes_lifetime", "num_env_steps_sampled_lifetime")},
                **{key: result.get(key) for key in FIGURES},
                "iteration": result["training_iteration"],
                "gradient_norm": learned["gradient_norm"],
                "episodes": [e.id_ for e in buffer.episodes] if buffer is not None else [],
                "drawn": drawn,
            }
        )
    )


@pytest.mark.parametrize("name", NAMES)
def test_2n_iterations_equal_n_and_n_to_the_last_bit(name, ray_session, lent_engine, tmp_path):
    """Fails where the generator of second attempts, the teacher's average, a pool or the optimizer begins anew."""
    algorithm = config_of(name).build_algo()
    try:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        before = weights_of(algorithm)
        result = algorithm.train()
        expected = facts_of(algorithm, result)
        weights = weights_of(algorithm)
    finally:
        algorithm.stop()
    assert any(not torch.equal(weights[key], before[key]) for key in weights)  # something was learned
    assert math.isfinite(expected["gradient_norm"]) and expected["iteration"] == 2
    if name == "NLAC_Hindsight":  # of targets that nobody asked for none failed to parse
        assert math.isnan(result["language_stages"]["unparsed_target_rate"])
    resumed = config_of(name).build_algo()
    try:
        resumed.restore_from_path(path)
        found = facts_of(resumed, resumed.train())
        for key, value in weights_of(resumed).items():
            assert torch.equal(value, weights[key]), key
    finally:
        resumed.stop()
    assert {key: str(value) for key, value in found.items()} == {key: str(value) for key, value in expected.items()}


def on_both_learners(algorithm) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights that each of them trains."""
    return on_every_learner(
        algorithm.learner_group, lambda learner: {key: p.detach().clone() for key, p in learner.trained.named_parameters()}
    )


@pytest.mark.long
def test_sdpo_on_two_learners(ray_session, lent_engine):
    """The first learner teaches, with the average of weights that all of them have."""
    algorithm = config_of("SDPO").learners(num_learners=2).build_algo()
    try:
        result = [algorithm.train() for _ in range(2)][-1]
        assert result["taught_rate"] == 1.0 and math.isfinite(result["kl_to_teacher"]) and result["logprob_gap"] < 1e-3
        exported = export_weights(algorithm.learner_group)
        assert result["sync"]["num_bytes"] == sum(t.numel() * 4 for t in exported[Weights.POLICY].values())  # no engine asks it
        assert exported.keys() == {Weights.POLICY, Weights.TARGET}
        one, two = on_both_learners(algorithm)
        assert all(torch.equal(one[key], two[key]) for key in one)
    finally:
        algorithm.stop()


@pytest.mark.long
def test_erl_on_several_runners_and_two_learners(ray_session, tmp_path):
    """Both runners play, second attempts too; both learners end with the same weights, and the engine plays with them."""
    config = config_of("ERL").env_runners(num_env_runners=2, num_envs_per_env_runner=8).learners(num_learners=2)
    config.engines(num_engines=1, engine_config={"cpu_kv_cache_gib": 0.25, "timeout_s": 300})
    algorithm = config.build_algo()
    try:
        played: list[list] = []
        again: list[list] = []
        collect, attempt = algorithm.collect, algorithm.attempt_again
        algorithm.collect = lambda: played.append(collect()) or played[-1]
        algorithm.attempt_again = lambda notes: again.append(attempt(notes)) or again[-1]
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        result = algorithm.train()
        assert result["logprob_gap"] < 1e-3 and result["env_runners"]["num_episodes_lifetime"] >= 32
        assert result["learners"]["default_policy"]["num_gradient_steps"] >= 1
        one, two = on_both_learners(algorithm)
        assert all(torch.equal(one[key], two[key]) for key in one)
        for episodes in played:
            assert {episode.id_[:5] for episode in episodes} == {"0001-", "0002-"} and len(episodes) == 16
        assert len(again) == 2
        for first, second in zip(played, again, strict=True):
            tasks = {episode.id_: task_seed_of(episode) for episode in first}
            assert {episode.id_[:5] for episode in second} == {"0001-", "0002-"}
            assert all(tasks[episode.id_.removesuffix("/again")] == task_seed_of(episode) for episode in second)
        # Restored, it plays the episodes that came after the checkpoint, on the same runners.
        algorithm.restore_from_path(path)
        algorithm.train()
        assert [(e.id_, task_seed_of(e)) for e in played[2]] == [(e.id_, task_seed_of(e)) for e in played[1]]
    finally:
        algorithm.stop()
