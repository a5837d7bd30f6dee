"""Checkpoints: exact resume, whole or not there, clear refusals, and the export to a Hugging Face folder."""

from __future__ import annotations

import json
import os
import pickletools
import resource
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from ray.rllib.algorithms.algorithm import Algorithm
from typer.testing import CliRunner

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.baselines.rft import RFTConfig
from rllib_nlac.checkpoints import checkpoint
from rllib_nlac.command.cli import app
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.nlac import NLAC
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Weights


def smaller(config):
    config.training(episodes_per_iteration=8, train_batch_size_per_learner=32, minibatch_size=16, lr=[[0, 1e-3], [200, 1e-4]])
    config.training(replay_buffer_config={"capacity": 60, "alpha": 0.6, "beta": 0.4, "beta_final_timesteps": 1000}, tau=0.5)
    config.num_envs_per_env_runner = 8
    return config


@pytest.fixture()
def small(config):
    return smaller(config)


@pytest.fixture()
def algorithm(small, ray_session, lent_engine):
    algorithm = small.build_algo()
    yield algorithm
    algorithm.stop()


def trained(algorithm, iterations: int, path: str, save_after: int | None) -> dict:
    """Everything that must be equal after these iterations, of which a checkpoint is written in between."""
    drawn = []
    draw = algorithm.local_replay_buffer.sample_transitions
    algorithm.local_replay_buffer.sample_transitions = lambda *args: drawn.append(draw(*args)) or drawn[-1]
    for number in range(iterations):
        if number == save_after:
            algorithm.save_to_path(path)
        result = algorithm.train()
    weights = export_weights(algorithm.learner_group)
    state = {
        "pid": os.getpid(),
        "weights": {str(which): {k: v.numpy() for k, v in weights[which].items()} for which in weights},
        "drawn": [[(t.id, t.action, t.generation.token_ids) for t in sample.transitions] for sample in drawn],
        "importance": [sample.weights for sample in drawn],
        "episodes": result["env_runners"]["num_episodes_lifetime"],
        "steps": result["env_runners"]["num_env_steps_sampled_lifetime"],
        "version": result["sync"]["weight_version"],
        "iteration": result["training_iteration"],
        "buffer": [episode.id_ for episode in algorithm.local_replay_buffer.episodes],
    }
    algorithm.stop()
    return state


def resumed(path: str, iterations: int) -> dict:
    return trained(Algorithm.from_checkpoint(path), iterations, path, None)


def test_training_2n_equals_n_save_new_process_restore_n(small, ray_session, lent_engine, tmp_path):
    path = str(tmp_path / "checkpoint")
    straight = trained(small.learners(num_learners=1).build_algo(), 4, path, 2)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the process cannot import this file
    gone_on = ray.get(ray.remote(num_cpus=2, max_calls=1)(resumed).remote(path, 2))
    assert straight.pop("pid") != gone_on.pop("pid")
    assert len(straight["drawn"]) == 4
    assert straight.pop("drawn")[-2:] == gone_on.pop("drawn")
    np.testing.assert_array_equal(straight.pop("importance")[-2:], gone_on.pop("importance"))
    for which in (Weights.POLICY, Weights.TARGET):
        for name, value in straight["weights"][which].items():
            np.testing.assert_array_equal(value, gone_on["weights"][which][name], err_msg=name)
    del straight["weights"], gone_on["weights"]
    assert straight == gone_on and straight["iteration"] == 4 and straight["episodes"] == 32


def of_two_learners(small, stage: int):
    """In bfloat16, so that the float32 master weights are part of what is resumed."""
    zero = {"zero_optimization": {"stage": stage}}
    return small.learners(num_learners=2).deepspeed(deepspeed_config=zero).language(learner_model={"dtype": "bfloat16"})


def test_a_part_that_lacks_its_shards_is_refused(tmp_path):
    """Fails where the next update writes DeepSpeed's own copies over the restored weights."""
    a = SimpleNamespace(config=SimpleNamespace(num_learners=2, zero_stage=1))
    for component in ("learner_group", "learner_group/learner"):
        with pytest.raises(checkpoint.CheckpointError, match="the weights alone: component='learner_group/learner/rl_mod"):
            LanguageAlgorithm.restore_from_path(a, tmp_path, component=component)


def test_a_state_without_the_shards_is_refused():
    """Fails where weights are restored and the optimizer silently is not."""
    divided = SimpleNamespace(config=SimpleNamespace(num_learners=2, zero_stage=1))
    with pytest.raises(checkpoint.CheckpointError, match="use save_to_path"):
        LanguageAlgorithm.set_state(divided, {"learner_group": {"learner": {"rl_module": {}, "optimizer": {}}}})


def test_a_state_that_was_set_reaches_the_engines(algorithm, monkeypatch):
    """Fails where an engine goes on with the weights of before, in play and in evaluation."""
    algorithm.train()
    state, pushed = algorithm.get_state(), []
    expected = {which: {n: t.clone() for n, t in of.items()} for which, of in export_weights(algorithm.learner_group).items()}
    algorithm.train()
    algorithm.flush_pending_sync()
    monkeypatch.setattr(algorithm, "sync_weights", lambda: pushed.append(algorithm.weight_version))
    algorithm.flush_pending_sync()
    assert not pushed
    algorithm.set_state(state)
    algorithm.flush_pending_sync()
    assert pushed == [state["nlac"]["weight_version"]]
    for which, found in export_weights(algorithm.learner_group).items():
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[which].items()), which


def test_after_a_state_was_set_its_stopped_steps_count_anew(algorithm):
    """Fails where one bad batch ends a run because of three of the branch that was left."""
    state = algorithm.get_state()
    algorithm.stopped.in_a_row = 3
    algorithm.set_state(state)
    assert algorithm.stopped.in_a_row == 0


class RemoteLearners:
    """A group whose only learner may be lost when it is given a state, as by an error of its own; RLlib's names."""

    is_local, is_remote = False, True
    config = SimpleNamespace(learner_timeout_s=60.0)
    _workers = ()

    def __init__(self, left: int) -> None:
        self.left = left

    def __len__(self) -> int:
        return 1

    def foreach_learner(self, function):
        return [SimpleNamespace(ok=True, get=lambda: None, actor_id=number) for number in range(self.left)]


@pytest.mark.parametrize("left", [1, 0])
def test_a_state_that_learners_took_is_what_a_lost_one_begins_with_and_one_that_they_did_not_is_said(monkeypatch, left):
    """Fails where the last snapshot, of the weights before, silently takes the state's place."""
    taken, own = [], []
    monkeypatch.setattr(Algorithm, "set_state", lambda self, state: None)
    a = LanguageAlgorithm.__new__(LanguageAlgorithm)
    a.config = SimpleNamespace(num_learners=1, zero_stage=0, learner_snapshot_interval=8)
    a.learner_group, a._updates_since_snapshot = RemoteLearners(left), 5
    a.snapshots = SimpleNamespace(take=taken.append)
    a.set_own_state = own.append
    state = {"learner_group": {"learner": {"rl_module": {}}}, "nlac": {"weight_version": 7}}
    if left:
        a.set_state(state)
        assert taken == [a.learner_group] and own == [state["nlac"]]
    else:
        with pytest.raises(checkpoint.CheckpointError, match="a learner could not take this state"):
            a.set_state(state)
        assert not taken and not own


def test_weights_that_zero_3_divides_are_given_whole(small, lent_engine):
    """Fails where they are DeepSpeed's empty places."""
    config = small.deepspeed(deepspeed_config={"zero_optimization": {"stage": 3}})
    algorithm = config.build_algo()
    try:
        weights = algorithm.get_weights()["default_policy"]
        sent = export_weights(algorithm.learner_group)[Weights.POLICY]
        assert sent and all(torch.equal(torch.as_tensor(weights[name]), tensor) for name, tensor in sent.items())
        state = algorithm.get_state()
        algorithm.set_state(state)
        again = algorithm.get_weights()["default_policy"]
        assert all(torch.equal(torch.as_tensor(again[name]), tensor) for name, tensor in sent.items())
    finally:
        algorithm.stop()


@pytest.mark.long
def test_two_learners_resume_with_all_their_shards(small, ray_session, lent_engine, tmp_path):
    algorithm = of_two_learners(small, 3).build_algo()
    try:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        algorithm.train()
        expected = export_weights(algorithm.learner_group)
    finally:
        algorithm.stop()
    assert len(list((tmp_path / "checkpoint").glob("learner_shards/*.pt"))) == 2
    resumed = Algorithm.from_checkpoint(path)
    try:
        resumed.train()
        weights = export_weights(resumed.learner_group)
    finally:
        resumed.stop()
    for which in (Weights.POLICY, Weights.TARGET):
        for name, value in expected[which].items():
            torch.testing.assert_close(weights[which][name], value, rtol=0, atol=0, msg=name)
    fewer = small.copy(copy_frozen=False).learners(num_learners=0).build_algo()
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match=r"optimizer under ZeRO 3 in 2 shard.*has it under ZeRO 3 in 1 shard"
        ):
            fewer.restore_from_path(path)
    finally:
        fewer.stop()


@pytest.mark.long
def test_without_shards_fewer_learners_go_on(small, ray_session, lent_engine, tmp_path):
    algorithm = of_two_learners(small, 0).build_algo()
    try:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        expected = export_weights(algorithm.learner_group)
    finally:
        algorithm.stop()
    assert not list((tmp_path / "checkpoint").glob("learner_shards/*.pt"))
    fewer = small.copy(copy_frozen=False).learners(num_learners=0).build_algo()
    try:
        fewer.restore_from_path(path)
        weights = export_weights(fewer.learner_group)
        assert fewer.train()["training_iteration"] == 2
    finally:
        fewer.stop()
    for which in (Weights.POLICY, Weights.TARGET):
        for name, value in expected[which].items():
            torch.testing.assert_close(weights[which][name], value, rtol=0, atol=0, msg=name)


def test_rfts_pool_is_part_of_its_checkpoint(ray_session, lent_engine, tmp_path, small):
    config = RFTConfig().update_from_dict(
        {key: getattr(small, key) for key in ("env", "env_config", "prompts", "max_action_tokens", "episodes_per_iteration")}
    )
    config.training(pool_size=10, minibatch_size=8).env_runners(num_envs_per_env_runner=8)
    algorithm = config.build_algo()
    try:
        while not algorithm.pool:
            algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        pool = [(episode.id_, *episode.get_actions()) for episode in algorithm.pool]
        algorithm.pool = []
        algorithm.restore_from_path(path)
        assert [(episode.id_, *episode.get_actions()) for episode in algorithm.pool] == pool
    finally:
        algorithm.stop()


def test_a_trials_checkpoint_names_its_class(algorithm, tmp_path):
    """Fails where a checkpoint of a Tune trial holds the class that Ray derives for the actor, with each of its methods."""
    algorithm.__class__ = ray.remote(NLAC).__ray_metadata__.modified_class
    path = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
    pickled = (path / checkpoint.CONSTRUCTOR).read_bytes()
    assert cloudpickle.loads(pickled)["class"] is NLAC
    assert {text for _, text, _ in pickletools.genops(pickled) if text in vars(LanguageAlgorithm)} == set()


def test_a_checkpoint_keeps_the_prompts_and_a_restore_says_which_files_were_others(algorithm, tmp_path):
    saved = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
    env = algorithm.config.env
    assert load_prompts(str(saved / checkpoint.PROMPTS), env) == algorithm.config.prompts_for(env)
    manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
    algorithm.restore_from_path(str(saved))
    assert not [text for text in algorithm.notices.take() if "other files" in text]
    manifest[checkpoint.NAMED_FILES]["words.txt"] = "0"
    (saved / checkpoint.MANIFEST).write_bytes(checkpoint.render(manifest))
    algorithm.restore_from_path(str(saved))
    (said,) = algorithm.notices.take()
    assert "words.txt (is gone)" in said and str(saved) in said


class TestRefusals:
    """What cannot be restored is refused before anything changes."""

    @pytest.fixture(scope="class")
    def algorithm(self, make_config, ray_session, lend):
        """One for all: what is refused has not changed it, as each test makes sure."""
        with lend():
            algorithm = smaller(make_config()).build_algo()
            yield algorithm
            algorithm.stop()

    @pytest.fixture()
    def saved(self, algorithm, tmp_path) -> Path:
        return Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))

    def refuse(self, algorithm, path: Path, match: str) -> None:
        before, version = export_weights(algorithm.learner_group), algorithm.weight_version
        with pytest.raises(checkpoint.CheckpointError, match=match):
            algorithm.restore_from_path(str(path))
        after = export_weights(algorithm.learner_group)
        assert all(
            torch.equal(before[which][name], after[which][name])
            for which in (Weights.POLICY, Weights.TARGET)
            for name in before[which]
        )
        assert algorithm.weight_version == version

    def edit(self, saved: Path, **facts) -> None:
        manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
        (saved / checkpoint.MANIFEST).write_bytes(checkpoint.render({**manifest, **facts}))

    def test_another_version(self, algorithm, saved):
        self.edit(saved, format=99, rllib_nlac="7.0.0")
        self.refuse(algorithm, saved, r"was written by rllib_nlac 7\.0\.0 in checkpoint format 99.*install the version")

    @pytest.mark.parametrize("part", ["architecture", "tokenizer"])
    def test_another_model(self, algorithm, saved, part):
        manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
        self.edit(saved, language_model="other/model", model={**manifest["model"], part: "0"})
        self.refuse(algorithm, saved, f"holds the model 'other/model'.*configured with 'tiny', which has another {part}")

    def test_another_algorithm(self, algorithm, saved):
        self.edit(saved, algorithm="GRPO")
        self.refuse(algorithm, saved, "is of the algorithm GRPO, and this is NLAC")

    @pytest.mark.parametrize(
        "shards",
        [
            {"num_learners": 2, "zero_stage": 1, "dtype": "float32"},
            {"num_learners": 1, "zero_stage": 2, "dtype": "float32"},
            {"num_learners": 1, "zero_stage": 0, "dtype": "bfloat16"},
            {"num_learners": 2, "zero_stage": 1},  # malformed
        ],
    )
    def test_another_optimizer(self, algorithm, saved, shards):
        """Fails where only what is divided is looked at: DeepSpeed takes over the weights before it fails."""
        self.edit(saved, shards=shards)
        self.refuse(algorithm, saved, "holds the optimizer under ZeRO .*, and this run has it under ZeRO 0 in 1 shard.*float32")

    def test_what_zero_2_wrote_zero_1_takes(self):
        facts = {"algorithm": "NLAC", "model": 0, "lora": None}
        two, one = ({"zero_stage": stage, "num_learners": 2, "dtype": "float32"} for stage in (2, 1))
        checkpoint.check(SimpleNamespace(name="c", manifest={**facts, "shards": two}), {**facts, "shards": one})

    def test_a_missing_or_shortened_file(self, algorithm, saved):
        state = saved / "replay_buffer" / "state.pkl"
        content = state.read_bytes()
        state.write_bytes(content[:-1])
        self.refuse(algorithm, saved, rf"is not whole: replay_buffer/state\.pkl has {len(content) - 1} bytes instead of")
        state.unlink()
        self.refuse(algorithm, saved, r"is not whole: replay_buffer/state\.pkl is missing")

    def test_no_manifest(self, algorithm, saved):
        (saved / checkpoint.MANIFEST).unlink()
        self.refuse(algorithm, saved, "no whole checkpoint of this package.*interrupted")

    def test_no_folder(self, algorithm, tmp_path):
        with pytest.raises(FileNotFoundError, match="the folder does not exist"):
            algorithm.restore_from_path(str(tmp_path / "nowhere"))


def test_a_full_disk_keeps_the_older_checkpoint(algorithm, tmp_path):
    """A limit on the size of files stands in for the disk: the write fails in the operating system, half way through."""
    path = tmp_path / "checkpoint"
    algorithm.save_to_path(str(path))
    algorithm.train()
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, former[1]))
    try:
        with pytest.raises(OSError):
            algorithm.save_to_path(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert checkpoint.read_manifest(path)["iteration"] == 0
    assert os.listdir(tmp_path) == ["checkpoint"]  # nothing of the new one is left
    algorithm.save_to_path(str(path))
    assert checkpoint.read_manifest(path)["iteration"] == 1


@pytest.mark.process
def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path):
    """A process that replaces a checkpoint for ever is killed 20 times; each time a whole one can be read."""
    path, seen = tmp_path / "checkpoint", set()
    rng = np.random.default_rng(0)
    for _ in range(20):
        start = max(seen, default=0)
        child = os.fork()
        if child == 0:
            try:
                number = start
                while True:
                    number += 1
                    with checkpoint.written_at_once(path) as folder:
                        for name in "abc":
                            (folder / name).write_bytes(bytes([number % 256]) * 20_000)
                        checkpoint.write_manifest(folder, {"number": number})
            finally:
                os._exit(1)
        while not path.exists():
            pass
        os.sched_yield()
        signal.sigtimedwait([], float(rng.uniform(0, 0.06)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        number = checkpoint.read_manifest(path)["number"]
        assert {(path / name).read_bytes() for name in "abc"} == {bytes([number % 256]) * 20_000}
        seen.add(number)
    assert len(seen) > 5


@ray.remote(num_cpus=2, max_calls=1)
def generate_in_a_process(model: str, prompt, chat):
    from rllib_nlac.engine.vllm_engine import VLLMEngine
    from rllib_nlac.types import Request

    return VLLMEngine(model, chat.max_context, [chat.end_id]).generate([Request(prompt, 8)])[0]


class TestExport:
    def test_transformers_and_vllm_load_it(self, algorithm, tmp_path, chat):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        algorithm.train()
        path = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
        folder = checkpoint.export_model(path, tmp_path / "exported")
        trained = export_weights(algorithm.learner_group)[Weights.POLICY]
        loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert loaded.keys() == trained.keys() and all(torch.equal(loaded[name], trained[name]) for name in trained)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "Is it alive? No, guess 12!"
        assert tokenizer.encode(text) == chat.tokenizer.encode(text) and tokenizer.chat_template == chat.tokenizer.chat_template

        prompt = chat.prompt_ids(algorithm.local_replay_buffer.episodes[0].get_extra_model_outputs("messages", 0))
        generation = ray.get(generate_in_a_process.remote(str(folder), prompt, chat))
        learner = algorithm.learner_group._learner
        (own,) = learner.logprobs_of([generation.prompt_ids], [generation.token_ids])
        assert np.abs(own - generation.logprobs).max() < 1e-4

    def test_it_says_how_its_policy_was_sampled_and_nothing_of_its_bases_file(self, config, model_path, tmp_path):
        """Fails where the base's file goes along: Llama-2-chat's cannot be saved again, a penalty changes greedy answers."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        shutil.copytree(model_path, tmp_path / "base")
        said = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3, "eos_token_id": 1}
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps(said))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        with pytest.raises(ValueError, match="generation"):
            model.save_pretrained(tmp_path / "as_it_was")
        for temperature, expected in ((0.7, (True, 0.7, 0.95, 0)), (0, (False, None, None, None))):
            config.language(language_model=str(tmp_path / "base"), action_temperature=temperature, action_top_p=0.95)
            model.generation_config = checkpoint.sampling_of(config)
            model.save_pretrained(tmp_path / f"exported_{temperature}")
            own = GenerationConfig.from_pretrained(tmp_path / f"exported_{temperature}")
            assert (own.do_sample, own.temperature, own.top_p, own.top_k) == expected
            assert own.repetition_penalty in (None, 1.0) and own.eos_token_id == [config.make_chat().end_id]

    def test_what_cannot_be_exported_says_why(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            checkpoint.export_model(tmp_path, tmp_path / "out")
        with pytest.raises(FileExistsError, match="is not empty"):
            checkpoint.export_model(tmp_path, Path(__file__).parent)
        with pytest.raises(FileExistsError, match=r"test_checkpoints\.py is a file: name a new folder"):
            checkpoint.export_model(tmp_path, Path(__file__))
        with pytest.raises(FileNotFoundError, match=f"file://{tmp_path}/x is no checkpoint"):
            checkpoint.export_model(f"file://{tmp_path}/x", tmp_path / "out")


def test_a_checkpoint_on_another_file_system(algorithm, tmp_path):
    """By a URI, as on S3; the checkpoint is the same."""
    local, remote = algorithm.save_to_path(str(tmp_path / "local")), f"file://{tmp_path}/remote"
    algorithm.save_to_path(remote)
    assert checkpoint.read_manifest(remote)["files"].keys() == checkpoint.read_manifest(local)["files"].keys()
    shutil.rmtree(local)
    algorithm.restore_from_path(remote)
    exported = CliRunner().invoke(app, ["export", remote, str(tmp_path / "exported")])
    assert exported.exit_code == 0 and (tmp_path / "exported" / "config.json").is_file(), exported.output


def test_what_is_no_folder_is_no_checkpoint_of_a_trial(tmp_path):
    """As an archive beside the checkpoints. Fails where it takes the place of what Ctrl-C, or a full disk, has to say."""
    with checkpoint.written_at_once(tmp_path / "checkpoint_000000") as folder:
        checkpoint.write_manifest(folder, {})
    (tmp_path / "checkpoint_000001.tar.gz").write_text("")
    assert checkpoint.last_whole(tmp_path) == tmp_path / "checkpoint_000000"
