"""The manifest of a checkpoint: who wrote it, and the checksum of every file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rllib_nlac.activity import FILES, activity
from rllib_nlac.version import __version__

FORMAT = 4
MANIFEST = "rllib_nlac.json"
UNREAD = {".metadata.json"}  # Ray's ``Checkpoint.set_metadata`` adds it later, and nothing here ever opens it
ANOTHER = "Take another checkpoint of the same run"


class CheckpointError(ValueError):
    """A checkpoint that cannot be restored here; the message says why, and nothing was changed by the attempt."""


class UnfinishedCheckpoint(CheckpointError):
    """A checkpoint that lacks something, as one does whose writing was interrupted."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is all there and not what was written."""


@dataclass(frozen=True)
class VerifiedFolder:
    """A local checkpoint whose every byte was checked.

    Attributes:
        folder: Where it lies.
        name: What the user calls it.
        manifest: Everything that the manifest says.
    """

    folder: Path
    name: str
    manifest: dict[str, Any]


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes who made a checkpoint and the checksums of its files; comes last, so that it vouches for the others."""
    paths = sorted(file for file in folder.rglob("*") if file.is_file())
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        entries = [{"size": path.stat().st_size, "sha256": sha256} for path, sha256 in zip(paths, pool.map(checksum, paths))]
    files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries)}
    (folder / MANIFEST).write_bytes(render({"format": FORMAT, "rllib_nlac": __version__, **facts, "files": files}))


def render(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it stands in its file, with a checksum of itself."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1).encode()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, name: str, contents: bool = True) -> VerifiedFolder:
    """Checks all of a local checkpoint: the manifest, that its files are there and no others, and what is in them.

    Args:
        folder: The checkpoint.
        name: What the user calls it.
        contents: Whether checksums are compared; else only names and sizes are.

    Raises:
        CheckpointError: Something of it is wrong; the file is named.
    """
    found = _files_of(folder, name)
    manifest = _read(folder, name, found)
    files: dict[str, dict[str, Any]] = manifest["files"]
    for file, entry in files.items():
        if found.get(file) != entry["size"]:
            state = "is missing" if file not in found else f"has {found[file]} bytes instead of {entry['size']}"
            kind = UnfinishedCheckpoint if (found.get(file) or 0) < entry["size"] else DamagedCheckpoint
            raise kind(f"{name} is not whole: {file} {state}. {ANOTHER}")
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    for file, size in sorted(found.items(), key=lambda item: item[1] is None):  # a file rather than the folder it is in
        if file not in folders if size is None else file not in {*files, MANIFEST, *UNREAD}:
            raise CheckpointError(
                f"{name}: {file} is no part of the checkpoint; somebody put it there. Remove it if you know what it is"
            )
    if contents:
        with activity.stage("checking the checkpoint", len(files), FILES), ThreadPoolExecutor() as pool:
            sums = pool.map(lambda file: _checksum(folder, name, file), files)
            for (file, entry), actual in zip(files.items(), sums, strict=True):
                activity.advance(FILES)
                if actual != entry["sha256"]:
                    raise DamagedCheckpoint(
                        f"{name} is damaged: {file} is not what was written (its checksum differs). {ANOTHER}"
                    )
    return VerifiedFolder(folder, name, manifest)


def _checksum(folder: Path, name: str, file: str) -> str:
    try:
        return checksum(folder / file)
    except OSError as error:
        raise CheckpointError(f"{name}: {file} cannot be read: {error.strerror or error}") from error


def _files_of(folder: Path, name: str) -> dict[str, int | None]:
    """Sizes of all files of a folder by their relative paths, and None for each folder in it.

    Raises:
        CheckpointError: There is a link or a device among them, or a folder cannot be read.
    """
    return dict(_scan(folder, "", name))


def _scan(folder: Path, below: str, name: str) -> Iterator[tuple[str, int | None]]:
    try:
        entries = sorted(os.scandir(folder / below), key=lambda entry: entry.name)
        for entry in entries:
            path, facts = f"{below}{entry.name}", entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                yield path, None
                yield from _scan(folder, f"{path}/", name)
            elif stat.S_ISREG(facts.st_mode):
                yield path, facts.st_size
            else:
                kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no plain file"
                raise CheckpointError(f"{name}: {path} is {kind}, and a checkpoint holds plain files only. {ANOTHER}")
    except OSError as error:
        raise CheckpointError(f"{name}: {below or '.'} cannot be read: {error.strerror or error}") from error


def _read(folder: Path, name: str, found: Mapping[str, int | None]) -> dict[str, Any]:
    """The manifest, after a check of itself."""
    if found.get(MANIFEST) is None:
        raise UnfinishedCheckpoint(
            f"{name} is no whole checkpoint of this package: it has no {MANIFEST}. Its writing was interrupted: "
            "take another checkpoint of the same run"
        )
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{name}: {MANIFEST} cannot be read: {error.strerror or error}") from error
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError) as error:
        kind = DamagedCheckpoint if raw.endswith(b"}") else UnfinishedCheckpoint
        raise kind(f"{name} is damaged: {MANIFEST} is not valid JSON ({error}). {ANOTHER}") from error
    if not isinstance(manifest, dict):
        raise DamagedCheckpoint(f"{name} is damaged: {MANIFEST} holds a {type(manifest).__name__} and no mapping. {ANOTHER}")
    version = manifest.get("format")
    if isinstance(version, int) and version != FORMAT and render(manifest) == raw:
        raise CheckpointError(
            f"{name} was written by rllib_nlac {manifest.get('rllib_nlac')} in checkpoint format {version} ({MANIFEST}), and "
            f"{__version__} reads format {FORMAT}: install the version that wrote it, export the model there "
            "(rllib export) and start from that"
        )
    if render(manifest) != raw:
        raise DamagedCheckpoint(f"{name} is damaged: {MANIFEST} is not what was written (its checksum differs). {ANOTHER}")
    if wrong := next(_wrong(manifest), None):
        raise DamagedCheckpoint(f"{name}: {MANIFEST} is malformed: {wrong}. {ANOTHER}")
    return manifest


def _wrong(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a manifest's fields, one by one."""
    if manifest.get("format") != FORMAT:
        yield f"'format' is {manifest.get('format')!r} instead of {FORMAT}"
    files = manifest.get("files")
    if not isinstance(files, dict):
        yield f"'files' is {files!r:.80} and no mapping"
        return
    for file, entry in files.items():
        plain = PurePosixPath(file)
        if plain.is_absolute() or ".." in plain.parts or str(plain) != file or file == MANIFEST or "\0" in file:
            yield f"'files' names {file!r}, which is no file within the checkpoint"
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            yield f"the entry of {file!r} is {entry!r:.80} instead of a size and a SHA-256"
