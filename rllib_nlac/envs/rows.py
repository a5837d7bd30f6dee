"""Rows of task files, JSONL or parquet, each with the place that it came from, so that an error can name it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rllib_nlac.examples import data_files


class Row(NamedTuple):
    """One row; ``place`` reads as in "train.jsonl, line 7"."""

    place: str
    fields: Mapping[str, Any]


def read_rows(files: str | Sequence[str]) -> Iterator[Row]:
    """Reads files one after the other; a name may be a pattern such as ``data/*.jsonl``.

    Raises:
        FileNotFoundError: A name matches no file.
        ValueError: A file is of another kind, or a line of JSONL is no object; file and line are named.
    """
    for name in [files] if isinstance(files, str) else files:
        paths = data_files(name)
        if not paths:
            raise FileNotFoundError(f"no file matches {name!r}")
        for path in paths:
            if path.endswith((".jsonl", ".ndjson")):
                yield from _read_jsonl(path)
            elif path.endswith(".parquet"):
                yield from _read_parquet(path)
            else:
                raise ValueError(f"{path}: tasks are read from .jsonl and .parquet files")


def _read_jsonl(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{place}: a row must be a JSON object, and it is a {type(fields).__name__}")
            yield Row(place, fields)


def _read_parquet(path: str) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from None
    number = 0
    for batch in table.iter_batches():
        for fields in batch.to_pylist():
            number += 1
            yield Row(f"{path}, row {number}", fields)


def text_field(row: Row, *names: str) -> str:
    """The first of these columns that the row has.

    Raises:
        ValueError: It has none of them, or the value is no text.
    """
    for name in names:
        value = row.fields.get(name)
        if value is not None:
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{row.place}: {name!r} must be a text, and it is {value!r:.80}")
            return value
    raise ValueError(f"{row.place}: no column {' or '.join(map(repr, names))}; the row has {', '.join(map(repr, row.fields))}")
