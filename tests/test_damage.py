"""Damaged checkpoints: every byte is covered, every refusal names the file, and nothing is changed by the attempt."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.fs
import pytest
import ray
import torch
from attacks import checkpoints as attacks
from ray.rllib.algorithms.algorithm import Algorithm

from rllib_nlac.checkpoints import checkpoint
from rllib_nlac.checkpoints.checkpoint import MANIFEST, CheckpointError, opened, read_manifest, render
from rllib_nlac.checkpoints.manifest import verify
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Weights

OTHER_USER = 65534


@pytest.fixture()
def small(tmp_path) -> Path:
    """A whole checkpoint of a few bytes; its manifest is most of it."""
    with checkpoint.written_at_once(tmp_path / "checkpoint") as folder:
        (folder / "learner_group").mkdir()
        (folder / "learner_group" / "state.pkl").write_bytes(pickle.dumps({"lr": 0.1}))
        (folder / "metadata.json").write_text("{}")
        checkpoint.write_manifest(folder, {"iteration": 3})
    return tmp_path / "checkpoint"


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_manifest(path)


class TestEveryByte:
    def test_every_byte_of_every_file_is_covered(self, small):
        assert read_manifest(small)["iteration"] == 3
        for name in attacks.files_of(small):
            content = (small / name).read_bytes()
            for place in range(len(content)):
                with attacks.changed(small / name, lambda path, place=place: attacks.flip(path, place, 1 << place % 8)):
                    refused(small, re.escape(name))
        assert read_manifest(small)["iteration"] == 3

    def test_truncated_removed_swapped_linked_and_added_files(self, small, tmp_path):
        kinds = set()
        for kind, name, change in attacks.damages(small, tmp_path):
            with attacks.changed(small / name, change):
                refused(small, re.escape(name))
            kinds.add(kind)
        assert kinds == {"truncated", "emptied", "lengthened", "removed", "swapped", "linked", "added"}
        assert read_manifest(small)["iteration"] == 3

    def test_an_added_folder_and_a_linked_folder(self, small, tmp_path):
        (small / "env_to_module_connector").mkdir()
        refused(small, "env_to_module_connector is no part of the checkpoint")
        (small / "env_to_module_connector").rmdir()
        (small / "learner_group").rename(tmp_path / "elsewhere")
        (small / "learner_group").symlink_to(tmp_path / "elsewhere")
        refused(small, "learner_group is a symbolic link")

    def test_a_pipe_is_not_opened(self, small):
        (small / "metadata.json").unlink()
        os.mkfifo(small / "metadata.json")
        refused(small, r"metadata\.json is no plain file")

    def test_rays_own_metadata_may_be_added(self, small):
        ray.tune.Checkpoint(str(small)).set_metadata({"note": "mine"})
        assert (small / ".metadata.json").exists() and read_manifest(small)["iteration"] == 3


class TestManifest:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("{", "is not valid JSON"),
            ("", "is not valid JSON"),
            ("[" * 100_000, "is not valid JSON"),
            ("[1]", "holds a list and no mapping"),
            ("null", "holds a NoneType and no mapping"),
            ("{}", "is not what was written"),
        ],
    )
    def test_malformed(self, small, text, match):
        (small / MANIFEST).write_text(text)
        refused(small, rf"{MANIFEST} {match}")

    @pytest.mark.parametrize(
        ("facts", "match"),
        [
            ({"files": None}, "'files' is None and no mapping"),
            ({"files": ["metadata.json"]}, "no mapping"),
            ({"files": {"metadata.json": 2}}, r"the entry of 'metadata\.json' is 2"),
            ({"files": {"metadata.json": {"size": "2", "sha256": "0" * 64}}}, r"the entry of 'metadata\.json'"),
            ({"files": {"metadata.json": {"size": 2, "sha256": "no"}}}, "instead of a size and a SHA-256"),
            ({"files": {"../secret": {"size": 2, "sha256": "0" * 64}}}, "names '../secret', which is no file within"),
            ({"files": {"/etc/passwd": {"size": 2, "sha256": "0" * 64}}}, "names '/etc/passwd', which is no file within"),
            ({"files": {"a/../metadata.json": {"size": 2, "sha256": "0" * 64}}}, "which is no file within"),
            ({"files": {"./metadata.json": {"size": 2, "sha256": "0" * 64}}}, "which is no file within"),
            ({"format": "4"}, "'format' is '4' instead of 4"),
            ({"format": 99, "rllib_nlac": "7.0.0"}, r"rllib_nlac 7\.0\.0 in checkpoint format 99"),
            ({"format": 2, "rllib_nlac": "0.1.0"}, r"rllib_nlac 0\.1\.0 in checkpoint format 2"),
        ],
    )
    def test_well_formed_and_wrong(self, small, facts, match):
        """As another program, or a hand, may have written it: its own checksum is right."""
        manifest = json.loads((small / MANIFEST).read_text())
        (small / MANIFEST).write_bytes(render({**manifest, **facts}))
        refused(small, match)
        refused(small, MANIFEST)

    def test_facts_that_are_missing(self, small):
        with opened(small) as verified:
            with pytest.raises(CheckpointError, match=rf"{MANIFEST} is malformed: it has no 'algorithm'"):
                checkpoint.check(verified, {"algorithm": "NLAC"})


@pytest.fixture()
def algorithm_checkpoint(config, ray_session, lent_engine, tmp_path) -> str:
    algorithm = config.build_algo()
    path = algorithm.save_to_path(str(tmp_path / "of_an_algorithm"))
    algorithm.stop()
    return path


@pytest.mark.process
@pytest.mark.parametrize("name", ["learner_group/state.pkl", MANIFEST, "learner_group"])
def test_what_may_not_be_read_is_said(small, name):
    """As another user, since nothing is forbidden to root."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    for folder in (small, *small.parents):
        if folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(0o755)
    (small / name).chmod(0)
    child = os.fork()
    if child == 0:
        os.setuid(OTHER_USER)
        try:
            read_manifest(small)
        except CheckpointError as error:
            os._exit(0 if f"{name}" in str(error) and "Permission denied" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestOpened:
    def test_a_folder_is_checked_once_and_again_when_it_was_closed(self, small, monkeypatch):
        """Fails where ``from_checkpoint`` reads a large checkpoint twice, or a later restore believes an earlier check."""
        checked = []
        monkeypatch.setattr(checkpoint, "verify", lambda *args: checked.append(args) or verify(*args))
        with opened(small) as verified:
            with opened(str(small), pyarrow.fs.LocalFileSystem()) as again:
                assert again is verified
            with opened(verified.folder) as again:
                assert again is verified and len(checked) == 1
        attacks.flip(small / "metadata.json", 0, 1)
        refused(small, r"metadata\.json is not what was written")

    def test_a_downloaded_copy_keeps_the_name_that_the_user_gave(self, small):
        uri = f"file://{small}"
        with opened(uri) as verified, opened(verified.folder) as again:
            assert again is verified and again.name == uri

    def test_the_copy_that_was_downloaded_is_what_is_checked_and_loaded(self, small):
        uri = f"file://{small}"
        with opened(uri) as verified:
            assert verified.folder != small and verified.name == uri
            shutil.rmtree(small)
            assert (verified.folder / "metadata.json").read_bytes() == b"{}"
        assert not verified.folder.exists()

    def test_a_file_system_of_ones_own(self, small):
        with opened(str(small), pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())) as verified:
            assert verified.folder != small and verified.manifest["iteration"] == 3


class TestAlgorithm:
    """A real checkpoint, by all ways in which it is read."""

    @pytest.fixture()
    def algorithm(self, config, ray_session, lent_engine):
        config.training(episodes_per_iteration=8, train_batch_size_per_learner=32, minibatch_size=16)
        algorithm = config.env_runners(num_envs_per_env_runner=8).build_algo()
        yield algorithm
        algorithm.stop()

    def test_all_ways_in_refuse_all_damages_by_name(self, algorithm, tmp_path):
        algorithm.train()
        saved = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
        algorithm.train()
        chosen = attacks.flips(saved, 0, seed=1)
        assert {name for name, *_ in chosen} == set(attacks.files_of(saved)) and len(chosen) > 20
        for name, place, mask in chosen:
            change = lambda path, place=place, mask=mask: attacks.flip(path, place, mask)  # noqa: E731
            assert attacks.attack(algorithm, saved, tmp_path, name, change) == "", (name, place, mask)
        for kind, name, change in attacks.damages(saved, tmp_path):
            if kind == "added" or name in (MANIFEST, "class_and_ctor_args.pkl"):
                assert attacks.attack(algorithm, saved, tmp_path, name, change) == "", (kind, name)
        algorithm.restore_from_path(str(saved))
        assert algorithm.iteration == 1

    def test_rllibs_own_class_refuses_what_it_has_not_read_itself(self, algorithm, tmp_path):
        """It unpickles the class and its configuration before any code of this package runs; the rest is verified first."""
        saved = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
        state = saved / "learner_group" / "learner" / "state.pkl"
        with attacks.changed(state, lambda path: attacks.flip(path, path.stat().st_size // 2, 1)):
            with pytest.raises(CheckpointError, match=r"learner_group/learner/state\.pkl is not what was written"):
                Algorithm.from_checkpoint(str(saved))
        with attacks.changed(saved / "class_and_ctor_args.pkl", lambda path: path.write_bytes(path.read_bytes() + b"\0")):
            with pytest.raises(CheckpointError, match=r"class_and_ctor_args\.pkl has"):
                Algorithm.from_checkpoint(str(saved))

    def test_a_file_damaged_in_one_checkpoint_is_whole_in_the_next(self, algorithm, tmp_path):
        """Checkpoints share the files of the replay buffer by links."""
        algorithm.train()
        first = Path(algorithm.save_to_path(str(tmp_path / "first")))
        texts = [episode.get_actions() for episode in algorithm.local_replay_buffer.episodes]
        (shared,) = (first / "replay_buffer").glob("episodes_*")
        attacks.flip(shared, shared.stat().st_size // 2, 1)
        second = algorithm.save_to_path(str(tmp_path / "second"))
        algorithm.local_replay_buffer.episodes.clear()
        algorithm.restore_from_path(second)
        assert [episode.get_actions() for episode in algorithm.local_replay_buffer.episodes] == texts
        with pytest.raises(CheckpointError, match="replay_buffer/episodes_00000000"):
            algorithm.restore_from_path(str(first))

    def test_a_component_is_verified_with_its_checkpoint(self, algorithm, tmp_path):
        saved = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        before = export_weights(algorithm.learner_group)[Weights.POLICY]
        algorithm.train()
        algorithm.restore_from_path(f"{saved}/{attacks.COMPONENT}", component=attacks.COMPONENT)
        after = export_weights(algorithm.learner_group)[Weights.POLICY]
        assert all(torch.equal(before[name], after[name]) for name in before) and algorithm.iteration == 1
        target = export_weights(algorithm.learner_group)[Weights.TARGET]
        assert all(torch.equal(before[name], target[name]) for name in before)

    def test_a_learner_that_was_not_restored_is_no_silent_loss(self, config, ray_session, lent_engine, tmp_path, monkeypatch):
        """RLlib does not look at what learners in other processes say of a restore."""
        config.training(episodes_per_iteration=8, train_batch_size_per_learner=32, minibatch_size=16).learners(num_learners=2)
        algorithm = config.build_algo()
        try:
            saved = Path(algorithm.save_to_path(str(tmp_path / "checkpoint")))
            state, check = saved / "learner_group" / "learner" / "state.pkl", checkpoint.check
            monkeypatch.setattr(checkpoint, "check", lambda *args: (check(*args), state.write_bytes(b"no pickle")))
            with pytest.raises(CheckpointError, match="a learner could not be restored"):
                algorithm.restore_from_path(str(saved))
        finally:
            algorithm.stop()


def test_rllibs_own_checkpoints_are_read_as_ever(tmp_path, ray_session):
    """Importing this package changes nothing of ``Algorithm.from_checkpoint``."""
    from ray.rllib.algorithms.ppo import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).training(train_batch_size=128)
    algorithm = config.build_algo()
    path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    algorithm.stop()
    assert not (tmp_path / "checkpoint" / MANIFEST).exists()
    again = Algorithm.from_checkpoint(path)
    again.stop()


def test_an_environment_that_nobody_registered_here(config):
    """As in a script that restores what another one trained; the class of a checkpoint imports this package, and no other."""
    config.env = "MyWorld"
    with pytest.raises(ValueError, match=r"import the module that calls rllib_nlac\.register\('MyWorld', \.\.\.\) first"):
        config.build_algo()


@pytest.mark.long
def test_a_script_that_has_not_imported_the_package(algorithm_checkpoint, ray_session):
    """RLlib's own class is enough: the pickled class brings this package along."""
    code = (
        "import sys; from ray.rllib.algorithms.algorithm import Algorithm; assert 'rllib_nlac' not in sys.modules\n"
        "print('restored', Algorithm.from_checkpoint(sys.argv[1]).iteration)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "RAY_ADDRESS": ray_session}
    ran = subprocess.run(
        [sys.executable, "-c", code, algorithm_checkpoint], capture_output=True, text=True, env=environment, timeout=600
    )
    assert "restored 0" in ran.stdout, ran.stderr[-3000:]
