"""Reads every hostile row of ``row_files``, and says which were refused as they should be.

Refused means: a ``ValueError`` that names file and line and says what is wrong, within a second, nothing imported, nothing
sent, and less than a gigabyte of memory.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from attacks.row_files import DIALOGUES, PROBLEMS, HostileRow
from rllib_nlac.envs.math_reasoning import MathReasoning
from rllib_nlac.envs.rows import read_rows
from rllib_nlac.envs.task_set import TaskSet
from rllib_nlac.replay.dialogues import parse_dialogue

BOUND_S = 1.0  # of processor time, since the machine may be busy
MEMORY_KIB = 1 << 20
MAX_MESSAGE = 1000  # characters that somebody still reads


def read(row: HostileRow, path: Path) -> None:
    """Reads the file as a run would."""
    if row.kind == DIALOGUES:
        for line in read_rows(str(path)):
            parse_dialogue(line)
    elif row.kind == PROBLEMS:
        MathReasoning(files=str(path))
    else:
        TaskSet(train_files=str(path))


def attack(row: HostileRow, folder: Path) -> list[str]:
    """Reads one; what went wrong, nothing if it was refused."""
    path = row.file(folder)
    modules, memory, started = set(sys.modules), _peak_kib(), time.process_time()
    try:
        read(row, path)
    except ValueError as error:
        said = str(error)
    except BaseException as error:
        return [f"{type(error).__name__}: {error!s:.200}"]
    else:
        return ["it was read"]
    took, problems = time.process_time() - started, []
    place = f"{path}, line 2: " if row.write is None else str(path)
    if not said.startswith(place) or row.says not in said:
        problems.append(f"it said {said:.300}")
    if len(said) > MAX_MESSAGE + len(str(path)):
        problems.append(f"it said {len(said)} characters")
    if took > BOUND_S:
        problems.append(f"it took {took:.1f} s")
    if _peak_kib() - memory > MEMORY_KIB:
        problems.append(f"it took {(_peak_kib() - memory) >> 10} MiB")
    if new := {"antigravity", "textarena", "tau_bench"} & (set(sys.modules) - modules):
        problems.append(f"it imported {', '.join(new)}")
    return problems


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
