"""The whole algorithm with real vLLM, DeepSpeed and Ray."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rllib_nlac import nlac as nlac_module
from rllib_nlac.ablations import ABLATIONS
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.learner.batch import CRITIC, POLICY, TrainingSequence, shard_evenly, to_multi_agent_batch
from rllib_nlac.learner.group import on_every_learner
from rllib_nlac.learner.losses import priorities
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Weights


@pytest.fixture()
def small(config):
    """A configuration whose iteration takes a second or two."""
    config.training(episodes_per_iteration=16, train_batch_size_per_learner=48, minibatch_size=24, lr=1e-3, tau=0.5)
    config.training(replay_buffer_config={"capacity": 5000, "alpha": 0.6, "beta": 0.4, "beta_final_timesteps": 1000})
    config.num_envs_per_env_runner = 16
    return config


@pytest.fixture()
def algorithm(small, ray_session, lent_engine):
    algorithm = small.build_algo()
    yield algorithm
    algorithm.stop()


def test_an_iteration_collects_learns_and_syncs(algorithm, tmp_path):
    before = algorithm.learner_group._learner.export_weights()
    results = [algorithm.train() for _ in range(2)]
    after = algorithm.learner_group._learner.export_weights()
    for which in (Weights.POLICY, Weights.TARGET):
        assert any(not torch.equal(before[which][name], after[which][name]) for name in before[which])
    first, second = results
    assert first["env_runners"]["num_episodes"] == 16 and second["env_runners"]["num_episodes_lifetime"] == 32
    # The engine answered with the weights of the last sync: its log-probabilities are the learner's.
    assert first["logprob_gap"] < 1e-3 and second["logprob_gap"] < 1e-3
    assert (first["sync"]["weight_version"], second["sync"]["weight_version"]) == (2, 3)
    assert second["learners"]["default_policy"]["num_gradient_steps"] == 2
    assert second["language_stages"]["num_engine_calls"] == 3
    assert second["replay_buffer"]["staleness_max"] == 1 and second["replay_buffer"]["num_episodes"] == 32
    for group, keys in EXPECTED_METRICS.items():
        for key in keys:
            assert math.isfinite(float(second[group][key])), (group, key)


EXPECTED_METRICS = {
    "env_runners": ("success_rate", "episode_return_mean", "episode_len_mean", "tokens_per_s", "action_parse_failures"),
    "language_stages": (
        "verdict_yes_rate",
        "predicted_success_rate",
        "refinement_changed_rate",
        "policy_trained_rate",
        "unparsed_target_rate",
        "unparsed_future_rate",
        "unparsed_critique_rate",
        "unparsed_action_rate",
        "num_generated_tokens",
    ),
    "replay_buffer": (
        "num_transitions",
        "num_bytes",
        "priority_mean",
        "importance_weight_mean",
        "success_rate",
        "staleness_mean",
    ),
    "sync": ("time_s", "num_bytes"),
    "seconds": ("play", "replay", "waves", "logprob_gap", "learner", "sync"),
}


def test_the_engines_first_weights_are_no_part_of_an_iterations_time(algorithm):
    """They are given in setup(), before its clock: with them the parts of a first iteration added up to more than the whole."""
    first, second = algorithm.train()["seconds"], algorithm.train()["seconds"]
    assert first["first_sync"] > 0 and first["sync"] > 0
    assert second["sync"] > 0 and not second.get("first_sync", 0.0) > 0  # 0, NaN or not there


def test_priorities_come_from_the_losses(algorithm):
    algorithm.train()
    sample = algorithm.local_replay_buffer.sample_transitions(200, beta=0.0)
    priorities = {node: algorithm.local_replay_buffer._sum_segment[node] for node in sample.nodes}
    assert len(set(priorities.values())) > 10


def test_one_transition_an_iteration_is_tensorboard_text(algorithm):
    algorithm.train()
    events = EventAccumulator(algorithm.logdir)
    events.Reload()
    (entry,) = events.Tensors("transition/text_summary")
    text = entry.tensor_proto.string_val[0].decode()
    assert all(part in text for part in ("State", "Action", "Futures", "Critique", "Refined action", "Bellman target"))


def test_same_seed_same_run(small, ray_session, lent_engine):
    runs = []
    for _ in range(2):
        algorithm = small.copy(copy_frozen=False).build_algo()
        algorithm.train()
        runs.append(algorithm.learner_group._learner.export_weights()[Weights.POLICY])
        algorithm.stop()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_checkpoint_restores_weights_target_buffer_and_engine(algorithm, tmp_path):
    algorithm.train()
    path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    weights = algorithm.learner_group._learner.export_weights()
    drawn = [t.action for t in algorithm.local_replay_buffer.sample_transitions(50, beta=0.4).transitions]
    other = Algorithm.from_checkpoint(path)
    try:
        restored = other.learner_group._learner.export_weights()
        for which in (Weights.POLICY, Weights.TARGET):
            assert all(torch.equal(weights[which][name], restored[which][name]) for name in weights[which])
        assert [t.action for t in other.local_replay_buffer.sample_transitions(50, beta=0.4).transitions] == drawn
        assert other.weight_version == algorithm.weight_version and other.iteration == 1
        assert other.train()["logprob_gap"] < 1e-3
    finally:
        other.stop()


def test_the_policys_training_prompt_is_the_one_that_the_engine_saw(algorithm):
    algorithm.train()
    buffer = algorithm.local_replay_buffer
    sample = buffer.sample_transitions(20, beta=0.0)
    targets, refinements, _ = algorithm.stages.run(sample.transitions)
    sequences = algorithm.sequences_of(sample, targets, refinements)
    for sequence in sequences:
        t = sample.transitions[sequence.item]
        prompt = t.state if sequence.role else algorithm.stages.prompts_for(t.env).predict_messages(t.state, t.action)
        assert tuple(sequence.prompt_ids) == algorithm.chat.prompt_ids(prompt)
    for role in (0, 1):
        weights = [s.weight for s in sequences if s.role == role]
        assert sum(weights) == pytest.approx(
            float(np.mean([sample.weights[s.item] for s in sequences if s.role == role])), rel=1e-5
        )


def test_the_coefficient_scales_the_policys_loss(algorithm):
    algorithm.train()
    sample = algorithm.local_replay_buffer.sample_transitions(20, beta=0.0)
    targets, refinements, _ = algorithm.stages.run(sample.transitions)
    plain = {(s.role, s.item): s.weight for s in algorithm.sequences_of(sample, targets, refinements)}
    algorithm.config._is_frozen = False
    algorithm.config.training(policy_loss_coeff=3.0)
    scaled = {(s.role, s.item): s.weight for s in algorithm.sequences_of(sample, targets, refinements)}
    assert scaled == pytest.approx({key: weight * (3 if key[0] == POLICY else 1) for key, weight in plain.items()})
    assert {role for role, _ in plain} == {CRITIC, POLICY}


def test_a_refinement_of_little_weight_counts_little_in_its_minibatch(algorithm):
    algorithm.train()
    sample = algorithm.local_replay_buffer.sample_transitions(20, beta=0.0)
    targets, refinements, _ = algorithm.stages.run(sample.transitions)
    light = {i for i, r in enumerate(refinements) if r.generation} - {0, 3, 7}
    refinements = [replace(r, weight=0.25) if i in light else r for i, r in enumerate(refinements)]
    weights = {s.item: s.weight for s in algorithm.sequences_of(sample, targets, refinements) if s.role == POLICY}
    heavy = next(item for item in weights if item not in light)
    for item in light:
        relative = sample.weights[item] / sample.weights[heavy]
        assert weights[item] == pytest.approx(0.25 * relative * weights[heavy], rel=1e-5)
    assert sum(weight / sample.weights[item] for item, weight in weights.items()) == pytest.approx(1.0, rel=1e-5)


def test_where_a_part_is_judged_the_priorities_are_the_critics(small, ray_session, lent_engine, monkeypatch):
    """Else what happened to be judged would be drawn more often."""
    algorithm = small.training(judged_fraction=0.5).build_algo()
    seen = []
    monkeypatch.setattr(nlac_module, "priorities", lambda *losses: seen.append(losses) or priorities(*losses))
    try:
        algorithm.train()
    finally:
        algorithm.stop()
    ((critic, policy),) = seen
    assert np.isnan(policy).all() and np.isfinite(critic).any()


@pytest.mark.parametrize("name", ["NLAC_FrozenCritic", "NLAC_ConstantFutures"])
def test_without_a_trained_critic_what_is_replayed_stays_in_replay(small, ray_session, lent_engine, name):
    """Fails where a batch of which no critic's loss is known is hardly ever drawn again."""
    small.training(judged_fraction=0.5)
    algorithm = ABLATIONS[name](small)
    found = []
    keep = algorithm.prioritise
    algorithm.prioritise = lambda sample, values: found.append(values) or keep(sample, values)
    try:
        algorithm.train()
        kept = algorithm.local_replay_buffer.priorities
    finally:
        algorithm.stop()
    (values,) = found
    assert 0.4 < np.isnan(values).mean() < 0.6  # those that were not judged
    assert np.nanmedian(values) > 0.01 and np.nanstd(values) > 0 and np.median(kept) > 0.01


def test_each_epoch_trains_on_every_transition_once(algorithm):
    algorithm.train()
    sample = algorithm.local_replay_buffer.sample_transitions(50, beta=0.0)
    targets, refinements, _ = algorithm.stages.run(sample.transitions)
    once = [(s.role, s.item, s.answer_ids) for s in algorithm.sequences_of(sample, targets, refinements)]
    algorithm.config._is_frozen = False
    algorithm.config.num_epochs = 3
    sequences = algorithm.sequences_of(sample, targets, refinements)
    steps = range(math.ceil(50 / algorithm.config.minibatch_size))
    for epoch in range(3):
        numbers = [epoch * len(steps) + step for step in steps]
        own = [s for s in sequences if s.minibatch in numbers]
        assert sorted((s.role, s.item, s.answer_ids) for s in own) == sorted(once)
        for number in numbers:
            assert sum(s.weight for s in own if s.minibatch == number and s.role == CRITIC) == pytest.approx(1.0)
    assert len({tuple(s.item for s in sequences if s.minibatch == number) for number in (0, len(steps), 2 * len(steps))}) == 3


@pytest.mark.parametrize(
    "ablation",
    [
        {"num_refinements": 0},
        {"n_step": 100},
        {"tau": 1.0},
        {"num_futures": 3},
        {"num_refinements": 2},
        {"replay_buffer_config": {"alpha": 0.0}},
        {"judged_fraction": 0.3, "num_next_actions": 3},
        {"preset": "long_horizon", "num_epochs": 2},
        *ABLATIONS,
    ],
    ids=lambda change: change if isinstance(change, str) else "-".join(change),
)
def test_every_ablation_runs(small, ray_session, lent_engine, ablation):
    algorithm = ABLATIONS[ablation](small) if isinstance(ablation, str) else small.update_from_dict(ablation).build_algo()
    try:
        result = algorithm.train()
        assert result["learners"]["default_policy"]["num_gradient_steps"] >= 1 and result["logprob_gap"] < 1e-3
    finally:
        algorithm.stop()


@pytest.mark.parametrize("broken", ["", "Optimal: hm"])
def test_a_run_survives_an_iteration_in_which_nothing_parses(algorithm, broken):
    ids = algorithm.chat.encode(broken)
    generate = algorithm.engine.generate

    def garbage(requests):
        return [replace(g, token_ids=ids, logprobs=np.zeros(len(ids), np.float32)) for g in generate(requests)]

    algorithm.engine.generate = garbage
    result = algorithm.train()
    assert result["language_stages"]["policy_trained_rate"] == 0.0 and result["language_stages"]["unparsed_target_rate"] == 1.0
    algorithm.engine.generate = generate
    assert algorithm.train()["language_stages"]["policy_trained_rate"] > 0.5


def test_state_pickles(algorithm):
    algorithm.train()
    assert pickle.loads(pickle.dumps(algorithm.get_state()))["nlac"]["weight_version"] == 2


class TestRemote:
    @pytest.mark.parametrize(
        ("stage", "lora"),
        [
            (0, None),
            pytest.param(2, None, marks=pytest.mark.long),
            pytest.param(3, None, marks=pytest.mark.long),
            pytest.param(3, {"rank": 8}, marks=pytest.mark.long),
        ],
    )
    def test_two_learners_give_the_update_of_one(self, small, ray_session, stage, lora):
        """To 1e-5 of the step. Adam's usual epsilon turns the rounding of a gradient near 0 into the sign of a full step,
        which would hide everything below 1e-2. With ZeRO each learner holds half of the target weights, too. The second
        gradient step has no sequence for the policy."""
        sequences = [
            TrainingSequence((3, *range(10, 12 + i)), (20, 21 + i, 1), i % 2 if i < 5 else 0, i, i // 5, 0.1 * (i + 1))
            for i in range(9)
        ]
        updated, norms, steps = [], [], []
        for learners in (0, 2):
            config = small.copy(copy_frozen=False).learners(num_learners=learners)
            config.language(max_tokens_per_micro_batch=16, lora=lora).deepspeed(
                deepspeed_config={"zero_optimization": {"stage": stage}}
            ).training(optimizer={"eps": 1e-3}, tau=0.5)
            spec = config.get_multi_rl_module_spec(spaces={"default_policy": (TextSpace(), TextSpace())})
            group = config.build_learner_group(rl_module_spec=spec)
            before = export_weights(group)[Weights.POLICY]
            batch = to_multi_agent_batch(shard_evenly(sequences, max(learners, 1)), env_steps=9)
            results = group.update(batch=batch, timesteps={"num_env_steps_sampled_lifetime": 0})
            norms += [float(result["default_policy"]["gradient_norm"].peek()) for result in results]
            steps += [int(result["default_policy"]["num_gradient_steps"].peek()) for result in results]
            updated.append(export_weights(group))
            shares = on_every_learner(group, lambda learner: sum(share.numel() for share in learner.target.state.values()))
            total = sum(tensor.numel() for tensor in before.values())
            assert shares == (
                [total] * max(learners, 1) if stage == 0 or not learners else pytest.approx([total / 2] * 2, rel=0.01)
            )
            group.shutdown()
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
        assert steps == [2, 2, 0]  # of all learners together those of one
        for weights in (Weights.POLICY, Weights.TARGET):
            one, two = updated[0][weights], updated[1][weights]
            difference = sum(((one[name] - two[name]) ** 2).sum() for name in before)
            step = sum(((one[name] - before[name]) ** 2).sum() for name in before)
            assert float(step) > 0 and float((difference / step) ** 0.5) < 1e-5
