"""The tuned examples by name, wherever the package is: in its repository, or installed from a wheel that carries them."""

from __future__ import annotations

import glob
from pathlib import Path

from rllib_nlac.names import unknown_key

_PACKAGE = Path(__file__).parents[1]
NAME = "tuned_examples"
BASES = "bases"  # its folder of what examples share, which a file of one's own may extend, too
# In the repository they stand beside the package, in an installation within it.
FOLDER = next((path for path in (_PACKAGE / NAME, _PACKAGE.parent / NAME) if path.is_dir()), _PACKAGE / NAME)


def names() -> dict[str, str]:
    """Every example with what its first sentence says."""
    return {path.stem: _summary(path) for path in sorted(FOLDER.glob("*.yaml"))}


def _summary(path: Path) -> str:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line[2:])
    text = " ".join(comment)
    return text.partition(". ")[0].rstrip(".:") + "."


def find(name: str) -> Path:
    """The file of an experiment: a path that exists, or the name of an example, or of a base as in ``bases/one_gpu_lora``.

    Raises:
        FileNotFoundError: It is neither; the nearest name is given.
    """
    path = Path(name)
    return path if path.is_file() else shipped(name)


def shipped(name: str) -> Path:
    """As ``find``, and never a file of one's own, which ``rllib examples NAME > NAME.yaml`` has just made empty."""
    path = Path(name)
    plain = path.stem if path.suffix == ".yaml" else path.name
    for folder in (Path("."), Path(BASES)):
        file = FOLDER / folder / f"{plain}.yaml"
        if path.parent in (folder, NAME / folder) and file.is_file():
            return file
    kind = ", which is a folder" if path.is_dir() else ""
    raise FileNotFoundError(f"no experiment file at {name}{kind}; as a tuned example: {unknown_key(plain, names(), 'name')}")


def data_files(name: str) -> list[str]:
    """The data files that a name or pattern finds; what an example names below ``tuned_examples/`` is found everywhere."""
    path = Path(name).expanduser()
    if path.is_file():  # whatever its name holds
        return [str(path)]
    found = glob.glob(str(path), recursive=True)
    if not found and path.parts[:1] == (NAME,):
        found = glob.glob(str(FOLDER.parent / path), recursive=True)
    return sorted(found)
