"""Files that a configuration names, by their contents: a run that goes on with others of the same names should say so."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_nlac.checkpoints.manifest import checksum
from rllib_nlac.inputs.examples import data_files
from rllib_nlac.language.prompts import resolved_prompts

DATA = (".jsonl", ".ndjson", ".parquet")  # of these a name may be a pattern
APART = ("input_",)  # logs are compared by the dialogues that were read, which a replay buffer keeps


def named_files(config: Any) -> dict[str, str]:
    """SHA-256 of each file that a configuration names, whatever the key; of its prompts that of the set with all it extends.

    Args:
        config: Configuration of one of this package's algorithms.
    """
    found = {}
    for text in _texts({key: value for key, value in vars(config).items() if key not in APART}):
        for name in data_files(text) if text.endswith(DATA) else [text]:
            if os.path.isfile(path := os.path.expanduser(name)):
                found[name] = checksum(Path(path))
    source = config.model_defaults.prompts
    if isinstance(source, str):
        found.pop(source, None)
    words = json.dumps(resolved_prompts(source), sort_keys=True, default=str)
    found[f"prompts: {source}" if isinstance(source, str) else "prompts"] = hashlib.sha256(words.encode()).hexdigest()
    return found


def changes(then: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """Which files are not what they were, in words; empty where all are, or where nobody wrote down what they were."""
    if then is None:
        return ""
    changed = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    return ", ".join(
        f"{name} ({'is new' if name not in then else 'has changed' if name in now else 'is gone'})" for name in changed
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | os.PathLike):
        yield os.fspath(value)
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
