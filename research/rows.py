"""Rows of runs in a CSV: a benchmark that was cut short goes on from them, and the documents' tables are printed from them."""

from __future__ import annotations

import csv
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rllib_nlac.diagnostics.results import lookup
from rllib_nlac.engine.token_usage import TOKENS

Row = dict[str, Any]
Kinds = Mapping[str, Callable[[str], Any]]  # by column, in their order, what makes a value of its text


def read(path: Path, kinds: Kinds) -> list[Row]:
    """The rows of a file; one that lacks a value was cut short, and counts as not there."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row.get(name) for name in kinds)]
    return [{name: kind(row[name]) for name, kind in kinds.items()} for row in rows]


def write(path: Path, kinds: Kinds, rows: Iterable[Row]) -> None:
    """Puts rows in the place of a file's former ones, all at once, so that no reader and no interruption finds half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(kinds))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)


def apart(run: Callable[..., Any], *asked: Any) -> Any:
    """What a run returns that is made in a process of its own; an error where that is killed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *asked).result()


NOT_FOR_TRAINING = {"evaluation", "evaluation_critic"}  # roles of requests


def generated_tokens(result: Mapping[str, Any]) -> float:
    """How many tokens an iteration generated for its training, evaluations left out.

    As the engines counted them, whatever asked; those of play and waves where no engine counts.
    """
    counted = result.get(TOKENS)
    if isinstance(counted, Mapping) and counted:
        return sum(float(value) for role, value in counted.items() if role not in NOT_FOR_TRAINING)
    names = ("env_runners/num_generated_tokens", "language_stages/num_generated_tokens")
    return sum(float(lookup(result, name) or 0) for name in names)
