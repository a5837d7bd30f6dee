"""Storage that is full, read-only or in the way, and what killed processes leave: on real file systems, with real kills."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pyarrow.fs
import pytest
from begun import begun_with, kept_in
from command_runs import SMALL, wait_for

from rllib_nlac.checkpoints import checkpoint, scratch, storage
from rllib_nlac.checkpoints.checkpoint import CheckpointError, read_manifest, render
from rllib_nlac.checkpoints.storage import StorageError, check_storage
from rllib_nlac.command.resume import make_resumable
from rllib_nlac.diagnostics.notices import Notices
from rllib_nlac.diagnostics.record import Record, RecordSettings
from rllib_nlac.diagnostics.tensorboard import Summaries
from rllib_nlac.replay.dialogues import write_dialogues
from rllib_nlac.replay.storage import EpisodeFiles


def write(path: Path, text: str = "content", **facts) -> None:
    with checkpoint.written_at_once(path) as folder:
        (folder / "file").write_text(text)
        checkpoint.write_manifest(folder, facts)


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture()
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own, mounted with the given options; skipped where mounts are not allowed."""
    mounted = tmp_path / "disk"
    mounted.mkdir()

    def mount(options: str) -> Path:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        return mounted

    yield mount
    subprocess.run(["umount", "-l", mounted], capture_output=True)


class Child:
    """A process that runs a function, up to where that calls ``ready``; the constructor returns then."""

    def __init__(self, work: Callable[[Callable[[], None]], object]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work(lambda: os.write(writer, b"."))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)

    def wait(self) -> int:
        """The exit status; of a signal its negative number."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL


@pytest.mark.process
class TestLeftovers:
    def test_a_dead_processs_folder_goes_and_a_living_ones_stays(self, tmp_path):
        def hold(ready: Callable[[], None]) -> None:
            mine = scratch.ScratchFolder("mine_", tmp_path)
            (mine.path / "file").write_text("x")
            ready()
            time.sleep(1000)

        dead, living = Child(hold), Child(hold)
        (tmp_path / "mine_without_a_lock").mkdir()  # not ours to judge
        folders = {path for path in tmp_path.glob("mine_*") if path.is_dir()}
        assert len(folders) == 3 and scratch.sweep("mine_*", tmp_path) == []
        dead.kill()
        (swept,) = scratch.sweep("mine_*", tmp_path)
        assert swept in folders and not swept.exists()
        assert {path for path in tmp_path.glob("mine_*") if path.is_dir()} == folders - {swept}
        living.kill()
        own = scratch.ScratchFolder("mine_", tmp_path)
        assert {path.name for path in tmp_path.glob("mine_*") if path.is_dir()} == {"mine_without_a_lock", own.path.name}
        own.remove()
        assert visible(tmp_path) == ["mine_without_a_lock"]

    def test_many_at_once_never_take_each_others(self, tmp_path):
        """Eight processes make and remove folders as fast as they can, and each finds its own as it left it."""

        def work(ready: Callable[[], None]) -> None:
            ready()
            for number in range(150):
                mine = scratch.ScratchFolder("mine_", tmp_path)
                (mine.path / "file").write_text(str(number))
                assert (mine.path / "file").read_text() == str(number)
                mine.remove()

        children = [Child(work) for _ in range(8)]
        assert [child.wait() for child in children] == [0] * 8 and visible(tmp_path) == []

    def test_the_replay_buffers_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        def hold(ready: Callable[[], None]) -> None:
            files = EpisodeFiles()
            ready()
            time.sleep(1000)
            del files

        Child(hold).kill()
        assert len(visible(tmp_path)) == 2  # folder and lock
        own = EpisodeFiles()
        assert visible(tmp_path) == [own._folder.path.name, f"{own._folder.path.name}.lock"]

    def test_a_second_save_to_a_uri_replaces_the_first_or_leaves_it(self, tmp_path, monkeypatch):
        """Fails where it is laid over the first: a file that only that one had makes the whole checkpoint foreign."""
        uri = f"file://{tmp_path}/latest"

        def save(*names: str) -> None:
            with checkpoint.written_at_once(uri) as folder:
                for name in names:
                    (folder / name).write_text(name)
                checkpoint.write_manifest(folder, {})

        save("old", "both")
        save("new", "both")
        with checkpoint.opened(uri) as verified:
            assert sorted(verified.manifest["files"]) == ["both", "new"]
        monkeypatch.setattr(pyarrow.fs, "copy_files", Mock(side_effect=OSError("the network is gone")))
        with pytest.raises(OSError, match="the network is gone"):
            save("third")
        monkeypatch.undo()
        with checkpoint.opened(uri) as verified:
            assert sorted(verified.manifest["files"]) == ["both", "new"]
        assert visible(tmp_path) == ["latest"]

    def test_where_no_folder_can_be_moved_it_is_copied(self, tmp_path):
        """As on an object store."""
        (tmp_path / "staging").mkdir()
        (tmp_path / "staging" / "file").write_text("new")
        files = pyarrow.fs.LocalFileSystem()
        filesystem = Mock(wraps=files)
        filesystem.move.side_effect = OSError("no folders here")

        def copy(source, target, source_filesystem=None, destination_filesystem=None):
            shutil.copytree(source, target, dirs_exist_ok=True)

        with patch.object(pyarrow.fs, "copy_files", copy):
            checkpoint._upload(tmp_path / "staging", filesystem, str(tmp_path / "latest"))
        assert (tmp_path / "latest" / "file").read_text() == "new" and visible(tmp_path) == ["latest", "staging"]

    def test_half_a_checkpoint_goes_with_the_next_and_a_living_one_is_finished(self, tmp_path):
        def work(name: str, seconds: float, ready: Callable[[], None]) -> None:
            with checkpoint.written_at_once(tmp_path / name) as folder:
                (folder / "file").write_text("half")
                ready()
                time.sleep(seconds)
                checkpoint.write_manifest(folder, {})

        living = Child(lambda ready: work("living", 2, ready))
        Child(lambda ready: work("killed", 1000, ready)).kill()
        assert len([name for name in visible(tmp_path) if not name.endswith(".lock")]) == 2
        write(tmp_path / "mine")
        (unfinished,) = [name for name in visible(tmp_path) if name.startswith(".") and not name.endswith(".lock")]
        assert unfinished.startswith(".living.unfinished.")
        assert living.wait() == 0 and visible(tmp_path) == ["living", "mine"]
        assert read_manifest(tmp_path / "living")["files"].keys() == {"file"}

    def swap(self, path: Path, at_step: int, action: Callable[[], object]) -> Child:
        """Another process writes a checkpoint anew, and does something between two steps of the swap."""

        def work(ready: Callable[[], None]) -> None:
            replace, steps = Path.replace, []

            def counted(source: Path, target: Path) -> Path:
                result = replace(source, target)
                steps.append(source)
                if len(steps) == at_step:
                    action()
                return result

            Path.replace = counted
            ready()
            write(path, "new", number=2)

        return Child(work)

    @pytest.mark.parametrize(("step", "left"), [(1, "old"), (2, "new")])
    def test_killed_between_the_steps_of_a_swap(self, tmp_path, step, left):
        write(tmp_path / "it", "old", number=1)
        assert self.swap(tmp_path / "it", step, lambda: os.kill(os.getpid(), signal.SIGKILL)).wait() == -signal.SIGKILL
        assert ".it.former" in visible(tmp_path)
        write(tmp_path / "another")
        assert visible(tmp_path) == ["another", "it"]
        assert (tmp_path / "it" / "file").read_text() == left

    def test_who_reads_in_the_midst_of_a_swap_waits_for_its_end(self, tmp_path):
        write(tmp_path / "it", "old", number=1)
        process = self.swap(tmp_path / "it", 1, lambda: time.sleep(1))
        while (tmp_path / "it").exists():
            time.sleep(0.01)
        assert read_manifest(tmp_path / "it")["number"] == 2
        assert process.wait() == 0 and visible(tmp_path) == ["it"]


class TestResume:
    """What ``--resume`` removes, puts aside and leaves alone."""

    @pytest.fixture()
    def trial(self, tmp_path, monkeypatch) -> Path:
        folder = tmp_path / "trial"
        for number in range(3):
            write(folder / f"checkpoint_00000{number}", str(number), iteration=number)
        recorded = type("Checkpoint", (), {"path": str(folder / "checkpoint_000002")})
        own = begun_with({}, {})
        own.path, own.checkpoint = str(folder), recorded
        found = SimpleNamespace(trials=[own])
        monkeypatch.setattr("rllib_nlac.command.resume.ExperimentAnalysis", lambda folder: found)
        (tmp_path / "experiment_state-1.json").write_text("{}")
        return folder

    def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_takes_its_place(self, tmp_path, trial):
        (trial / "checkpoint_000002" / "file").write_text("X")
        lines = make_resumable(kept_in(tmp_path))
        assert "file is not what was written" in lines[0] and "checkpoint_000001 takes its place" in lines[1]
        assert (trial / "checkpoint_000002" / "file").read_text() == "1"
        assert (trial / "damaged_checkpoint_000002" / "file").read_text() == "X"

    def test_a_second_damaged_one_of_the_same_number_is_put_aside_beside_the_first(self, tmp_path, trial):
        for text in ("X", "Y", "Z"):
            (trial / "checkpoint_000002" / "file").write_text(text)
            lines = make_resumable(kept_in(tmp_path))
        assert lines[0].endswith("put aside as damaged_checkpoint_000002_3")
        names = [f"damaged_checkpoint_000002{number}" for number in ("", "_2", "_3")]
        assert [(trial / name / "file").read_text() for name in names] == ["X", "Y", "Z"]
        assert (trial / "checkpoint_000002" / "file").read_text() == "1"

    def test_one_of_an_older_version_is_refused_and_kept(self, tmp_path, trial):
        for path in trial.iterdir():
            (path / checkpoint.MANIFEST).write_bytes(render({"format": 2, "rllib_nlac": "0.0.9"}))
        with pytest.raises(CheckpointError, match=r"0\.0\.9 in checkpoint format 2"):
            make_resumable(kept_in(tmp_path))
        assert len(visible(trial)) == 3

    def test_all_damaged(self, tmp_path, trial):
        for path in trial.iterdir():
            (path / "file").write_text("X")
        with pytest.raises(CheckpointError, match=r"no checkpoint in .*trial can be used"):
            make_resumable(kept_in(tmp_path))
        assert len(visible(trial)) == 3


class TestCannotBeWritten:
    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(
                StorageError, match=rf"cannot write to .*{folder.name}: {tmp_path}/file is a file and no folder"
            ):
                check_storage(folder)
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_read_only_folder(self, disk):
        mounted = disk("size=1m,ro")
        for folder in (mounted, mounted / "below"):
            with pytest.raises(StorageError, match=r"Read-only file system\. Mend it, or give another --storage-path"):
                check_storage(folder)

    def test_a_full_disk(self, disk):
        mounted = disk("size=32k")
        with pytest.raises(StorageError, match="No space left on device"):
            check_storage(mounted)
        assert visible(mounted) == []

    def test_a_full_disk_keeps_the_former_checkpoint_and_nothing_of_the_new(self, disk):
        mounted = disk("size=64k")
        write(mounted / "it", "old", number=1)
        with pytest.raises(OSError, match="No space left"):
            write(mounted / "it", "x" * 100_000, number=2)
        assert visible(mounted) == ["it"] and read_manifest(mounted / "it")["number"] == 1

    def test_what_is_only_recorded_ends_no_run(self, disk, caplog, monkeypatch):
        mounted = disk("size=32k")
        summaries = Summaries(str(mounted))
        lines = [{"action": "x" * 9000}]
        for iteration in range(10):
            summaries.write_transition(iteration, lines)
        summaries.close()
        assert caplog.text.count("no more transitions are shown") == 1 and "No space left on device" in caplog.text
        Summaries(str(mounted / "new")).write_transition(0, lines)
        monkeypatch.setattr("rllib_nlac.replay.dialogues.as_row", lambda episode: {"text": "x" * 90_000})
        write_dialogues(mounted / "episodes.jsonl", [None])
        assert "config.output: 1 episodes were not recorded" in caplog.text
        assert not list(mounted.glob("episodes*"))

    def test_a_full_disk_loses_the_record_and_says_so_once(self, disk):
        mounted = disk("size=32k")
        notices = Notices()
        record = Record(mounted, RecordSettings(), lambda text: notices.update("record", text))
        record.write("iteration", 1, [{"text": "x" * 1000}])
        for iteration in range(2, 10):
            record.write("iteration", iteration, [{"text": "x" * 40_000}])
        (said,) = notices.take()
        assert "has a gap" in said and "No space left on device. The run goes on without" in said
        assert visible(mounted / "transitions") == ["iteration_00000001.jsonl"]
        record.write("iteration", 10, [{"text": "x" * 1000}])  # there is room again
        assert len(visible(mounted / "transitions")) == 2

    def test_tunes_complaints_become_one_line(self, tmp_path, disk, caplog):
        mounted = disk("size=64k")
        logger = logging.getLogger("ray.tune.execution.experiment_state")
        with pytest.raises(StorageError, match=r"cannot write to the storage folder .*No space left on device"):
            with storage.watched(mounted):
                for _ in range(3):
                    try:
                        (mounted / "file").write_bytes(bytes(100_000))
                    except OSError:
                        logger.error("Saving experiment state failed with exception: ", exc_info=True)
        assert caplog.text.count("No space left") == 1 and "Traceback" not in caplog.text


class TestCommand:
    def failed(self, command) -> str:
        """What a command printed that has ended with an error in words."""
        assert command.wait(600) == 1 and "Traceback" not in command.stdout, command.stdout[-3000:]
        return command.stdout

    def test_a_file_in_the_way_is_said_before_ray_starts(self, tmp_path, commands):
        (tmp_path / "results").write_text("")
        output = self.failed(commands.train(tmp_path, SMALL, storage=tmp_path / "results"))
        *waiting, error = output.splitlines()
        assert error.startswith("Error: cannot write to the storage folder") and waiting == ["loading the libraries ..."]

    @pytest.mark.long
    @pytest.mark.parametrize("trouble", ["full", "read_only"])
    def test_in_the_middle_of_a_run(self, tmp_path, disk, trouble, commands, ray_session):
        mounted = disk("size=36m" if trouble == "full" else "size=500m")
        command = commands.train(tmp_path, SMALL, storage=mounted, ray=ray_session)
        if trouble == "read_only":
            wait_for(lambda: list(mounted.glob("small/*/checkpoint_000001/rllib_nlac.json")), command)
            remount = ["mount", "-o", "remount,ro", mounted]  # refused while a file is being written
            wait_for(lambda: subprocess.run(remount, capture_output=True).returncode == 0, command)
        output = self.failed(command)
        (trial,) = mounted.glob("small/*/")
        whole = checkpoint.last_whole(trial)
        reason = "No space left on device" if trouble == "full" else "Read-only file system"
        assert f"cannot write a checkpoint to {trial}/checkpoint_" in output and reason in output, output
        assert f"The last whole checkpoint is {whole}" in output and f"rllib evaluate {whole} --render" in output
