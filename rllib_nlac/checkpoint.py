"""Checkpoints that are whole or not there at all, know what wrote them, and turn into a plain Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rllib_nlac.sampling.chat import Chat
from rllib_nlac.version import __version__

FORMAT = 2
MANIFEST = "rllib_nlac.json"
MODULE_STATE = "learner_group/learner/rl_module/default_policy/module_state.pkl"
CONSTRUCTOR = "class_and_ctor_args.pkl"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "added_tokens.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be restored here; the message says why, and nothing was changed by the attempt."""


@contextmanager
def written_at_once(path: str | os.PathLike | None) -> Iterator[Path]:
    """A folder to write into that takes the place of ``path`` when the block ends well.

    Until then nothing of a former checkpoint at ``path`` is touched; after a failure nothing of the new one is left.

    Args:
        path: A local folder, existing or not, or the URI of a remote file system.
    """
    remote = path is not None and "://" in str(path)
    final = Path(tempfile.mkdtemp() if path is None or remote else path).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.unfinished.", dir=final.parent))
    staging.chmod(0o755)  # mkdtemp makes folders that only their owner may read
    try:
        yield staging
        if remote:
            filesystem, target = pyarrow.fs.FileSystem.from_uri(str(path))
            pyarrow.fs.copy_files(str(staging), target, destination_filesystem=filesystem)
        else:
            _swap(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if remote:
            shutil.rmtree(final, ignore_errors=True)


@contextmanager
def local_copy(path: str | os.PathLike) -> Iterator[Path]:
    """A checkpoint as a local folder, downloaded where it lies on a remote file system."""
    if "://" not in str(path):
        yield Path(path).absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        filesystem, source = pyarrow.fs.FileSystem.from_uri(str(path))
        pyarrow.fs.copy_files(source, folder, source_filesystem=filesystem)
        yield Path(folder)


def _swap(staging: Path, final: Path) -> None:
    if not final.exists() or not any(final.iterdir()):
        staging.replace(final)
        return
    former = _former(final)
    shutil.rmtree(former, ignore_errors=True)
    final.replace(former)
    staging.replace(final)
    shutil.rmtree(former)


def _former(path: Path) -> Path:
    return path.with_name(f".{path.name}.former")


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes who made a checkpoint and which files belong to it; comes last, so that it vouches for the others."""
    files = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    text = json.dumps({"format": FORMAT, "rllib_nlac": __version__, **facts, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text)


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """What ``write_manifest`` wrote, after a check that all files are there.

    Raises:
        CheckpointError: The checkpoint is of another format or not whole.
        FileNotFoundError: There is no checkpoint at all.
    """
    if "://" in str(path):
        filesystem, root = pyarrow.fs.FileSystem.from_uri(str(path))
    else:
        local = Path(path).absolute()
        if not local.exists() and _former(local).exists():
            _former(local).replace(local)  # the process ended between the two steps of a swap
        if not local.is_dir():
            raise FileNotFoundError(f"no checkpoint at {path}: the folder does not exist")
        filesystem, root = pyarrow.fs.LocalFileSystem(), str(local)
    selector = pyarrow.fs.FileSelector(root, recursive=True)
    sizes = {os.path.relpath(info.path, root): info.size for info in filesystem.get_file_info(selector) if info.is_file}
    if MANIFEST not in sizes:
        raise CheckpointError(
            f"{path} is no whole checkpoint of this package: it has no {MANIFEST}. Its writing was interrupted, or an older "
            f"version than {__version__} wrote it; take another checkpoint of the same run"
        )
    with filesystem.open_input_stream(f"{root}/{MANIFEST}") as file:
        manifest = json.loads(file.read())
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} was written by rllib_nlac {manifest['rllib_nlac']} in checkpoint format {manifest['format']}, and "
            f"{__version__} reads format {FORMAT}: install the version that wrote it, export the model there "
            "(rllib export) and start from that"
        )
    for name, size in manifest["files"].items():
        if sizes.get(name) != size:
            found = "is missing" if name not in sizes else f"has {sizes[name]} bytes instead of {size}"
            raise CheckpointError(f"{path} is not whole: {name} {found}. Take another checkpoint of the same run")
    return manifest


def check(path: str | os.PathLike, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses a checkpoint that does not fit the algorithm that would restore it; returns its manifest.

    Args:
        path: The checkpoint.
        facts: What the algorithm would write into a manifest of its own.

    Raises:
        CheckpointError: Another algorithm, model or division among learners, or not whole.
    """
    manifest = read_manifest(path)
    if manifest["algorithm"] != facts["algorithm"]:
        raise CheckpointError(
            f"{path} is of the algorithm {manifest['algorithm']}, and this is {facts['algorithm']}: to go on with its model "
            "under another algorithm, export it (rllib export) and set language_model to the folder"
        )
    if manifest["model"] != facts["model"]:
        part = "tokenizer" if manifest["model"]["architecture"] == facts["model"]["architecture"] else "architecture"
        raise CheckpointError(
            f"{path} holds the model {manifest['language_model']!r}, and this algorithm was configured with "
            f"{facts['language_model']!r}, which has another {part}: restore it with the former, or set language_model to a "
            "folder that `rllib export` makes of the checkpoint"
        )
    if manifest["shards"] and manifest["shards"] != facts["shards"]:
        raise CheckpointError(
            f"{path} holds the optimizer in shards of {_learners(manifest['shards'])}, and this algorithm has "
            f"{_learners(facts['shards'])}: restore it with those, or export the model and start from that"
        )
    return manifest


def _learners(shards: Mapping[str, int] | None) -> str:
    return f"{shards['num_learners']} learners under ZeRO {shards['zero_stage']}" if shards else "one learner"


def fingerprint(model: str, chat: Chat) -> dict[str, str]:
    """What two models must share for weights of one to work in the other: the architecture and the tokenizer."""
    config = AutoConfig.from_pretrained(model).to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    words = {"vocabulary": chat.tokenizer.get_vocab(), "template": chat.tokenizer.chat_template, "end": chat.end_id}
    return {"architecture": _digest(config), "tokenizer": _digest(words)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def export_model(checkpoint: Path, folder: Path) -> Path:
    """Writes a checkpoint's policy as a plain Hugging Face folder, for Transformers, ``vllm serve`` or another run.

    Neither engines nor environments are started. The tokenizer's files are copied as they are: saving a loaded one may
    change how it splits text.

    Args:
        checkpoint: A checkpoint of any algorithm of this package, or of RLlib's own on text.
        folder: Where to write; must not exist, or be empty.

    Raises:
        CheckpointError, FileNotFoundError: The checkpoint or its model cannot be read.
        FileExistsError: The folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder to export to")
    if not (checkpoint / CONSTRUCTOR).is_file():
        raise FileNotFoundError(f"{checkpoint} is no checkpoint: it has no {CONSTRUCTOR}")
    if (checkpoint / MANIFEST).is_file():
        read_manifest(checkpoint)
    with (checkpoint / CONSTRUCTOR).open("rb") as file:
        info = pickle.load(file)
    config = info["class"].get_default_config().update_from_dict(info["ctor_args_and_kwargs"][0][0])
    if not hasattr(config, "model_path"):
        raise CheckpointError(f"{checkpoint} is of {info['class'].__name__} without a language model")
    with (checkpoint / MODULE_STATE).open("rb") as file:
        state = {name.removeprefix("lm."): tensor for name, tensor in pickle.load(file).items()}
    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=config.learner_dtype)
    own = model.state_dict()
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in own}, strict=True)
    with written_at_once(folder) as target:
        model.save_pretrained(target)
        _copy_tokenizer(config.model_path, target)
    return folder


def _copy_tokenizer(model: str, target: Path) -> None:
    if not Path(model).is_dir():  # a hub's name
        AutoTokenizer.from_pretrained(model).save_pretrained(target)
        return
    for pattern in TOKENIZER_FILES:
        for file in Path(model).glob(pattern):
            shutil.copyfile(file, target / file.name)
