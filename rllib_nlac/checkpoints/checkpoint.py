"""Checkpoints that are whole or not there at all, know what wrote them, and turn into a plain Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pyarrow.fs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rllib_nlac.activity import activity
from rllib_nlac.checkpoints.manifest import (
    ANOTHER,
    FORMAT,
    MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    UnfinishedCheckpoint,
    VerifiedFolder,
    render,
    verify,
    write_manifest,
)
from rllib_nlac.checkpoints.scratch import LOCK, ScratchFolder, dead, leftovers
from rllib_nlac.checkpoints.shards import check_shards
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.lora import merged
from rllib_nlac.learner.adapter import add_adapter
from rllib_nlac.learner.rl_module import load_own_entries, own_entries, served_state
from rllib_nlac.names import is_address

__all__ = [
    "FORMAT",
    "MANIFEST",
    "CheckpointError",
    "DamagedCheckpoint",
    "UnfinishedCheckpoint",
    "VerifiedFolder",
    "render",
    "write_manifest",
]

MODULE_STATE = "learner_group/learner/rl_module/default_policy/module_state.pkl"
NAMED_FILES = "named_files"  # key of the manifest: what the files held that the configuration names
PROMPTS = "prompts.yaml"  # the prompt set of the run, with all that it extends
CONSTRUCTOR = "class_and_ctor_args.pkl"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "added_tokens.json")
WHOLE = (MANIFEST, "rllib_checkpoint.json")  # what the folder of a whole checkpoint has, and its parts have not
DEPTH = 4  # folders between a whole checkpoint and its deepest part: learner_group/learner/rl_module/default_policy
UNFINISHED = ".unfinished."
_opened: dict[Path, VerifiedFolder] = {}  # by folder, while their blocks last
SWAP_S = 5.0  # how long a reader waits for a living process to put a checkpoint where its former one was


@contextmanager
def written_at_once(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into that takes the place of ``path`` when the block ends well.

    Until then nothing of a former checkpoint at ``path`` is touched; after a failure nothing of the new one is left, and after
    a kill the next call with the same parent folder removes it. On a remote file system, where nothing can be exchanged at
    once, a kill in the last moment leaves the new one beside ``path``, under its name with ``.unfinished.`` and a number.

    Args:
        path: A local folder, existing or not, or the URI of a remote file system.
    """
    remote = is_address(str(path))
    final = Path(tempfile.mkdtemp() if remote else path).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    put_right(final.parent)
    scratch = ScratchFolder(f".{final.name}{UNFINISHED}", final.parent)
    staging = scratch.path
    staging.chmod(0o755)  # scratch folders can be read by their owner only
    try:
        yield staging
        if remote:
            _upload(staging, *pyarrow.fs.FileSystem.from_uri(str(path)))
        else:
            _swap(staging, final)
    finally:
        scratch.remove()
        if remote:
            shutil.rmtree(final, ignore_errors=True)


def _upload(staging: Path, filesystem: pyarrow.fs.FileSystem, target: str) -> None:
    fresh = f"{target}{UNFINISHED}{uuid.uuid4().hex}"
    try:
        filesystem.create_dir(fresh)
        pyarrow.fs.copy_files(str(staging), fresh, destination_filesystem=filesystem)
    except BaseException:
        with suppress(OSError):  # where the copy has failed, this may, too, and its error would hide the cause
            _delete(filesystem, fresh)
        raise
    _delete(filesystem, target)  # a file of the former that the new one has not would be foreign to it
    try:
        filesystem.move(fresh, target)
    except (OSError, NotImplementedError):  # object stores have no folders to move
        filesystem.create_dir(target)
        pyarrow.fs.copy_files(fresh, target, source_filesystem=filesystem, destination_filesystem=filesystem)
        _delete(filesystem, fresh)


def _delete(filesystem: pyarrow.fs.FileSystem, folder: str) -> None:
    if filesystem.get_file_info(folder).type is not pyarrow.fs.FileType.NotFound:
        filesystem.delete_dir(folder)


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


def put_right(parent: Path) -> None:
    """Removes from a folder of checkpoints what killed processes left there, and ends the swaps that they had begun."""
    for folder in leftovers(f".*{UNFINISHED}*", parent):
        final = parent / folder.name[1:].rpartition(UNFINISHED)[0]
        if not _is_being_written(final, besides=folder):
            if not final.exists() and _former(final).exists():
                _former(final).replace(final)
            shutil.rmtree(_former(final), ignore_errors=True)


def _is_being_written(path: Path, besides: Path | None = None) -> bool:
    """Whether a living process writes a checkpoint that is to lie at ``path``, in another folder than ``besides``."""
    for lock in path.parent.glob(f".*{UNFINISHED}*{LOCK}"):
        if lock.name.startswith(f".{path.name}{UNFINISHED}") and (besides is None or lock.name != besides.name + LOCK):
            with dead(lock) as is_dead:
                if not is_dead and lock.exists():
                    return True
    return False


@contextmanager
def opened(path: str | os.PathLike, filesystem: pyarrow.fs.FileSystem | None = None) -> Iterator[VerifiedFolder]:
    """A checkpoint, every byte of it checked, as a local folder; downloaded first where it lies on a remote file system.

    A folder is checked once: within the block, whoever opens the folder again gets the same result. RLlib calls
    ``restore_from_path`` within ``from_checkpoint``, and Tune within ``restore``.

    Args:
        path: A folder, or a URI.
        filesystem: Where ``path`` is, if not what it says itself.

    Raises:
        CheckpointError: Something of it is wrong.
        FileNotFoundError: There is no checkpoint at all.
    """
    remote = is_address(str(path)) or not (filesystem is None or isinstance(filesystem, pyarrow.fs.LocalFileSystem))
    if not remote and (verified := _opened.get(Path(path).absolute())) is not None:
        yield verified
        return
    with _downloaded(str(path), filesystem) if remote else nullcontext(_local(path)) as folder:
        _opened[folder] = verify(folder, str(path))
        try:
            yield _opened[folder]
        finally:
            _opened.pop(folder, None)


@contextmanager
def _downloaded(path: str, filesystem: pyarrow.fs.FileSystem | None) -> Iterator[Path]:
    """A copy of a remote folder, which is removed at the end."""
    scratch = ScratchFolder("rllib_nlac_download_")
    try:
        source = path
        if filesystem is None:
            filesystem, source = pyarrow.fs.FileSystem.from_uri(path)
        if filesystem.get_file_info(source).type != pyarrow.fs.FileType.Directory:
            raise FileNotFoundError(f"no checkpoint at {path}: the folder does not exist")
        pyarrow.fs.copy_files(source, str(scratch.path), source_filesystem=filesystem)
        yield scratch.path
    finally:
        scratch.remove()


def is_ours(path: str) -> bool:
    """Whether there is a checkpoint of this package at ``path``, whole or not."""
    if not is_address(path):
        return any((folder / MANIFEST).exists() for folder in (Path(path).absolute(), _former(Path(path).absolute())))
    filesystem, path = pyarrow.fs.FileSystem.from_uri(path)
    return filesystem.get_file_info(f"{path}/{MANIFEST}").type != pyarrow.fs.FileType.NotFound


def _local(path: str | os.PathLike) -> Path:
    """A local checkpoint's folder, after the end of a swap in which it is just now.

    Raises:
        FileNotFoundError: There is none.
    """
    folder = Path(path).absolute()
    waited_until = time.monotonic() + SWAP_S
    while not folder.exists() and _former(folder).exists():
        put_right(folder.parent)
        if not folder.exists() and (not _is_being_written(folder) or time.monotonic() > waited_until):
            _former(folder).replace(folder)
        time.sleep(0.01)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at {path}: the folder does not exist")
    return folder


def read_manifest(path: str | os.PathLike, contents: bool = True) -> dict[str, Any]:
    """What ``write_manifest`` wrote, after a check of the whole checkpoint.

    Args:
        path: A folder, or a URI.
        contents: Whether checksums are compared; without, a local checkpoint's files are looked at by name and size only.

    Raises:
        CheckpointError: The checkpoint is of another format, damaged or not whole.
        FileNotFoundError: There is no checkpoint at all.
    """
    if not contents:
        return verify(_local(path), str(path), contents=False).manifest
    with opened(path) as verified:
        return verified.manifest


def examine(path: Path, contents: bool = True) -> None:
    """As ``read_manifest``, of a trial's checkpoint; RLlib's own algorithms write no manifest, and there is nothing to compare.

    Raises:
        CheckpointError: Something of it is wrong.
    """
    if (path / MANIFEST).exists() or not (path / "algorithm_state.pkl").exists():
        read_manifest(path, contents)


def remove_unfinished(path: Path) -> bool:
    """Removes a checkpoint whose writing was interrupted, and no other; returns whether it was one."""
    try:
        examine(path, contents=False)
    except UnfinishedCheckpoint:
        shutil.rmtree(path)
        return True
    except (CheckpointError, FileNotFoundError):
        pass  # it matters only where it is needed
    return False


def last_whole(trial: Path) -> Path | None:
    """The newest checkpoint in a trial's folder that is whole and undamaged."""
    for path in sorted(trial.glob("checkpoint_[0-9]*"), reverse=True):
        try:
            examine(path)
        except (CheckpointError, FileNotFoundError):  # Tune may remove it meanwhile; and a file is none
            continue
        return path
    return None


def check(verified: VerifiedFolder, facts: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that does not fit the algorithm that would restore it.

    Args:
        verified: The checkpoint.
        facts: What the algorithm would write into a manifest of its own.

    Raises:
        CheckpointError: Another algorithm, model or division among learners.
    """
    manifest, name = verified.manifest, verified.name
    for key in facts:
        if key not in manifest:
            raise CheckpointError(f"{name}: {MANIFEST} is malformed: it has no {key!r}. {ANOTHER}")
    if manifest["algorithm"] != facts["algorithm"]:
        raise CheckpointError(
            f"{name} is of the algorithm {manifest['algorithm']}, and this is {facts['algorithm']}: to go on with its model "
            "under another algorithm, export it (rllib export) and set language_model to the folder"
        )
    if manifest["model"] != facts["model"]:
        model = manifest["model"] if isinstance(manifest["model"], dict) else {}
        part = "tokenizer" if model.get("architecture") == facts["model"]["architecture"] else "architecture"
        raise CheckpointError(
            f"{name} holds the model {manifest['language_model']!r}, and this algorithm was configured with "
            f"{facts['language_model']!r}, which has another {part}: restore it with the former, or set language_model to a "
            "folder that `rllib export` makes of the checkpoint"
        )
    _check_lora(name, manifest["lora"], facts["lora"])
    check_shards(name, manifest["shards"], facts["shards"])


def check_lora(name: str, manifest: Mapping[str, Any], config: Any) -> None:
    """Refuses a checkpoint whose adapter is not the one that ``config.lora`` describes; before anything is started.

    Raises:
        CheckpointError: It has another rank, scale, set of layers or base, or only one of both has an adapter.
    """
    _check_lora(name, manifest.get("lora"), lora_facts(config))


def _check_lora(name: str, had: Any, lora: Any) -> None:
    if had and lora and had["base"] != lora["base"]:
        raise CheckpointError(
            f"{name} holds an adapter of another base than {lora['model']!r}: set language_model to {had['model']!r} as it was"
        )
    names = ("rank", "alpha", "target_modules")
    was, now = ({key: each[key] for key in names} if each else None for each in (had, lora))
    if was == now:
        return
    raise CheckpointError(
        f"{name} was written with config.lora {was}, and this run has {now}: set lora to the former, or export the model "
        "(rllib export --merge) and start from that"
    )


def lora_facts(config: Any) -> dict[str, Any] | None:
    """What an adapter of a checkpoint must fit: its shape, its scale and its base; None without an adapter."""
    settings = getattr(config, "lora_settings", None)
    if settings is None:
        return None
    targets = settings.target_modules
    return {
        "rank": settings.rank,
        "alpha": settings.scale * settings.rank,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "model": config.language_model,
        "base": weights_digest(config.model_path),
    }


def weights_digest(model: str) -> str:
    """Tells the weights of two folders from each other by their files' sizes, heads and tails; of a hub's name, the name."""
    parts: list[Any] = []
    for file in sorted(Path(model).glob("*.safetensors")):
        with file.open("rb") as opened:
            head = opened.read(1 << 16)
            opened.seek(max(file.stat().st_size - (1 << 16), 0))
            parts.append((file.name, file.stat().st_size, head.hex(), opened.read().hex()))
    return _digest(parts or model)


def holder(path: str | os.PathLike) -> Path | None:
    """The checkpoint that a part of one, as ``learner_group``, belongs to; None where the part stands alone."""
    folder = Path(path).absolute()
    near = (folder, *list(folder.parents)[:DEPTH])
    return next((each for each in near if any((each / name).exists() for name in WHOLE)), None)


def fingerprint(model: str, chat: Chat) -> dict[str, str]:
    """What two models must share for weights of one to work in the other: the architecture and the tokenizer."""
    config = AutoConfig.from_pretrained(model).to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    words = {"vocabulary": chat.tokenizer.get_vocab(), "template": chat.tokenizer.chat_template, "end": chat.end_id}
    return {"architecture": _digest(config), "tokenizer": _digest(words)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def export_model(checkpoint: str | os.PathLike, folder: Path, merge: bool = False) -> Path:
    """Writes a checkpoint's policy as a Hugging Face folder, for Transformers, ``vllm serve`` or another run.

    With LoRA that is an adapter in PEFT's format, whose base is the run's language model. Neither engines nor environments are
    started. The tokenizer's files are copied as they are: saving a loaded one may change how it splits text.

    Args:
        checkpoint: A checkpoint of any algorithm of this package, RLlib's own on text included.
        folder: Where to write; must not exist, or be empty.
        merge: Whether an adapter is put into its base, and the whole model written.

    Raises:
        CheckpointError, FileNotFoundError: The checkpoint or its model cannot be read.
        FileExistsError: The folder is not empty, or a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}: name a new folder to export to")
    if not is_ours(str(checkpoint)):
        if (Path(checkpoint) / CONSTRUCTOR).is_file():
            raise CheckpointError(
                f"{checkpoint} has no {MANIFEST}: it is of one of RLlib's own algorithms, which have no language model to "
                "export, or its writing was interrupted. Name a whole checkpoint of this package's"
            )
        raise FileNotFoundError(f"{checkpoint} is no checkpoint: it has no {MANIFEST}")
    with opened(checkpoint) as verified:
        with (verified.folder / CONSTRUCTOR).open("rb") as file:
            info = pickle.load(file)
        with (verified.folder / MODULE_STATE).open("rb") as file:
            state = {re.sub(r"^(model\.)?lm\.", "", name): tensor for name, tensor in pickle.load(file).items()}
    config = info["class"].get_default_config().update_from_dict(info["ctor_args_and_kwargs"][0][0])
    if not config.trains:
        raise CheckpointError(f"{checkpoint} is of {info['class'].__name__}, which trains nothing: use {config.language_model}")
    activity.turn_to("loading the model")
    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=config.model_settings["dtype"])
    if (lora := config.lora_settings) is not None:
        add_adapter(model, lora)
    own = own_entries(model)
    load_own_entries(model, {name: tensor for name, tensor in state.items() if name in own})
    if lora is not None and merge:
        adapter = served_state(model)
        model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=config.model_settings["dtype"])
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        model.load_state_dict(merged(whole, adapter, lora.scale, model.dtype), strict=False)
    model.generation_config = sampling_of(config)
    written = state.values() if lora is not None and not merge else model.parameters()
    size = sum(tensor.numel() * tensor.element_size() for tensor in written)
    with written_at_once(folder) as target, activity.filling("writing the model", target, size):
        model.save_pretrained(target)
        _copy_tokenizer(config.model_path, target)
    return folder


def sampling_of(config: Any) -> GenerationConfig:
    """The sampling that was trained and evaluated, for Transformers and ``vllm serve``.

    What else the base model's own file says, such as a repetition penalty, was never in force. Some of these files are refused
    when they are saved again.
    """
    chat = config.make_chat()
    greedy = not config.action_temperature
    chosen = {} if greedy else {"temperature": config.action_temperature, "top_p": config.action_top_p, "top_k": 0}
    pad = chat.tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=not greedy, eos_token_id=list(chat.end_ids), pad_token_id=chat.end_id if pad is None else pad, **chosen
    )


def _copy_tokenizer(model: str, target: Path) -> None:
    if not Path(model).is_dir():  # a hub's name
        AutoTokenizer.from_pretrained(model).save_pretrained(target)
        return
    for pattern in TOKENIZER_FILES:
        for file in Path(model).glob(pattern):
            shutil.copyfile(file, target / file.name)
