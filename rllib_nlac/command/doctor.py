"""``rllib doctor``: what is installed, what this machine has, whether vLLM, DeepSpeed and Ray start, and what to do.

Packages are imported, and programs are started, in child processes with a time limit, so a crash costs one line.
``vllm collect-env`` prints every detail of an installation; this table has what the package depends on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from rllib_nlac.command.terminal import Terminal, terminal
from rllib_nlac.inputs.pretrained import NEEDED_BYTES, cache_folder, is_whole

PACKAGES = ("rllib_nlac", "torch", "ray", "transformers", "deepspeed", "vllm")
STARTS = ("ray", "deepspeed", "vllm")
LIMIT_S = 600.0  # of a child process; on a busy machine the imports alone take minutes
GENERATION_S = 2.0
GIB = 2**30
CPUINFO = Path("/proc/cpuinfo")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")
FOUND = "rllib doctor found "  # begins a child's own lines; libraries print others
IMPORT = f"""
import importlib, sys
for name in sys.argv[1:]:
    print("{FOUND}", name, importlib.import_module(name).__version__, flush=True)
print("{FOUND} cuda", sys.modules["torch"].cuda.is_available())
"""


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        what: What was looked at.
        found: What is there.
        is_fine: Whether nothing has to be done.
        advice: What to do otherwise.
        is_needed: Whether training needs it.
    """

    what: str
    found: str
    is_fine: bool = True
    advice: str = ""
    is_needed: bool = True


def diagnose(quick: bool, storage: Path, terminal: Terminal) -> bool:
    """Prints a line for each check; returns whether everything that training needs is there."""
    failed = []
    for each in check(quick, storage):
        verdict, style = ("ok", "green") if each.is_fine else ("FAILED", "red") if each.is_needed else ("advice", "yellow")
        terminal.say(f"{verdict:>6}  {each.what:<12} {each.found}{'' if each.is_fine else f'; {each.advice}'}", style)
        failed += [each.what] if verdict == "FAILED" else []
    well = (
        "Nothing is missing. rllib doctor also starts vLLM, DeepSpeed and Ray."
        if quick
        else "Everything that training needs is here."
    )
    terminal.say(f"\nFailed: {', '.join(failed)}" if failed else f"\n{well}")
    return not failed


def check(quick: bool, storage: Path) -> Iterator[Finding]:
    """Looks at one thing after the other; a quick check starts nothing."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("python", sys.version.split()[0], supported, "install Python 3.11, 3.12 or 3.13")
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines() if smi else []
    versions, errors = imported()
    for name in PACKAGES:
        yield package(name, versions.get(name), errors.get(name, ""), "gpu" if gpus else "cpu")
    seen = f"{'; '.join(gpus)} (name, memory, driver)" if gpus else "none, so everything runs on the CPU"
    advice = "torch does not see it: install the CUDA build (make clean, then make install EXTRA=gpu) and a driver for it"
    yield Finding("GPU", seen, not gpus or versions.get("cuda") == "True", advice)
    yield processor()
    memory = psutil.virtual_memory()
    told = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    advice = "end other programs: Ray kills a trial when memory is short"
    yield Finding("memory", told, memory.available >= 4 * GIB, advice, False)
    room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    advice = "Ray uses the disk in its place; in a container: docker run --shm-size=8g"
    yield Finding("/dev/shm", f"{room / GIB:.1f} GiB free", room >= 2 * GIB, advice, False)
    yield folder("storage", storage, 5 * GIB, "name another folder: --storage-path")
    yield folder("cache", cache_folder(), NEEDED_BYTES, "name another folder: XDG_CACHE_HOME")
    models = [path for path in (cache_folder() / "models").glob("*") if path.is_dir()]
    broken = [path.name for path in models if not is_whole(path)]
    told = f"half-written: {', '.join(broken)}" if broken else f"{len(models)}, whole"
    yield Finding("models", told, not broken, "write it again: rllib model smollm2", False)
    yield hub_cache()
    programs = [next(filter(shutil.which, names), "") for names in (BROWSERS, DRIVERS)]
    advice = "for the environment MiniWoB: apt-get install chromium chromium-driver"
    yield Finding("browser", ", ".join(filter(None, programs)) or "none", all(programs), advice, False)
    for name in () if quick else STARTS:
        began, (code, output, error) = time.monotonic(), child("-m", __name__, name)
        told = f"after {time.monotonic() - began:.0f} s" + "".join(f", {line}" for line in output)
        advice = f"see all that it prints: python -m {__name__} {name}"
        yield Finding(f"start {name}", error if code else told, not code, advice)


def imported() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the packages that can be imported, "cuda" beside them, and the errors of the others."""
    versions: dict[str, str] = {}
    errors: dict[str, str] = {}
    while left := [name for name in PACKAGES if name not in versions and name not in errors]:
        code, output, error = child("-c", IMPORT, *left)
        versions |= dict(line.split(" ", 1) for line in output)
        if code and (failed := next((name for name in left if name not in versions), None)):
            errors[failed] = error
    return versions, errors


def package(name: str, version: str | None, error: str, extra: str) -> Finding:
    """Whether a package can be imported, in a version that this one is made for."""
    wanted = [Requirement(line) for line in metadata.requires("rllib_nlac") or ()]
    wanted = [each for each in wanted if each.name.removesuffix("-cpu") == name]
    of_ours = "rllib_nlac" if name != "vllm" else f"rllib_nlac[{extra}]"
    advice = f"pip install '{str(wanted[0]).partition(';')[0] if wanted and name != 'vllm' else of_ours}'"
    if version is None:
        return Finding(name, f"cannot be imported: {error}", False, advice)
    return Finding(name, version, not wanted or any(each.specifier.contains(version, True) for each in wanted), advice)


def processor() -> Finding:
    """Cores, and the instructions that make bfloat16 fast."""
    try:
        flags = CPUINFO.read_text(encoding="utf-8").partition("\nflags")[2].partition("\n")[0].split()
    except (OSError, ValueError):
        flags = []
    names = ", ".join(f"{'' if flag in flags else 'no '}{name}" for name, flag in (("AMX", "amx_bf16"), ("avx512_bf16",) * 2))
    cores = len(os.sched_getaffinity(0))
    return Finding("CPU", f"{cores} cores, {names}", cores >= 2, "use two or more: a trial shares them with Ray", False)


def folder(what: str, path: Path, needed: int, advice: str) -> Finding:
    """Whether a folder, which need not exist yet, can be written and its disk has room."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    told = f"{path}, {free / GIB:.1f} GiB free" if os.access(there, os.W_OK) else f"{path} cannot be written"
    return Finding(what, told, free >= needed and os.access(there, os.W_OK), f"{needed / GIB:.1f} GiB are needed; {advice}")


def hub_cache() -> Finding:
    """The Hugging Face cache."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return Finding("hub cache", f"{constants.HF_HUB_CACHE}, empty")
    told = f"{constants.HF_HUB_CACHE}, {len(cache.repos)} repositories, {cache.size_on_disk / GIB:.1f} GiB"
    advice = f"remove what is damaged: {'; '.join(map(str, cache.warnings))}"
    return Finding("hub cache", told, not cache.warnings, advice, False)


def child(*arguments: str) -> tuple[int, list[str], str]:
    """Runs Python within ``LIMIT_S``; the exit code, what its own lines say, and why it failed."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, error = process.communicate(timeout=LIMIT_S)
        said = [line.strip() for line in error.splitlines() if line.strip()] or ["it printed no error"]
        reason = said[-1] if process.returncode >= 0 else f"killed by signal {-process.returncode}"
    except subprocess.TimeoutExpired:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
        (output, _), reason = process.communicate(), f"not done within {LIMIT_S:.0f} s"
    lines = [line.removeprefix(FOUND).strip() for line in output.splitlines() if line.startswith(FOUND)]
    return process.returncode, lines, reason


def start(name: str) -> str:
    """Starts a library as a run does; what a person should know of it."""
    from rllib_nlac import NLACConfig

    config = NLACConfig().environment("TwentyQuestions")
    if name == "ray":
        import ray

        from rllib_nlac.command.run import start_ray

        start_ray(verbose=False)
        return f"{ray.cluster_resources().get('CPU', 0):g} CPUs, {ray.cluster_resources().get('GPU', 0):g} GPUs"
    if name == "deepspeed":
        from rllib_nlac.envs.spaces import TextSpace
        from rllib_nlac.learner.learner import LanguageLearner

        spec = config.get_default_rl_module_spec()
        spec.observation_space = spec.action_space = TextSpace()
        LanguageLearner(config=config, module_spec=spec).build()
        return "built the learner of tiny"
    from rllib_nlac.engine.vllm_engine import VLLMEngine
    from rllib_nlac.types import Message, Request

    chat = config.make_chat()
    engine = VLLMEngine(config.model_path, chat.max_context, list(chat.end_ids))
    requests = [Request(chat.prompt_ids((Message("user", "Guess my object."),)), 48, seed=seed) for seed in range(8)]
    began, tokens = time.monotonic(), 0
    while time.monotonic() - began < GENERATION_S:
        tokens += sum(len(answer.token_ids) for answer in engine.generate(requests))
    engine.stop()
    return f"{tokens / (time.monotonic() - began):.0f} tokens/s by tiny"


if __name__ == "__main__":
    terminal.say(f"{FOUND}{start(sys.argv[1])}")
