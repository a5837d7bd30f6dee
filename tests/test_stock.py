"""RLlib's own PPO and APPO on text: what is brought to them is right, and they run unchanged."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPO
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_nlac.baselines import stock
from rllib_nlac.baselines.stock import LEAP, NEXT_EPISODES, TextAPPO, TextAPPOConfig, TextPPO, TextPPOConfig
from rllib_nlac.baselines.stock_runner import StockTextEnvRunner
from rllib_nlac.baselines.token_module import PAD, TextToTokens, TokenSequence, TokenValueModule
from rllib_nlac.checkpoints.checkpoint import read_manifest
from rllib_nlac.diagnostics.watch import Watch
from rllib_nlac.engine.shared import NotFiniteError
from rllib_nlac.envs.spaces import TextSpace
from rllib_nlac.episode import GENERATION, MESSAGES
from rllib_nlac.types import Message

WORLD = {"num_objects": 16, "num_attributes": 8, "max_turns": 6}


def fitted(config):
    config.environment("TwentyQuestions", env_config=dict(WORLD))
    config.language(language_model="tiny", max_tokens_per_micro_batch=1024)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=16).learners(num_learners=0).debugging(seed=0)
    return config


@pytest.fixture()
def ppo_config():
    return fitted(TextPPOConfig()).training(lr=1e-3, train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)


@pytest.fixture()
def appo_config():
    config = fitted(TextAPPOConfig()).training(lr=1e-3, train_batch_size_per_learner=64)
    config.env_runners(rollout_fragment_length=4)
    config.reporting(min_time_s_per_iteration=0)
    return config


def test_a_configuration_goes_through_tune(ppo_config):
    """As in ``tune.Tuner("PPO", param_space=config)``. Fails where a key holds a method, bound to a half-made copy."""
    given = TextPPOConfig().update_from_dict(copy.deepcopy(ppo_config.to_dict()))
    pipeline = given.build_learner_connector(TextSpace(), TextSpace())
    assert any(isinstance(connector, TextToTokens) for connector in pipeline.connectors)


@pytest.fixture()
def lent_local_engine(engine, monkeypatch):
    """Runners that would start an engine in their process take the session's."""
    monkeypatch.setattr("rllib_nlac.baselines.stock_runner.local_engine", lambda config, chat: engine)


@pytest.fixture()
def ppo(ppo_config, ray_session, lent_local_engine):
    algorithm = ppo_config.build_algo()
    yield algorithm
    algorithm.stop()


def learner_batch(algorithm, episodes) -> dict[str, torch.Tensor]:
    learner = algorithm.learner_group._learner
    made = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=episodes, shared_data={}, metrics=learner.metrics
    )
    return made["default_policy"]


class TestUnchanged:
    def test_only_the_default_configuration_is_ours(self):
        for ours, theirs in ((TextPPO, PPO), (TextAPPO, APPO)):
            own = {name for name in vars(ours) if not name.startswith(("__", "_abc"))}
            assert own == {"get_default_config"}
            assert ours.training_step is theirs.training_step

    def test_learner_loss_and_connectors_are_rllibs(self, ppo):
        learner = ppo.learner_group._learner
        assert type(learner) is PPOTorchLearner
        names = [type(piece).__name__ for piece in learner._learner_connector.connectors]
        assert names == [
            "AddOneTsToEpisodesAndTruncate",
            "TextToTokens",
            "AddObservationsFromEpisodesToBatch",
            "AddColumnsFromEpisodesToTrainBatch",
            "AddTimeDimToBatchAndZeroPad",
            "AddStatesFromEpisodesToBatch",
            "BatchIndividualItems",
            "NumpyToTensor",
            "GeneralAdvantageEstimation",
        ]


class TestBrokenLosses:
    """Results of iterations with these losses; None: no update came back, and RLlib's logger repeats the loss as NaN."""

    def run(self, monkeypatch, *losses: float | None) -> int:
        """How many iterations passed."""
        root, todo, passed = MetricsLogger(root=True), iter(losses), 0

        def step(self, rllibs) -> dict:
            if (loss := next(todo)) is not None:
                learner = MetricsLogger(root=False)
                learner.log_value(("default_policy", "total_loss"), loss, window=1)
                learner.log_value(("default_policy", "num_module_steps_trained"), 64, reduce="sum")
                root.aggregate([learner.reduce()], key="learners")
            return root.compile()

        monkeypatch.setattr(Watch, "step", step)
        monkeypatch.setattr(stock, "on_every_learner", lambda group, function: [None])  # all weights are finite
        algorithm = TextAPPO.__new__(TextAPPO)
        algorithm._broken_losses, algorithm.learner_group = 0, None
        algorithm.watch, algorithm.config = Watch(algorithm), SimpleNamespace(lr=1e-3, grad_clip=1.0)
        for _ in losses:
            algorithm.step()
            passed += 1
        return passed

    def test_iterations_without_an_update_have_no_loss_that_could_be_broken(self, monkeypatch):
        """Fails where a sample is smaller than a batch, and the learner waits for the next ones."""
        assert self.run(monkeypatch, None, 0.5, None, None, None, None) == 6
        assert self.run(monkeypatch, math.nan, None, None, 0.5, math.nan, math.nan, None, 0.5) == 8

    @pytest.mark.parametrize("losses", [(math.nan,) * 3, (0.5, math.inf, None, math.nan, None, None, math.nan)])
    def test_three_updates_in_a_row_without_a_finite_one_end_the_run(self, monkeypatch, losses):
        with pytest.raises(NotFiniteError, match="the loss was not finite in 3 iterations in a row"):
            self.run(monkeypatch, *losses)


class TestTokenSequence:
    @given(st.lists(st.floats(-8, 0), min_size=1, max_size=6), st.lists(st.floats(-8, 0), min_size=6, max_size=6))
    @settings(max_examples=50)
    def test_properties(self, mine, theirs):
        p = TokenSequence.from_logits(torch.stack([torch.tensor([mine]), torch.ones(1, len(mine))], -1))
        other = TokenSequence.from_logits(torch.stack([torch.tensor([theirs[: len(mine)]]), torch.ones(1, len(mine))], -1))
        assert p.logp(torch.zeros(1, len(mine))).item() == pytest.approx(sum(mine), abs=1e-4)
        assert p.entropy().item() == len(mine)
        assert p.kl(p).item() == 0.0 and p.kl(other).item() >= -1e-4

    def test_the_kl_estimate_is_unbiased(self):
        """Its mean over samples of a categorical distribution is the closed-form KL."""
        generator = torch.Generator().manual_seed(0)
        p, r = (torch.randn(7, generator=generator).log_softmax(0) for _ in range(2))
        drawn = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
        of = lambda logp: TokenSequence(torch.stack([logp[drawn][:, None], torch.zeros(len(drawn), 1)], -1))  # noqa: E731
        assert of(p).kl(of(r)).mean().item() == pytest.approx((p.exp() * (p - r)).sum().item(), abs=0.01)


class TestModule:
    def test_log_probabilities_are_the_engines(self, ppo):
        episodes = ppo.env_runner.sample(num_episodes=16)
        batch = learner_batch(ppo, episodes)
        out = ppo.learner_group._learner.module["default_policy"].forward_train(batch)
        rows = batch[Columns.LOSS_MASK]
        theirs, ours = batch[Columns.ACTION_DIST_INPUTS][rows][..., 0], out[Columns.ACTION_DIST_INPUTS][rows][..., 0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(batch[Columns.ACTION_LOGP], batch[Columns.ACTION_DIST_INPUTS][..., 0].sum(-1))
        assert (out[Columns.ACTION_DIST_INPUTS][..., 1] >= 0).all()

    def test_groups_and_padding_change_nothing(self, ppo):
        batch = learner_batch(ppo, ppo.env_runner.sample(num_episodes=8))
        module = ppo.learner_group._learner.module["default_policy"]
        torch.nn.init.normal_(module.model.head.weight)
        whole = []
        packing = module._packing()
        assert packing.packs
        for packing.packs, packing.max_tokens in itertools.product((True, False), (1, 300, 100_000)):
            out = module.forward_train(batch)
            whole.append((out[Columns.ACTION_DIST_INPUTS], module.compute_values(batch, out[Columns.EMBEDDINGS])))
        for inputs, values in whole[1:]:
            torch.testing.assert_close(inputs, whole[0][0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, whole[0][1], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
    def test_temperature_is_the_engines(self, ppo_config, dtype, tolerance):
        spec = ppo_config.language(action_temperature=0.5, learner_model={"dtype": dtype}).get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        module = spec.build()
        prompt, turn = torch.tensor([[3, 10, 11, PAD]]), torch.tensor([[20, 1, PAD]])
        out = module.forward_train({Columns.OBS: prompt, Columns.ACTIONS: turn})
        inputs = out[Columns.ACTION_DIST_INPUTS]
        logits = module.lm(torch.tensor([[3, 10, 11, 20]])).logits[0, 2:].float()
        expected = (logits / 0.5).log_softmax(-1)[[0, 1], [20, 1]]
        torch.testing.assert_close(inputs[0, :, 0], torch.tensor([*expected, 0.0]), atol=tolerance, rtol=tolerance)
        entropies = torch.distributions.Categorical(logits=logits / 0.5).entropy()
        torch.testing.assert_close(inputs[0, :, 1], torch.tensor([*entropies, 0.0]), atol=tolerance, rtol=tolerance)
        assert out[Columns.EMBEDDINGS].dtype is torch.float32  # the values

    def test_an_adapter_over_a_base_in_bfloat16_is_trained_in_float32(self, ppo_config):
        """In bfloat16 a step of 1e-6 changes next to none of its numbers."""
        spec = ppo_config.language(lora={"rank": 4}, learner_model={"dtype": "bfloat16"}).get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        ppo_config.validate()
        module = spec.build()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trained} == {torch.float32}
        assert {parameter.dtype for parameter in module.parameters() if not parameter.requires_grad} == {torch.bfloat16}
        optimizer = torch.optim.Adam(trained, lr=1e-6)
        before = [parameter.detach().clone() for parameter in trained]
        for _ in range(2):  # B is 0 at first, and A has no gradient then
            out = module.forward_train(
                {Columns.OBS: torch.tensor([[3, 10, 11]]), Columns.ACTIONS: torch.tensor([[20, 1, PAD]])}
            )
            (out[Columns.ACTION_DIST_INPUTS][..., 0].sum() + out[Columns.EMBEDDINGS].sum()).backward()
            optimizer.step()
        of_adapter = [(old != new).float().mean() for old, new in zip(before, trained, strict=True) if old.ndim == 2]
        assert min(of_adapter) > 0.9

    def test_for_inference_the_state_is_a_plain_language_model(self, ppo):
        module = ppo.learner_group._learner.module["default_policy"]
        assert set(module.get_state(inference_only=True)) == {name for name, _ in module.lm.named_parameters()}
        assert any("head" in name for name in module.get_state())


class TestConnector:
    def test_columns_follow_the_episodes(self, ppo):
        episodes = ppo.env_runner.sample(num_episodes=6)
        prompts = [g.prompt_ids for e in episodes for g in e.get_extra_model_outputs(GENERATION)]
        turns = [g.token_ids for e in episodes for g in e.get_extra_model_outputs(GENERATION)]
        returns = [e.get_return() for e in episodes]
        batch = learner_batch(ppo, episodes)
        real = batch[Columns.LOSS_MASK]
        assert int((~real).sum()) == 6
        assert [tuple(t for t in row.tolist() if t != PAD) for row in batch[Columns.OBS][real]] == prompts
        assert [tuple(t for t in row.tolist() if t != PAD) for row in batch[Columns.ACTIONS][real]] == turns
        assert float(batch[Columns.REWARDS].sum()) == sum(returns)
        assert int(batch[Columns.TERMINATEDS].sum()) == 6  # the turn limit ends an episode
        # The head is 0 at the start, so with γ = 1 and λ near 1 the targets are discounted by λ alone, from the end on.
        assert batch["value_targets"].max().item() == pytest.approx(max(returns))

    def test_a_cut_off_episode_is_bootstrapped_from_the_state_after_it(self, ppo, chat):
        episodes = ppo.env_runner.sample(num_episodes=12)
        (episode, *_) = [e for e in episodes if e.get_return() == 0.0]
        episode.is_terminated, episode.is_truncated = False, True
        messages = (
            *episode.get_extra_model_outputs(MESSAGES, -1),
            Message("assistant", episode.get_actions(-1)),
            Message("user", episode.get_observations(-1)),
        )
        batch = learner_batch(ppo, [episode])
        last = tuple(t for t in batch[Columns.OBS][-1].tolist() if t != PAD)
        assert last == chat.prompt_ids(messages) and not batch[Columns.LOSS_MASK][-1]

    def test_texts_do_not_reach_the_batch(self, ppo):
        batch = learner_batch(ppo, ppo.env_runner.sample(num_episodes=4))
        assert GENERATION not in batch and MESSAGES not in batch
        assert all(isinstance(column, torch.Tensor) for column in batch.values())
        assert isinstance(ppo.config.build_learner_connector(TextSpace(), TextSpace()).connectors[0], TextToTokens)


class TestRuns:
    def test_ppo_trains_syncs_and_evaluates(self, ppo, engine):
        before = ppo.learner_group._learner.module["default_policy"].get_state(inference_only=True)
        result = ppo.train()
        after = ppo.learner_group._learner.module["default_policy"].get_state(inference_only=True)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        learned = result["learners"]["default_policy"]
        assert all(math.isfinite(learned[key]) for key in ("policy_loss", "vf_loss", "entropy", "mean_kl_loss"))
        assert learned["num_module_steps_trained"] > 0 and math.isfinite(learned["total_loss"])  # what a broken one is known by
        assert result["env_runners"]["num_episodes_lifetime"] > 8
        # The next episodes are played with the new weights.
        ppo.train()
        episodes = ppo.env_runner.sample(num_episodes=4)
        batch = learner_batch(ppo, episodes)
        inputs = ppo.learner_group._learner.module["default_policy"].forward_train(batch)[Columns.ACTION_DIST_INPUTS]
        rows = batch[Columns.LOSS_MASK]
        gap = (inputs - batch[Columns.ACTION_DIST_INPUTS])[rows][..., 0].abs().max()
        assert gap.item() < 1e-3

    def test_appo_trains_and_updates_its_target(self, appo_config, ray_session, lent_local_engine):
        appo_config.training(
            circular_buffer_num_batches=1, circular_buffer_iterations_per_batch=1, target_network_update_freq=1
        )
        algorithm = appo_config.build_algo()
        try:
            module = algorithm.learner_group._learner.module["default_policy"]
            before = [parameter.clone() for parameter in module.target_model.parameters()]
            results = [algorithm.train() for _ in range(3)]
            learned = results[-1]["learners"]["default_policy"]
            assert math.isfinite(learned["policy_loss"]) and math.isfinite(learned["vf_loss"])
            assert learned["num_module_steps_trained"] > 0 and math.isfinite(learned["total_loss"])
            assert results[-1]["env_runners"]["num_episodes_lifetime"] > 30
            assert isinstance(module, TokenValueModule)
            assert any(not torch.equal(old, new) for old, new in zip(before, module.target_model.parameters(), strict=True))
        finally:
            algorithm.stop()

    @pytest.mark.long
    def test_appo_collects_and_learns_in_processes_of_their_own(self, appo_config, ray_session):
        """The EnvRunner actor starts its own engine and plays with weights that RLlib's sync brought from the learner actor."""
        appo_config.env_runners(num_env_runners=1).learners(num_learners=1).reporting(min_time_s_per_iteration=5)
        appo_config.engines(engine_config={"cpu_kv_cache_gib": 0.25})
        algorithm = appo_config.build_algo()
        try:
            versions: list[int] = []
            for _ in range(24):
                algorithm.train()
                versions = algorithm.env_runner_group.foreach_env_runner(
                    lambda runner: runner._weights_version, local_env_runner=False
                )
                if versions and versions[0] >= 2:
                    break
            assert versions[0] >= 2
            assert algorithm.metrics.peek(("env_runners", "num_episodes_lifetime")) > 16
        finally:
            algorithm.stop()

    def test_two_algorithms_in_one_process_keep_their_weights_apart(self, ppo, ppo_config, lent_local_engine):
        """They share an engine, and each puts its own weights in before it plays."""
        other = ppo_config.copy(copy_frozen=False).build_algo()
        try:
            ppo.train()
            other.env_runner.sample(num_episodes=2)
            batch = learner_batch(ppo, ppo.env_runner.sample(num_episodes=4))
            inputs = ppo.learner_group._learner.module["default_policy"].forward_train(batch)[Columns.ACTION_DIST_INPUTS]
            rows = batch[Columns.LOSS_MASK]
            assert (inputs - batch[Columns.ACTION_DIST_INPUTS])[rows][..., 0].abs().max().item() < 1e-3
        finally:
            other.stop()

    def test_an_earlier_state_plays_again_after_a_restore_in_place(self, ppo, tmp_path):
        """Fails where a runner ignores what is older than what it has: then evaluations are of weights that are gone."""
        ppo.train()
        path = ppo.save_to_path(str(tmp_path / "checkpoint"))
        kept = {name: tensor.clone() for name, tensor in ppo.env_runner._weights.items()}
        ppo.train()
        assert any(not torch.equal(kept[name], tensor) for name, tensor in ppo.env_runner._weights.items())
        ppo.restore_from_path(path)
        ppo.env_runner.sample(num_episodes=1)
        assert all(torch.equal(kept[name], tensor) for name, tensor in ppo.env_runner._weights.items())

    def test_a_checkpoint_restores_what_plays(self, ppo, tmp_path, lent_local_engine):
        ppo.train()
        path = ppo.save_to_path(str(tmp_path / "checkpoint"))
        assert read_manifest(path)["algorithm"] == type(ppo).__name__
        state = ppo.learner_group._learner.module["default_policy"].get_state()
        other = Algorithm.from_checkpoint(path)
        try:
            restored = other.learner_group._learner.module["default_policy"].get_state()
            assert all(torch.equal(state[name], restored[name]) for name in state)
            played = [runner.env_runner.sample(num_episodes=8) for runner in (ppo, other)]
            batch = learner_batch(other, played[1])
            inputs = other.learner_group._learner.module["default_policy"].forward_train(batch)[Columns.ACTION_DIST_INPUTS]
            rows = batch[Columns.LOSS_MASK]
            assert (inputs - batch[Columns.ACTION_DIST_INPUTS])[rows][..., 0].abs().max().item() < 1e-3
        finally:
            other.stop()


@pytest.mark.long
def test_remote_runners_go_on_with_their_own_episodes(ppo_config, ray_session, tmp_path):
    """After a resume and after a restart. Fails where they begin at episode 0, with the tasks and seeds of the beginning."""
    algorithm = ppo_config.env_runners(num_env_runners=2).build_algo()
    group = algorithm.env_runner_group

    def stand() -> dict[int, int]:
        return dict(group.foreach_env_runner(lambda r: (r.worker_index, r._next_episode), local_env_runner=False))

    def play(*numbers: int) -> None:
        for index, number in enumerate(numbers):
            group.foreach_env_runner(lambda r, n=number: r.set_state({"next_episode": n}), remote_worker_ids=[index + 1])

    try:
        play(7, 11)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        play(20, 30)
        algorithm.restore_from_path(path)
        assert stand() == {1: 7, 2: 11}
        algorithm.set_state({NEXT_EPISODES: {1: 5, 3: 9}})  # of other runners, one of which is no more
        assert stand() == {1: 5, 2: 0}
        play(6, 8)
        assert algorithm.get_state()[NEXT_EPISODES] == {1: 6, 2: 8, 3: 9}
        play(6, 50)
        group.foreach_env_runner(lambda r: os._exit(1), local_env_runner=False, remote_worker_ids=[2])
        assert group.healthy_env_runner_ids() == [1]
        assert algorithm.get_state()[NEXT_EPISODES] == {1: 6, 2: 8 + LEAP, 3: 9}
        deadline = time.monotonic() + 300
        while not (restored := algorithm.restore_env_runners(group)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert restored == [2]
        assert stand() == {1: 6, 2: 8 + LEAP}
    finally:
        algorithm.stop()


def test_connectors_of_a_runner_are_not_its_counters(ppo_config):
    """RLlib hands them to all other runners, under ``merge_env_runner_states: false`` after each iteration."""
    runner = StockTextEnvRunner(config=ppo_config, worker_index=0)
    assert runner.get_state(components=["env_to_module_connector"]) == {}
    assert "next_episode" in runner.get_state() and "next_episode" in runner.get_state(not_components=["x"])


@pytest.mark.long
def test_the_documents_ppo_runs_as_it_stands(ray_session, lent_local_engine, capsys):
    page = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
    code = re.search(r"```python\n(from rllib_nlac.baselines.stock.*?)```", page, re.DOTALL)[1]
    exec(compile(code, "algorithms.md", "exec"), {})
    assert 0.0 <= float(capsys.readouterr().out.splitlines()[-1]) <= 1.0


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("action_temperature", 0.0, "a greedy policy has no gradient"),
        ("action_top_p", 0.9, "must be 1"),
        ("num_engines", 1, "each EnvRunner has its engine"),
        ("output", "logs", "is not written under RLlib's own algorithms"),
        ("learner_model", {"dtype": "bfloat16"}, "in which RLlib's own learners would round most of their steps away"),
        ("lora", {"rank": 8, "dropout": 0.1}, "has dropout, and RLlib's own losses are computed without"),
        ("language_model", "./missing", "does not exist"),
    ],
)
def test_a_wrong_value_names_key_and_fix(ppo_config, key, value, complaint):
    ppo_config.validate()
    setattr(ppo_config, key, value)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        ppo_config.validate()


def test_an_env_runners_engine_needs_a_gpu_for_each_of_its_parts(ppo_config):
    ppo_config.engines(engine_config={"tensor_parallel_size": 2}).env_runners(num_gpus_per_env_runner=2).validate()
    with pytest.raises(
        ValueError, match="num_gpus_per_env_runner is 1 and must be at least engine_config's tensor_parallel_size, 2"
    ):
        ppo_config.env_runners(num_gpus_per_env_runner=1).validate()


def test_where_learners_have_gpus_every_engine_has_one(ppo_config):
    """Fails where a process without a GPU is to build an engine: each EnvRunner, and the trial's own where it plays."""

    def check(learners=0, runners=0, gpus=0, evaluators=0, of_evaluators=None, interval=None):
        config = ppo_config.copy(copy_frozen=False).learners(num_learners=learners, num_gpus_per_learner=1)
        config.env_runners(num_env_runners=runners, num_gpus_per_env_runner=gpus)
        own = {} if of_evaluators is None else {"num_gpus_per_env_runner": of_evaluators}
        config.evaluation(evaluation_interval=interval, evaluation_num_env_runners=evaluators, evaluation_config=own)
        config.validate()

    check()
    check(interval=1)
    check(runners=2, gpus=0.5, interval=1)
    check(learners=1, runners=2, gpus=1)
    check(learners=1, runners=2, gpus=1, evaluators=1, interval=1)
    for wrong in ({"runners": 1}, {"learners": 1, "runners": 2}):
        with pytest.raises(ValueError, match="num_gpus_per_env_runner is 0 and must be above 0"):
            check(**wrong)
    for wrong in ({"evaluators": 1}, {"runners": 1, "gpus": 1, "evaluators": 1, "of_evaluators": 0}):
        with pytest.raises(ValueError, match=r"evaluation_config is {.* and must have a num_gpus_per_env_runner above 0"):
            check(interval=1, **wrong)
    for wrong in ({"learners": 1}, {"learners": 1, "runners": 2, "gpus": 1, "interval": 1}):
        with pytest.raises(ValueError, match="num_learners is 1 and must be 0"):
            check(**wrong)
