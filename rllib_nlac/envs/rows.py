"""Rows of task files, JSONL or parquet, each with the place that it came from, so that an error can name it."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rllib_nlac.envs.spaces import MAX_TEXT_LENGTH
from rllib_nlac.inputs import plain_json
from rllib_nlac.inputs.examples import data_files

MAX_ROW_BYTES = 8 << 20
MAX_FILE_BYTES = 2 << 30  # rows are held in memory
MAX_GROUP_VALUES = 1 << 24  # of a column in a row group of parquet
MAX_ID_LENGTH = 200
BATCH_ROWS = 32  # of parquet, read at a time


class Row(NamedTuple):
    """One row; ``place`` reads as in "train.jsonl, line 7"."""

    place: str
    fields: Mapping[str, Any]


def read_rows(files: str | Sequence[str]) -> Iterator[Row]:
    """Reads files one after the other; a name may be a pattern such as ``data/*.jsonl``.

    A row is read when it is asked for, and is data, whatever it holds: bounded in size and depth, see ``MAX_ROW_BYTES`` and
    ``plain_json``.

    Raises:
        FileNotFoundError: A name matches no file.
        ValueError: A file is of another kind or too large, or a row is malformed; file and line are named.
    """
    for name in [files] if isinstance(files, str) else files:
        paths = data_files(name)
        if not paths:
            raise FileNotFoundError(f"no file matches {name!r}")
        for path in paths:
            if not path.endswith((".jsonl", ".ndjson", ".parquet")) or not os.path.isfile(path):
                raise ValueError(f"{path}: tasks are read from .jsonl and .parquet files")
            _check_size(path, os.path.getsize(path))
            yield from _read_parquet(path) if path.endswith(".parquet") else _read_jsonl(path)


def files_of(split: str, train_files: str | Sequence[str], val_files: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the files that a split is read from.

    Raises:
        ValueError: The split has none.
    """
    files, key = (val_files, "val_files") if split == "eval" else (train_files, "train_files")
    if not files:
        raise ValueError(f"env_config.{key} is empty, and the split is {split!r}: name a JSONL or parquet file")
    return (files,) if isinstance(files, str) else tuple(files)


def all_rows(files: Sequence[str]) -> list[Row]:
    """All rows of files.

    Raises:
        FileNotFoundError: As ``read_rows``.
        ValueError: As ``read_rows``; or there is no row.
    """
    rows = list(read_rows(files))
    if not rows:
        raise ValueError(f"{', '.join(files)}: no rows")
    return rows


def _check_size(path: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {size / 2**30:.1f} GiB, and rows of at most {MAX_FILE_BYTES >> 30} GiB are read: split it")


def _read_jsonl(path: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_ROW_BYTES + 1)
            if not line:
                return
            place = f"{path}, line {number}"
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(f"{place}: longer than {MAX_ROW_BYTES >> 20} MiB")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: not UTF-8 (byte {error.start + 1})") from None
            if not text.strip():
                continue
            try:
                fields = plain_json.loads(text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{place}: a row must be a JSON object, and it is a {type(fields).__name__}")
            yield Row(place, fields)


def _read_parquet(path: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        metadata = pyarrow.parquet.read_metadata(path)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(metadata.num_columns)]
        _check_size(path, sum(max(0, column.total_uncompressed_size) for column in columns))
        for column in columns:
            if column.num_values > MAX_GROUP_VALUES:
                raise ValueError(f"{path}: column {column.path_in_schema!r:.80} has {column.num_values} values in a row group")
        # Texts as numbers of a dictionary: a long one that a thousand rows share is there once, and can be measured.
        table = pyarrow.parquet.ParquetFile(path, read_dictionary=sorted({column.path_in_schema for column in columns}))
        # One group at a time: Arrow cannot join the dictionaries of nested texts across groups.
        batches = (table.iter_batches(BATCH_ROWS, row_groups=[index]) for index in range(len(groups)))
        for batch in itertools.chain.from_iterable(batches):
            if sum(map(_num_bytes, batch.columns)) > BATCH_ROWS * MAX_ROW_BYTES:
                last = number + batch.num_rows
                raise ValueError(f"{path}, rows {number + 1} to {last}: more than {MAX_ROW_BYTES >> 20} MiB a row")
            for fields in batch.to_pylist():
                number += 1
                if plain_json.is_deep(fields):
                    raise ValueError(f"{path}, row {number}: {plain_json.TOO_DEEP}")
                yield Row(f"{path}, row {number}", fields)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        where = f", after row {number}" if number else ""
        raise ValueError(f"{path}{where}: not a parquet file that can be read ({error!s:.300})") from None


def _num_bytes(array: Any) -> int:
    """Bytes of an Arrow array, each text counted as often as it occurs."""
    import pyarrow.compute
    from pyarrow import types

    if types.is_dictionary(array.type):
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return pyarrow.compute.sum(pyarrow.compute.take(lengths, array.indices)).as_py() or 0
    if types.is_struct(array.type):
        return sum(_num_bytes(array.field(index)) for index in range(array.type.num_fields))
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return _num_bytes(array.flatten())
    if types.is_map(array.type):
        return _num_bytes(array.keys) + _num_bytes(array.items)
    return array.nbytes


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
            if len(value) > MAX_TEXT_LENGTH:
                raise ValueError(f"{row.place}: {name!r} has {len(value)} characters, and may have {MAX_TEXT_LENGTH}")
            return value
    has = ", ".join(f"{key!r:.40}" for key in list(row.fields)[:20])
    raise ValueError(f"{row.place}: no column {' or '.join(map(repr, names))}; the row has {has}")


def short_id(name: Any) -> Any:
    """A task's name as ``id_field`` reads it: of a long text its beginning, and what tells it from others that begin so."""
    if not isinstance(name, str) or len(name) <= MAX_ID_LENGTH:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{name[: MAX_ID_LENGTH - len(digest) - 4]}... {digest}"


def id_field(row: Row, *names: str) -> str | None:
    """The first of these columns that the row has, as a name: a short text or a number; None where it has none.

    Raises:
        ValueError: The value is neither.
    """
    for name in names:
        value = row.fields.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > MAX_ID_LENGTH:
                raise ValueError(f"{row.place}: {name!r} must be a number or a short text, and it is {value!r:.80}")
            return str(value)
    return None


def prompt_of(row: Row) -> tuple[str, str]:
    """System prompt, which may be empty, and prompt of a row.

    Raises:
        ValueError: The column holds neither a text nor at most one system message and one of the user's.
    """
    value = row.fields.get("prompt")
    if not isinstance(value, list):
        return "", text_field(row, "prompt")
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in value]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"{row.place}: 'prompt' must be a text, or one user message after at most one system message; it has {roles!s:.80}"
        )
    texts = [text_field(Row(row.place, message), "content") for message in value]
    return ("", texts[0]) if len(texts) == 1 else (texts[0], texts[1])
