"""Damages a real checkpoint, one place at a time, and counts who notices before anything is changed.

Bytes are flipped at random places, at least one in every file; then each file is shortened, removed, swapped with another and
linked, and foreign files are added. Every damaged checkpoint is tried by all ways in: ``restore_from_path`` of the whole and of
a component, Tune's ``restore``, ``NLAC.from_checkpoint`` and the export. It is detected when all of them raise a
``CheckpointError`` that names the file, and the algorithm is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rllib_nlac.algorithm.algorithm import LanguageAlgorithm
from rllib_nlac.checkpoints.checkpoint import CheckpointError, export_model
from rllib_nlac.sync.sync import export_weights
from rllib_nlac.types import Weights

COMPONENT = "learner_group/learner/rl_module/default_policy"
FOREIGN = (
    "state.msgpack",
    "algorithm_state.msgpack",
    "_dict_checkpoint.pkl",
    "env_to_module_connector/state.pkl",
    "learner_shards/00000.pt",
    "replay_buffer/episodes_00000001.pkl",
    "learner_group/learner/state.msgpack",
)


def files_of(checkpoint: Path) -> list[str]:
    """All files of a checkpoint by their relative paths."""
    return sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())


def flips(checkpoint: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """File, place and mask of ``count`` flips: bits and bytes in turn; every file once, then larger ones more often."""
    rng, names = random.Random(seed), files_of(checkpoint)
    sizes = [(checkpoint / name).stat().st_size for name in names]
    chosen = [*names, *rng.choices(names, [size**0.5 for size in sizes], k=max(count - len(names), 0))]
    length = dict(zip(names, sizes))
    return [
        (name, rng.randrange(length[name]), 1 << rng.randrange(8) if number % 2 else rng.randrange(1, 256))
        for number, name in enumerate(chosen)
    ]


@contextlib.contextmanager
def changed(path: Path, change: Callable[[Path], object]) -> Iterator[None]:
    """While it lasts, a file is not what it was."""
    content = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    new_parent = content is None and not any(path.parent.iterdir())
    change(path)
    try:
        yield
    finally:
        if path.is_symlink() or path.exists():
            path.unlink()
        if content is not None:
            path.write_bytes(content)
        elif new_parent:
            path.parent.rmdir()


def flip(path: Path, place: int, mask: int) -> None:
    """Changes one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


def link(path: Path, target: Path) -> None:
    """A symbolic link to the same content takes a file's place."""
    path.replace(target)
    path.symlink_to(target)


def damages(checkpoint: Path, scratch: Path) -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    """Kind, file and change of everything that is no flip."""
    names = files_of(checkpoint)
    for name in names:
        size, other = (checkpoint / name).stat().st_size, names[names.index(name) - 1]
        yield "truncated", name, lambda path, size=size: path.write_bytes(path.read_bytes()[: size // 2])
        yield "emptied", name, lambda path: path.write_bytes(b"")
        yield "lengthened", name, lambda path: path.write_bytes(path.read_bytes() + b"\0")
        yield "removed", name, lambda path: path.unlink()
        yield "swapped", name, lambda path, other=other: path.write_bytes((checkpoint / other).read_bytes())
        yield "linked", name, lambda path: link(path, scratch / "target")
    for name in FOREIGN:
        yield "added", name, lambda path: path.write_bytes(b"\x80\x04N.")


def state_of(algorithm: LanguageAlgorithm) -> str:
    """A checksum of what a restore would change."""
    whole = hashlib.sha256()
    weights = export_weights(algorithm.learner_group)
    for which in (Weights.POLICY, Weights.TARGET):
        for tensor in weights[which].values():
            whole.update(tensor.numpy().tobytes())
    buffer = algorithm.local_replay_buffer  # type: ignore[attr-defined]
    learner = algorithm.learner_group._learner
    facts = (
        algorithm.iteration,
        algorithm.weight_version,
        algorithm.rng.bit_generator.state,
        learner.trainer.engine.global_steps,
        [episode.id_ for episode in buffer.episodes],
        buffer.mean_priority,
        algorithm.env_steps_sampled(),
    )
    whole.update(repr(facts).encode())
    return whole.hexdigest()


def ways_in(algorithm: LanguageAlgorithm, checkpoint: Path, scratch: Path) -> dict[str, Callable[[], object]]:
    """All ways in which a checkpoint is read."""
    part = checkpoint / COMPONENT
    return {
        "restore_from_path": lambda: algorithm.restore_from_path(str(checkpoint)),
        "component": lambda: algorithm.restore_from_path(str(part), component=COMPONENT),
        "restore": lambda: algorithm.restore(str(checkpoint)),
        "from_checkpoint": lambda: type(algorithm).from_checkpoint(str(checkpoint)).stop(),
        "export": lambda: export_model(checkpoint, scratch / "exported"),
    }


def verdict(way: Callable[[], object], name: str) -> str:
    """What a way in makes of a checkpoint of which ``name`` is damaged."""
    try:
        way()
    except CheckpointError as error:
        return "refused by name" if name in str(error) else f"refused without a name: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}"
    return "loaded"


def attack(algorithm: LanguageAlgorithm, checkpoint: Path, scratch: Path, name: str, change: Callable[[Path], object]) -> str:
    """The verdict on one damage; an empty string where all ways in refused it by name and nothing was changed."""
    before, troubles = state_of(algorithm), []
    with changed(checkpoint / name, change):
        # Whoever looks for a manifest to tell a checkpoint from something else says that it is none.
        for kind, way in ways_in(algorithm, checkpoint, scratch).items():
            if (result := verdict(way, name)) != "refused by name":
                troubles.append(f"{kind}: {result}")
    if state_of(algorithm) != before:
        troubles.append("the algorithm was changed")
    shutil.rmtree(scratch / "exported", ignore_errors=True)
    return ", ".join(troubles)
