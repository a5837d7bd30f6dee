"""Mutation test of the algorithm's core: does a test fail when a line is wrong?

    python -m benchmarks.mutants [--part language/stages ...] [--per-part 25] [--seed 0] [--jobs 2]

Of each part a number of mutants is drawn at random (``benchmarks.mutant_source`` says which there are). For each a process is
forked that serves the changed module and runs those tests that reach the changed line, as coverage knows of a run without
changes. Tests that start vLLM or Ray, or take longer than ``SLOW_S``, are left out: a mutant counts as killed when a fast test
fails. Mutants that mean the same as the original are named in ``mutants.yaml``, each with its reason, and do not count.
Exit code 1 where fewer than 90 % are killed.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COVERAGE_CORE": "ctrace", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import coverage
import pytest
import yaml

from benchmarks.mutant_source import Mutant, drawn

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rllib_nlac"
EQUIVALENTS = Path(__file__).with_suffix(".yaml")
CACHE = Path(tempfile.gettempdir()) / "rllib_nlac_mutants"
GOAL = 0.9
SLOW_S = 8.0
CLEAN_LIMIT_S = 60  # of a test, in the run without changes
INVALID = re.compile(r"missing \d+ required|expected (at least |exactly )?\d+ argument")

_LOSSES = ["test_baseline_losses", "test_rollout_critics", "test_scalar_critic"]
_BASELINES = [*_LOSSES, "test_baselines", "test_roles", "test_taint"]
# Module -> the test files that are about it.
PARTS: dict[str, list[str]] = {
    "nlac": ["test_update", "test_gradients", "test_not_finite", "test_thinking_templates"],
    "language/stages": ["test_stages", "test_waves", "test_roles", "test_tokens"],
    "language/backup": ["test_stages", "test_waves", "test_roles"],
    "language/backup_stage": ["test_stages", "test_waves", "test_reasoning", "test_roles", "test_hostile_texts"],
    "language/improvement_stage": ["test_stages", "test_waves", "test_reasoning", "test_roles", "test_hostile_texts"],
    "language/critique": ["test_stages", "test_waves", "test_roles"],
    "language/refine": ["test_stages", "test_waves", "test_roles"],
    "language/prediction": ["test_examination"],
    "language/reasoning": ["test_reasoning"],
    "learner/losses": ["test_learner", "test_gradients", "test_not_finite", "test_update", "test_kl_to_base"],
    "learner/batch": ["test_learner", "test_gradients", "test_update", *_LOSSES],
    "learner/target": ["test_learner", "test_learner_state", "test_gradients"],
    "learner/learner": [
        "test_learner",
        "test_learner_state",
        "test_gradients",
        "test_not_finite",
        "test_kl_to_base",
        "test_lora",
    ],
    "learner/adapter": ["test_lora", "test_kl_to_base"],
    "replay/buffer": ["test_replay", "test_replay_details", "test_seeds", "test_update"],
    "sampling/env_runner": [
        "test_env_runner",
        "test_collection",
        "test_seeds",
        "test_answers",
        "test_hostile_texts",
        "test_lost_processes",
    ],
    "sampling/player": ["test_env_runner", "test_collection", "test_seeds", "test_answers", "test_hostile_texts"],
    "sampling/rollout": ["test_env_runner", "test_collection", "test_seeds", "test_answers", "test_lost_processes"],
    "engine/lora": ["test_lora", "test_ranges"],
    "engine/chat": ["test_chat", "test_control_tokens", "test_hostile_texts", "test_model_folder"],
    "ablations": ["test_stages", "test_roles", "test_taint"],
    "diagnostics/examination": ["test_examination", "test_roles", "test_taint"],
    "diagnostics/calibration": ["test_calibration"],
    "sync/sync": ["test_sync", "test_not_finite"],
    "baselines/grpo": [*_BASELINES, "test_gradients"],
    "baselines/scalar_critic": [*_BASELINES, "test_gradients"],
    "baselines/rft": _BASELINES,
    "baselines/rollouts": _BASELINES,
    "baselines/token_module": ["test_token_sequences", "test_stock"],
    "baselines/nlql": _BASELINES,
    "baselines/nlrl": _BASELINES,
    "baselines/self_distillation": _BASELINES,
    "baselines/sdpo": ["test_sdpo"],
    "baselines/erl": ["test_erl"],
}

PLUGINS = ["no:cacheprovider", "pytest_timeout", "_hypothesis_pytestplugin"]
ARGUMENTS = ["-q", "--assert=plain", "--tb=line", "--durations=0", *(part for plugin in PLUGINS for part in ("-p", plugin))]


class Child:
    """Work in a forked process, with its own temporary folder and a limit of time.

    Args:
        work: Returns something that JSON can hold.
        limit_s: After so long the process and all that it started are killed.
    """

    def __init__(self, work: Callable[[], Any], limit_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rllib_nlac_mutant_"))
        self.deadline = time.monotonic() + limit_s
        self.timed_out = False
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)

    def _run(self, work: Callable[[], Any]) -> None:
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
            (self.folder / "result.json").write_text(json.dumps(work()))
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def has_ended(self) -> bool:
        """Whether it is over, by itself or by its limit."""
        ended, _ = os.waitpid(self.pid, os.WNOHANG)
        if not ended and time.monotonic() > self.deadline:
            self.timed_out = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            ended = self.pid
        return bool(ended)

    def result(self) -> Any:
        """What the work gave, None where it ended otherwise; the folder and processes that it left are gone afterwards."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            return json.loads((self.folder / "result.json").read_text())
        except (OSError, ValueError):
            return None
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class Recorder:
    """A pytest plugin: which tests reach which lines, and how long they take."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.fixtures: dict[str, set[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from conftest import NEEDS

        starting = {*NEEDS["vllm"], *NEEDS["ray"]}  # fixtures
        items[:] = [item for item in items if not starting & set(getattr(item, "fixturenames", ()))]
        self.fixtures = {item.nodeid: set(getattr(item, "fixturenames", ())) for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._current = item.nodeid
        self.measured.switch_context(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a shared fixture runs belongs to all tests that take it, not only to the first."""
        if fixturedef.scope == "function":
            return (yield)
        self.measured.switch_context(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.measured.switch_context(self._current)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-300:]

    def of_context(self, context: str) -> set[str]:
        """The tests behind a context."""
        if context in self.fixtures:
            return {context}
        name = context.removeprefix("fixture ")
        return {test for test, fixtures in self.fixtures.items() if not context or name in fixtures}


class Killer:
    """A pytest plugin: the first error."""

    error = ""

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        self.error = self.error or f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"[:500]


class Changed(SourceFileLoader):
    """Loads a module from other source than its file holds; also the finder of that one module."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def preload() -> None:
    """What all children need and is slow to import, but nothing of the package itself."""
    import deepspeed  # noqa: F401
    import hypothesis
    import scipy.stats
    import transformers
    import typer  # noqa: F401
    from ray.rllib.algorithms.appo import APPO  # noqa: F401
    from ray.rllib.algorithms.ppo import PPO  # noqa: F401

    _ = scipy.stats, transformers.AutoTokenizer, transformers.AutoModelForCausalLM, transformers.Qwen2ForCausalLM
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutants")
    gc.collect()
    gc.freeze()  # children need not look through all this


def clean_run(test_file: str) -> dict[str, Any]:
    """One run without changes: seconds by test, and by file and line the tests that reach it."""
    measured = coverage.Coverage(data_file=None, config_file=False, include=[f"{PACKAGE}/*"], concurrency="thread")
    recorder = Recorder(measured)
    measured.start()
    pytest.main([*ARGUMENTS, f"--timeout={CLEAN_LIMIT_S}", f"tests/{test_file}.py"], plugins=[recorder])
    measured.stop()
    data = measured.get_data()
    lines = {}
    for path in data.measured_files():
        contexts = data.contexts_by_lineno(path).items()
        reached = {line: {t for c in of_line for t in recorder.of_context(c)} for line, of_line in contexts}
        lines[str(Path(path).relative_to(PACKAGE))] = {line: sorted(tests) for line, tests in reached.items()}
    return {"seconds": recorder.seconds, "failed": recorder.failed, "lines": lines}


def mutant_run(module: str, mutant: Mutant, tests: list[str]) -> dict[str, Any]:
    """The tests on a mutant: pytest's exit code, and the first error."""
    path = PACKAGE / f"{module}.py"
    sys.meta_path.insert(0, Changed(f"rllib_nlac.{module.replace('/', '.')}", path, mutant.source))
    killer = Killer()
    return {"code": int(pytest.main([*ARGUMENTS, "-x", *tests], plugins=[killer])), "error": killer.error}


def clean_runs(files: list[str], jobs: int) -> dict[str, Any]:
    """The runs without changes of some test files, those that are known from the cache."""
    CACHE.mkdir(exist_ok=True)
    sources = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tests").glob("[!t]*.py"))]
    common = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    runs: dict[str, Any] = {}
    running: dict[str, tuple[Child, Path]] = {}
    waiting = list(files)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            own = (ROOT / "tests" / f"{name}.py").read_bytes()
            cached = CACHE / f"{name}-{hashlib.sha256(common.encode() + own).hexdigest()[:16]}.json"
            if cached.is_file():
                runs[name] = json.loads(cached.read_text())
            else:
                print(f"running {name} without changes", flush=True)
                running[name] = Child(lambda name=name: clean_run(name), 1800), cached
        for name, (child, cached) in list(running.items()):
            if child.has_ended():
                del running[name]
                runs[name] = child.result()
                if runs[name] is None:
                    raise RuntimeError(f"the run of {name} without changes did not end")
                cached.write_text(json.dumps(runs[name]))
        time.sleep(0.1 if running else 0)
    for name in files:
        for test, error in runs[name]["failed"].items():
            print(f"left out, it fails without changes: {test}: {error.splitlines()[-1] if error else ''}")
    return runs


def tests_of(module: str, lines: tuple[int, int], runs: dict[str, Any]) -> dict[str, float]:
    """The fast tests that reach one of the lines, those of a file together, with their seconds."""
    chosen: dict[str, float] = {}
    for file in PARTS[module]:
        of_module = runs[file]["lines"].get(f"{module}.py", {})
        for test in {test for line in range(lines[0], lines[1] + 1) for test in of_module.get(str(line), ())}:
            if test not in runs[file]["failed"] and runs[file]["seconds"][test] <= SLOW_S:
                chosen[test] = runs[file]["seconds"][test]
    median = sorted(chosen.values())[len(chosen) // 2] if chosen else 0.0
    of_file: dict[str, float] = defaultdict(float)
    for test, seconds in chosen.items():
        of_file[test.partition("::")[0]] += seconds

    def order(test: str) -> tuple:  # the faster half first: most mutants do not outlive it
        file = test.partition("::")[0]
        return chosen[test] > median, of_file[file], file, chosen[test]

    return {test: chosen[test] for test in sorted(chosen, key=order)}


def judge(module: str, args: argparse.Namespace, runs: dict[str, Any]) -> list[tuple[Mutant, str, str]]:
    """Draws mutants of a module until there are enough that are valid; each with its fate and what killed it."""
    mutants = enumerate(drawn((PACKAGE / f"{module}.py").read_text(), f"{args.seed}:{module}"))
    running: dict[int, tuple[Mutant, Child]] = {}
    judged: dict[int, tuple[Mutant, str, str]] = {}
    while True:
        while len(running) < args.jobs and len(judged) + len(running) < args.per_part and (new := next(mutants, None)):
            place, mutant = new
            tests = tests_of(module, mutant.lines, runs)
            if not tests:
                judged[place] = mutant, "not covered", ""
                continue
            limit = 3 * sum(tests.values()) + 20
            running[place] = mutant, Child(lambda m=mutant, t=tests: mutant_run(module, m, list(t)), limit)
        if not running:
            return [judged[place] for place in sorted(judged)]
        for place, (mutant, child) in list(running.items()):
            if not child.has_ended():
                continue
            del running[place]
            result = child.result() or {"code": -1, "error": ""}
            if child.timed_out:
                judged[place] = mutant, "timeout", ""
            elif result["code"] == 5:
                raise RuntimeError(f"no test was run for {mutant.was!r}")
            elif result["code"] == 0:
                judged[place] = mutant, "survived", ""
            elif not result["error"]:  # neither a test nor a module that imports the mutant: the process died, or pytest did
                judged[place] = mutant, "no result", ""
            elif not (result["error"].startswith("TypeError") and INVALID.search(result["error"])):
                judged[place] = mutant, "killed", result["error"]
            if args.verbose and place in judged:
                print(f"  {judged[place][1]}: {mutant.was}  ->  {mutant.now}  {judged[place][2][:120]!r}", flush=True)
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--per-part", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print each mutant's fate")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.dont_write_bytecode = False  # each child would compile everything
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    equivalents = {(e["part"], e["was"], e["now"]): e["why"] for e in yaml.safe_load(EQUIVALENTS.read_text()) or []}
    started = time.monotonic()
    preload()
    runs = clean_runs(list(dict.fromkeys(file for part in args.part for file in PARTS[part])), args.jobs)
    total: Counter[str] = Counter()
    survivors: list[str] = []
    columns = ("drawn", "killed", "timeout", "survived", "not covered", "no result", "equivalent")
    print(f"{'part':30}" + "".join(f"{column:>13}" for column in columns), flush=True)
    for part in args.part:
        count: Counter[str] = Counter()
        for mutant, fate, _ in judge(part, args, runs):
            is_alive = fate in ("survived", "not covered")
            is_named = (part, mutant.was, mutant.now) in equivalents
            if is_named and not is_alive:
                print(f"named as equivalent, and killed: {part}: {mutant.was} -> {mutant.now}")
            fate = "equivalent" if is_named and is_alive else fate
            count.update(["drawn", fate])
            if is_alive and not is_named:
                survivors.append(f"{part}:{mutant.lines[1]} ({fate})\n  - {mutant.was}\n  + {mutant.now}")
        total += count
        print(f"{part:30}" + "".join(f"{count[column]:13}" for column in columns), flush=True)
    print(f"{'all':30}" + "".join(f"{total[column]:13}" for column in columns))
    print(*survivors, sep="\n")
    rate = (total["killed"] + total["timeout"]) / max(total["drawn"] - total["equivalent"], 1)
    print(f"killed: {rate:.1%} of those that are not equivalent, in {(time.monotonic() - started) / 60:.0f} minutes")
    sys.stdout.flush()
    os._exit(rate < GOAL)  # without the farewells of what was preloaded


if __name__ == "__main__":
    main()
