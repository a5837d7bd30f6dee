"""Where a run starts: ``language_model`` may name a checkpoint of another run, or that run's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rllib_nlac.checkpoints.checkpoint import MANIFEST, export_model, is_ours, last_whole
from rllib_nlac.names import is_address


def starting_point(model: str) -> str:
    """A model folder for what ``language_model`` names.

    The policy of a checkpoint is written beside the checkpoint as a whole Hugging Face model, once. Of a run's or an
    experiment's folder it is the last whole checkpoint, of the trial that wrote one last.

    Args:
        model: A checkpoint, a folder of a run, or anything else, which is returned as it is.

    Raises:
        CheckpointError: The checkpoint is damaged or has no model.
    """
    folder = Path(model).expanduser()
    if is_address(model) or not folder.is_dir() or (folder / "config.json").exists():
        return model
    checkpoint = folder if is_ours(str(folder)) else newest_checkpoint(folder)
    if checkpoint is None:
        return model
    checkpoint = checkpoint.absolute()
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16]
    target = checkpoint.with_name(f"model_of_{checkpoint.name}_{digest}")
    if not (target / "config.json").is_file():
        export_model(checkpoint, target, merge=True)
    return str(target)


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint below a trial's or an experiment's folder; None if there is none."""
    trials = {path.parent for pattern in ("checkpoint_[0-9]*", "*/checkpoint_[0-9]*") for path in folder.glob(pattern)}
    found = [path for trial in trials if (path := last_whole(trial)) is not None]
    return max(found, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)
