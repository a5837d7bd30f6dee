"""An interrupted command goes on where its last whole checkpoint was: kill -9 of everything at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from begun import begun_with, kept_in
from command_runs import SMALL, iterations, kill_all, wait_for
from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint, CheckpointConfig
from typer.testing import CliRunner

from rllib_nlac import NLACConfig
from rllib_nlac.checkpoints import checkpoint
from rllib_nlac.checkpoints.checkpoint import CheckpointError, read_manifest
from rllib_nlac.checkpoints.named_files import named_files
from rllib_nlac.checkpoints.start import starting_point
from rllib_nlac.command import resume
from rllib_nlac.command.experiment import ExperimentError
from rllib_nlac.command.resume import (
    check_unchanged,
    how_to_go_on,
    kept_checkpoint,
    make_resumable,
    own_checkpoint,
    those_begun,
)


def last_whole(folder: Path) -> int:
    """The training iteration of the newest whole checkpoint."""
    found = []
    for path in folder.glob("small/*/checkpoint_*"):
        with contextlib.suppress(CheckpointError):
            found.append(read_manifest(path)["iteration"])
    return max(found)


@pytest.mark.parametrize("ray_of_its_own", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_and_resumed(tmp_path, commands, ray_session, ray_of_its_own):
    """The command alone, whose trial Ray ends then; or with it all of a Ray that it had started."""
    where, entry = "local" if ray_of_its_own else ray_session, {**SMALL, "stop": {"training_iteration": 6}}
    process = commands.train(tmp_path, entry, ray=where)
    wait_for(lambda: list(tmp_path.glob("small/*/checkpoint_00000[2-9]")), process)
    time.sleep(random.uniform(0, 1.5))
    kill_all(process)
    reached = last_whole(tmp_path)
    resumed = commands.train(tmp_path, entry, "--resume", ray=where)
    assert resumed.wait() == 0, resumed.stdout[-3000:]
    # At most the one iteration is done again whose checkpoint Tune had no time to write down; and a trial that outlives its
    # command by a moment may write another.
    done = iterations(resumed.stdout)
    assert reached >= 2 and reached <= done[0] <= reached + (1 if ray_of_its_own else 2) and done[-1] == 6
    (results,) = tmp_path.glob("small/*/result.json")
    last = json.loads(results.read_text().splitlines()[-1])
    assert last["env_runners"]["num_episodes_lifetime"] == 48 and last["logprob_gap"] < 1e-3


class TestOfSeveral:
    """Experiments of one file run one after the other, so that an interrupted file holds some that never began."""

    def test_those_that_had_not_begun_are_told_apart(self, tmp_path):
        experiments = [kept_in(tmp_path / name) for name in ("first", "second", "third")]
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "experiment_state-2026.json").write_text("{}")
        assert those_begun(experiments) == ["first", "second"]
        with pytest.raises(ExperimentError, match=r"nothing to resume: .*third holds no experiment"):
            those_begun(experiments[2:])

    def test_they_begin_by_the_command_that_goes_on(self, tmp_path, monkeypatch):
        """The first one is at its end, the second had not begun."""
        from rllib_nlac.command import cli, run

        runs = []
        monkeypatch.setattr(run, "_run", lambda experiment, resume, *_: runs.append((experiment.name, resume)) or True)
        (tmp_path / "results" / "first").mkdir(parents=True)
        (tmp_path / "results" / "first" / "experiment_state-2026.json").write_text("{}")
        (tmp_path / "two.yaml").write_text(json.dumps({"first": SMALL, "second": SMALL}))
        command = ["train", "file", str(tmp_path / "two.yaml"), "--storage-path", str(tmp_path / "results"), "--resume"]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0 and runs == [("first", True), ("second", False)], result.output
        assert "second: had not begun, and begins now" in result.output


class TestRemote:
    """A storage that is no folder of this machine."""

    def test_what_tune_keeps_there_is_found(self, tmp_path):
        experiment = kept_in(tmp_path / "run", storage_path=f"file://{tmp_path}")
        with pytest.raises(ExperimentError, match=rf"nothing to resume: file://{tmp_path}/run holds"):
            those_begun([experiment])
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "experiment_state-2026.json").write_text("{}")
        assert those_begun([experiment]) == ["run"] and make_resumable(experiment) == []

    def test_a_kind_that_only_ray_knows_is_left_to_it(self, tmp_path):
        assert those_begun([kept_in(tmp_path, storage_path="odd://bucket/results")]) == [tmp_path.name]

    def test_a_person_reads_its_address(self, tmp_path):
        lines = how_to_go_on(kept_in(tmp_path / "run", storage_path="s3://bucket/results"))
        assert lines[1].endswith("from the last checkpoint of each trial; all is in s3://bucket/results/run")


class TestOtherSettings:
    """Tune would go on with what a trial was begun with, and say nothing."""

    def test_the_same_go_on(self, tmp_path):
        experiment = kept_in(tmp_path, config={"lr": 0.1, "env_config": {"a": [1, 2]}}, stop={"training_iteration": 8})
        check_unchanged(experiment, [begun_with({"lr": 0.1, "env_config": {"a": (1, 2)}}, {"training_iteration": 8})])

    @pytest.mark.parametrize(
        ("now", "then"),
        [
            ({"run": "NLAC_FrozenCritic"}, {"run": "FrozenCritic"}),
            ({"run": "PPO"}, {"run": "TextPPO"}),
            ({"run": "rloo:RLOO"}, {"run": "RLOO"}),
            ({"checkpoint_config": {"checkpoint_at_end": False, "num_to_keep": None}}, {}),
            (
                {"checkpoint_config": {"num_to_keep": 2, "checkpoint_frequency": 1}},
                {"num_to_keep": 2, "checkpoint_frequency": 1},
            ),
            ({"max_failures": None}, {"failures": 3}),  # Tune's own number
            ({"max_failures": -1}, {"failures": -1}),
        ],
        ids=str,
    )
    def test_what_tune_writes_in_another_way_is_no_change(self, tmp_path, now, then):
        check_unchanged(kept_in(tmp_path, **now), [begun_with({}, None, **then)])

    @pytest.mark.parametrize(
        ("now", "then", "said"),
        [
            ({"run": "NLAC_FrozenCritic"}, {}, r'run was "NLAC" and is "FrozenCritic"\.'),
            ({"config": {"env": "GuessNumber"}}, {}, r'config\.env was "TwentyQuestions" and is "GuessNumber"\.'),
            ({"max_failures": 3}, {}, r"max_failures was 0 and is 3\."),
            (
                {"checkpoint_config": {"checkpoint_frequency": 1}},
                {},
                r"checkpoint_config\.checkpoint_frequency was not set and is 1\.",
            ),
            ({}, {"num_to_keep": 2}, r"checkpoint_config\.num_to_keep was 2 and is not set\."),
        ],
        ids=str,
    )
    def test_what_tune_would_ignore_is_named(self, tmp_path, now, then, said):
        """Fails where stop and config alone are compared: the old algorithm goes on in the old environment."""
        with pytest.raises(ExperimentError, match=f"now something else is asked for: {said} Take that back"):
            check_unchanged(kept_in(tmp_path, **now), [begun_with({}, None, **then)])

    @pytest.mark.parametrize(
        ("config", "stop", "said"),
        [
            ({"lr": 0.2}, {"training_iteration": 8}, r"config\.lr was 0\.1 and is 0\.2\."),
            ({"lr": 0.1, "tau": 0.5}, {"training_iteration": 8}, r"config\.tau was not set and is 0\.5"),
            ({}, {"training_iteration": 8}, r"config\.lr was 0\.1 and is not set"),
            ({"lr": 0.1}, {"training_iteration": 16}, r"stop\.training_iteration was 8 and is 16"),
        ],
    )
    def test_others_are_named(self, tmp_path, config, stop, said):
        experiment = kept_in(tmp_path, config=config, stop=stop)
        with pytest.raises(ExperimentError, match=rf"{said}.*--restore CHECKPOINT"):
            check_unchanged(experiment, [begun_with({"lr": 0.1}, {"training_iteration": 8})])

    def test_another_checkpoint_to_begin_with_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        experiment, plain, restored = kept_in(tmp_path), begun_with({}, None), begun_with({}, None, f"{tmp_path}/one")
        for trial in (plain, restored):
            check_unchanged(experiment, [trial])
        check_unchanged(experiment, [restored], Path("one"))
        with pytest.raises(ExperimentError, match=r"begun without --restore\. Leave out --restore; .*another run with one,"):
            check_unchanged(experiment, [plain], Path("one"))
        with pytest.raises(ExperimentError, match=rf"begun with --restore {tmp_path}/one\. .*another run with two,"):
            check_unchanged(experiment, [restored], Path("two"))

    def test_what_a_sweep_or_pbt_chose_is_no_change(self, tmp_path):
        config = {"lr": {"grid_search": [0.1, 0.2]}, "env_config": {"depth": {"choice": [1, 2]}}, "tau": 0.1}
        scheduler = {"type": "pbt", "hyperparam_mutations": {"tau": [0.1, 0.2]}}
        chosen = {"lr": 0.2, "env_config": {"depth": 2}, "tau": 0.2}
        check_unchanged(kept_in(tmp_path, config=config, scheduler=scheduler), [begun_with(chosen, None)])

    def test_what_pb2_chose_is_no_change(self, tmp_path):
        scheduler = {"type": "pb2", "hyperparam_bounds": {"lr": [0.1, 0.3]}}
        check_unchanged(kept_in(tmp_path, config={"lr": 0.1}, scheduler=scheduler), [begun_with({"lr": 0.27}, None)])


class TestAfterAnotherRun:
    """A finished run of the same name left its state and a checkpoint in the folder."""

    @pytest.fixture()
    def experiment(self, tmp_path):
        from rllib_nlac.checkpoints import checkpoint

        with checkpoint.written_at_once(tmp_path / "run" / "NLAC_old" / "checkpoint_000000") as folder:
            checkpoint.write_manifest(folder, {"iteration": 1})
        (tmp_path / "run" / "experiment_state-1.json").write_text("{}")
        for path in (tmp_path / "run").iterdir():
            os.utime(path, (1000, 1000))
        return kept_in(tmp_path / "run")

    def test_nothing_of_its_own_was_begun(self, experiment):
        """Fails where any state in the folder counts."""
        assert how_to_go_on(experiment, 2000) == ["Interrupted before anything was begun: there is nothing to go on with."]
        assert "from the last checkpoint" in how_to_go_on(experiment)[1]  # as of a run that was resumed

    def test_it_goes_on_from_its_own_checkpoints(self, experiment, tmp_path):
        """Fails where any checkpoint in the folder counts."""
        (tmp_path / "run" / "experiment_state-2.json").write_text("{}")
        (tmp_path / "run" / "NLAC_new").mkdir()
        lines = how_to_go_on(experiment, 2000)
        assert "from the beginning, as no checkpoint was written yet (in a new run checkpoint_config: {" in lines[1]
        (tmp_path / "run" / "NLAC_old" / "checkpoint_000000").rename(tmp_path / "run" / "NLAC_new" / "checkpoint_000000")
        assert "from the last checkpoint of each trial" in how_to_go_on(experiment, 2000)[1]

    @pytest.mark.parametrize(("options", "said"), [((), "nothing to go on with"), (("--resume",), "from the last checkpoint")])
    def test_the_command_tells_them_apart(self, experiment, tmp_path, monkeypatch, options, said):
        """What a run that is resumed had written before it counts."""
        from rllib_nlac.command import cli, run

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "_run", interrupted)
        (tmp_path / "run.yaml").write_text(json.dumps({"run": SMALL}))
        command = ["train", "file", str(tmp_path / "run.yaml"), "--storage-path", str(tmp_path), *options]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 130 and said in result.output


def test_a_checkpoint_that_a_trial_was_restored_from_is_not_its_own(tmp_path):
    """Tune names it as the trial's until there is another."""
    for name, own in ((tmp_path / "other" / "checkpoint_000003", None), (tmp_path / "checkpoint_000000",) * 2):
        trial = SimpleNamespace(path=str(tmp_path), checkpoint=SimpleNamespace(path=str(name)))
        assert own_checkpoint(trial) == own
        trial.run_metadata = SimpleNamespace(checkpoint_manager=_CheckpointManager(CheckpointConfig()))
        assert kept_checkpoint(trial) == own
    assert own_checkpoint(SimpleNamespace(path=str(tmp_path), checkpoint=None)) is None


def test_of_checkpoints_that_are_kept_by_a_score_the_best_is_to_be_played(tmp_path):
    manager = _CheckpointManager(CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="a/b"))
    for number, score in enumerate((0.5, 0.9, 0.1)):
        (place := tmp_path / f"checkpoint_{number}").mkdir()
        manager.register_checkpoint(_TrainingResult(last := Checkpoint(str(place)), {"a/b": score}))
    trial = SimpleNamespace(path=str(tmp_path), checkpoint=last, run_metadata=SimpleNamespace(checkpoint_manager=manager))
    assert kept_checkpoint(trial) == tmp_path / "checkpoint_1" and own_checkpoint(trial) == tmp_path / "checkpoint_2"
    (tmp_path / "checkpoint_3").mkdir()
    manager.register_checkpoint(_TrainingResult(Checkpoint(str(tmp_path / "checkpoint_3")), {}))  # Tune puts it behind the best
    assert kept_checkpoint(trial) == tmp_path / "checkpoint_2"


class TestNamedFiles:
    """A trial reads them anew when it goes on."""

    @pytest.fixture()
    def begun(self, tmp_path, monkeypatch):
        """What goes on, and the files that its configuration names, by what they are for."""
        files = {name: tmp_path / name for name in ("mine.yaml", "base.yaml", "words.txt", "a.jsonl", "b.jsonl", "tasks")}
        files["base.yaml"].write_text("extends: default\nname: base\n")
        files["mine.yaml"].write_text("extends: base.yaml\nname: mine\npredict: What follows?\n")
        files["words.txt"].write_text("dog\n")
        files["a.jsonl"].write_text("{}\n")
        files["tasks"].mkdir()
        keys = {
            "prompts": str(files["mine.yaml"]),
            "env_config": {"words": str(files["words.txt"])},
            "evaluation_config": {"env_config": {"val_files": [str(tmp_path / "*.jsonl")], "folder": str(files["tasks"])}},
        }
        config = NLACConfig().update_from_dict({"env": "TwentyQuestions", **keys})
        trial = tmp_path / "trial"
        with checkpoint.written_at_once(trial / "checkpoint_000000") as folder:
            checkpoint.write_manifest(folder, {checkpoint.NAMED_FILES: named_files(config)})
        tune = begun_with(keys, {})
        tune.path, tune.checkpoint = str(trial), SimpleNamespace(path=str(trial / "checkpoint_000000"))
        monkeypatch.setattr(resume, "ExperimentAnalysis", lambda folder: SimpleNamespace(trials=[tune]))
        return lambda: make_resumable(kept_in(tmp_path, config=keys)), files

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            (
                "mine.yaml",
                "extends: base.yaml\nname: mine\npredict: What then?\n",
                r"prompts: \S*/mine\.yaml \(has changed\)\.",
            ),
            ("base.yaml", "extends: small\nname: base\n", r"prompts: \S*/mine\.yaml \(has changed\)\."),
            ("words.txt", "cat\n", r"were: \S*/words\.txt \(has changed\)\."),
            ("a.jsonl", "{}\n{}\n", r"were: \S*/a\.jsonl \(has changed\)\."),
            ("b.jsonl", "{}\n", r"were: \S*/b\.jsonl \(is new\)\."),
            ("words.txt", None, r"were: \S*/words\.txt \(is gone\)\."),
        ],
    )
    def test_a_file_that_is_another_by_now_is_named_with_both_ways_out(self, begun, name, text, said):
        go_on, files = begun
        assert go_on() == []
        files[name].unlink() if text is None else files[name].write_text(text)
        ways = r" Put them back .*checkpoint_000000/prompts\.yaml.* --restore \S*/checkpoint_000000, in place of --resume"
        with pytest.raises(ExperimentError, match=said + ways):
            go_on()

    def test_a_run_that_began_from_another_runs_folder_goes_on(self, tmp_path, monkeypatch):
        """Fails where the prompts are chosen by the folder's name, in which there is no model."""

        def export(checkpoint, target, merge):
            shutil.copytree(NLACConfig().model_path, target)

        monkeypatch.setattr("rllib_nlac.checkpoints.start.export_model", export)
        with checkpoint.written_at_once(tmp_path / "warm_up" / "checkpoint_000000") as folder:
            checkpoint.write_manifest(folder, {})
        trial, keys = tmp_path / "trial", {"language_model": str(tmp_path / "warm_up")}
        started = NLACConfig().update_from_dict({"language_model": starting_point(keys["language_model"])})
        assert started.model_defaults.prompts == "small"
        with checkpoint.written_at_once(trial / "checkpoint_000000") as folder:
            checkpoint.write_manifest(folder, {checkpoint.NAMED_FILES: named_files(started)})
        tune = begun_with(keys, {})
        tune.path, tune.checkpoint = str(trial), SimpleNamespace(path=str(trial / "checkpoint_000000"))
        monkeypatch.setattr(resume, "ExperimentAnalysis", lambda folder: SimpleNamespace(trials=[tune]))
        assert make_resumable(kept_in(tmp_path, config=keys)) == []

    def test_what_changes_nothing_is_no_change(self, begun):
        """A comment in a prompt set, and what is within a folder that is named."""
        go_on, files = begun
        files["mine.yaml"].write_text(f"# Mine.\n{files['mine.yaml'].read_text()}")
        (files["tasks"] / "new").write_text("x")
        assert go_on() == []


def test_nothing_to_resume_is_said(tmp_path, commands):
    resumed = commands.train(tmp_path, SMALL, "--resume")
    assert resumed.wait() == 2 and "nothing to resume" in resumed.stdout


@pytest.mark.parametrize("damage", ["half", "gone"])
def test_half_copies_go_and_what_tune_remembers_comes_back(tmp_path, monkeypatch, damage):
    trial = tmp_path / "trial"
    for number in range(3):
        with checkpoint.written_at_once(trial / f"checkpoint_00000{number}") as folder:
            (folder / "file").write_text(str(number))
            checkpoint.write_manifest(folder, {"iteration": number})
    recorded = trial / "checkpoint_000001"

    tune = begun_with({}, {})
    tune.path, tune.checkpoint = str(trial), SimpleNamespace(path=str(recorded))
    monkeypatch.setattr(resume, "ExperimentAnalysis", lambda folder: SimpleNamespace(trials=[tune]))
    experiment = kept_in(tmp_path)
    (tmp_path / "experiment_state-1.json").write_text("{}")
    if damage == "half":
        (trial / "checkpoint_000002" / "file").unlink()
        assert len(make_resumable(experiment)) == 1
        assert sorted(path.name for path in trial.iterdir()) == ["checkpoint_000000", "checkpoint_000001"]
    else:
        import shutil

        shutil.rmtree(recorded)
        assert "checkpoint_000002 takes its place" in make_resumable(experiment)[0]
        assert (recorded / "file").read_text() == "2"
