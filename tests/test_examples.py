"""The package as it is installed from a wheel, away from its repository: commands, examples and all data files."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rllib_nlac.command.cli import app
from rllib_nlac.command.experiment import load_experiments, resolve
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.inputs import examples
from rllib_nlac.replay.dialogues import input_files
from rllib_nlac.version import __version__

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def test_every_example_is_listed_and_printed():
    listed = CliRunner().invoke(app, ["examples"]).output
    for path in (ROOT / "tuned_examples").glob("*.yaml"):
        (line,) = [line for line in listed.splitlines() if line.split(" ")[0] == path.stem]
        assert len(line.split("  ", 1)[1].strip()) > 20
        assert CliRunner().invoke(app, ["examples", path.stem]).output == path.read_text()


@pytest.mark.parametrize("name", ["one_gpu_lora", "qwen2.5_7b"])
def test_a_base_is_printed_to_be_copied(name):
    shipped = ROOT / "tuned_examples" / "bases" / f"{name}.yaml"
    for given in (f"bases/{name}", f"bases/{name}.yaml", f"tuned_examples/bases/{name}"):
        assert CliRunner().invoke(app, ["examples", given]).output == shipped.read_text()
    with pytest.raises(FileNotFoundError, match=f"no experiment file at {name}"):
        examples.find(name)  # which is no example


def test_ones_own_environment_extends_the_base_of_one_gpu(tmp_path):
    (tmp_path / "bases").mkdir()
    printed = CliRunner().invoke(app, ["examples", "bases/one_gpu_lora"]).output
    (tmp_path / "bases" / "one_gpu_lora.yaml").write_text(printed)
    config = {"env_config": {"max_turns": 3}, "language_model": "Qwen/Qwen2.5-1.5B-Instruct"}
    mine = {"extends": "bases/one_gpu_lora.yaml", "env": "TextHouse", "stop": {"training_iteration": 50}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"my-task": {**mine, "config": config}}))
    (experiment,) = load_experiments(tmp_path / "mine.yaml")
    config = resolve(experiment)
    assert experiment.stop == mine["stop"] and config.env == "TextHouse" and config.env_config == {"max_turns": 3}
    assert config.lora == {"rank": 16} and config.action_format == "plain"


def test_an_example_may_be_printed_into_a_file_of_its_name(tmp_path, monkeypatch):
    """Fails where the file that the shell has just made empty is the one that is printed."""
    monkeypatch.chdir(tmp_path)
    Path("text_house_nlac.yaml").touch()
    shipped = (ROOT / "tuned_examples" / "text_house_nlac.yaml").read_text()
    assert CliRunner().invoke(app, ["examples", "text_house_nlac.yaml"]).output == shipped


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "math_reasoning_nlac_qwen2.5_7b"
    for given in (name, f"{name}.yaml", f"tuned_examples/{name}.yaml"):
        assert examples.find(given) == ROOT / "tuned_examples" / f"{name}.yaml"
    Path(name).mkdir()  # as of results
    assert examples.find(name).is_file()
    Path(f"{name}.yaml").write_text("mine: {}")
    assert examples.find(f"{name}.yaml") == Path(f"{name}.yaml")
    with pytest.raises(
        FileNotFoundError, match=r"no experiment file at twenty_question_nlac; .*did you mean 'twenty_questions_nlac'"
    ):
        examples.find("twenty_question_nlac")
    with pytest.raises(FileNotFoundError, match="no experiment file at /x/twenty_questions_nlac"):
        examples.find("/x/twenty_questions_nlac")


def test_the_examples_data_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "tuned_examples/data/twenty_questions_tasks.jsonl"
    shipped = len(list(read_rows(name)))
    assert shipped > 8 and input_files(name) == [str(ROOT / name)]
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text('{"mine": 1}\n')
    assert len(list(read_rows(name))) == 1 and input_files(name) == [str(tmp_path / name)]
    with pytest.raises(FileNotFoundError, match="no file matches"):
        list(read_rows("data/twenty_questions_tasks.jsonl"))
    for odd in ("run [1].jsonl", "why?.jsonl"):  # a name, though it reads like a pattern
        Path(odd).write_text('{"odd": 1}\n')
        assert len(list(read_rows(odd))) == 1 and input_files(odd) == [str(tmp_path / odd)]


def test_a_pattern_reaches_into_folders_and_a_folder_gives_all_that_can_be_read(tmp_path):
    """Fails where ** stands for one folder, or where a suffix that can be read is passed over: nobody would be told."""
    files = [tmp_path / name for name in ("a.jsonl", "b.ndjson", "x/c.jsonl", "x/y/d.jsonl")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"row": 1}\n')
    everywhere = str(tmp_path / "**" / "*.jsonl")
    assert input_files(everywhere) == sorted(str(file) for file in files if file.suffix == ".jsonl")
    assert len(list(read_rows(everywhere))) == 3
    assert input_files(str(tmp_path)) == [str(file) for file in files[:2]]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What git holds, so that nothing that was built before gets into what is built."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "-q"]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def data_of(folder: Path) -> set[str]:
    """The files of the package and its examples, as an installation names them."""
    ours = {str(path.relative_to(folder)) for path in (folder / "rllib_nlac").rglob("*") if path.is_file()}
    shipped = {f"rllib_nlac/{path.relative_to(folder)}" for path in (folder / "tuned_examples").rglob("*") if path.is_file()}
    return ours | shipped


def test_the_wheel_holds_all_that_the_package_has(source, wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == data_of(source)


def test_the_source_archive_holds_what_a_wheel_and_the_tests_need(source, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    kept = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and ".egg-info" not in str(path)}
    assert {name for name in kept if not name.startswith((".", "build/", "research/"))} <= held


def test_installed_away_from_the_repository(wheel, tmp_path):
    target, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    install = [*PIP, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert (target / "bin" / "rllib").is_file()
    # Without site, so that no editable installation of the repository is found; what else is needed stays on the path.
    others = [path for path in sys.path if path.endswith("-packages")]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "PYTHONPATH": os.pathsep.join([str(target), *others]),
        "COLUMNS": "300",
        "HOME": str(tmp_path),
    }
    # One process for all commands: importing takes longer than what they do.
    code = """
import sys, rllib_nlac, importlib.metadata as metadata
from typer.testing import CliRunner
print(rllib_nlac.__file__)
(entry,) = [each for each in metadata.distribution("rllib_nlac").entry_points if each.name == "rllib"]
for line in sys.stdin.read().splitlines():
    result = CliRunner().invoke(entry.load(), line.split())
    print(f"--- {result.exit_code}", result.output, sep="\\n")
"""
    commands = [
        "examples",
        "train file twenty_questions_nlac --dry-run",
        "env list",
        "examples twenty_questions_nlac_task_set",
        "train file twenty_questions_nlac_task_set --dry-run",
        "train file twenty_questions_nlac_offline --dry-run",
        "train file text_house_nlac --dry-run",
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=here,
        env=environment,
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    where, *printed = done.stdout.split("--- ")
    assert where.strip() == str(target / "rllib_nlac" / "__init__.py"), done.stderr[-2000:]
    assert [each[0] for each in printed] == ["0"] * len(commands), done.stdout + done.stderr[-2000:]
    texts = [each.partition("\n")[2] for each in printed]
    assert "text_house_nlac " in texts[0] and "TwentyQuestions" in texts[2] and "TextHouse" in texts[2]
    assert yaml.safe_load(texts[1])["twenty-questions-nlac"]["run"] == "NLAC"
    assert texts[3].strip() == (ROOT / "tuned_examples" / "twenty_questions_nlac_task_set.yaml").read_text().strip()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_wheel_trains_where_no_repository_is(source, tmp_path):
    """The archives pass their checks; the installed wheel examines the machine, trains an example and shows the run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"COLUMNS": "300"}
    here, out, venv = tmp_path / "here", tmp_path / "out", tmp_path / "venv"
    here.mkdir()

    def run(*command: str | Path) -> str:
        done = subprocess.run([*map(str, command)], cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python, rllib = venv / "bin" / "python", venv / "bin" / "rllib"
    install = [*PIP, "--python", python, "install", "-q"]
    run(*install, "build", "twine", "setuptools>=69")
    run(python, "-m", "build", "--no-isolation", "--outdir", out, source)
    assert run(python, "-m", "twine", "check", "--strict", *out.iterdir()).count("PASSED") == 2
    (built,) = out.glob("*.whl")
    run(*install, "--no-deps", built)
    # Paths in such a file are searched, and the files like it in them are not read: an editable repository stays unknown.
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    assert run(python, "-c", "import rllib_nlac; print(rllib_nlac.__file__)").startswith(str(packages))

    assert "twenty_questions_nlac " in run(rllib, "examples")
    assert f"ok  rllib_nlac   {__version__}" in run(rllib, "doctor", "--quick", "--storage-path", here)
    stop, settings = "{training_iteration: 2}", ["--storage-path", here / "results"]
    assert "is done." in run(rllib, "train", "file", "twenty_questions_nlac", "--stop", stop, *settings)
    (trial,) = (here / "results" / "twenty-questions-nlac").glob("NLAC_*/")
    assert "2 iterations" in run(rllib, "inspect", trial, "--output", here / "page.html")
    assert (here / "page.html").stat().st_size > 50_000
