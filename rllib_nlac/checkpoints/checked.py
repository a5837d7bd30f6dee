"""Every way in and out of a checkpoint that RLlib and Tune know, with the checks of ``rllib_nlac.checkpoints.manifest``."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pyarrow.fs
import yaml
from ray import cloudpickle
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.annotations import override
from ray.tune import Checkpoint
from ray.tune.registry import ENV_CREATOR, _global_registry
from ray.tune.utils import flatten_dict

from rllib_nlac.checkpoints import checkpoint
from rllib_nlac.checkpoints.named_files import changes, named_files
from rllib_nlac.checkpoints.scratch import ScratchFolder
from rllib_nlac.checkpoints.storage import cannot_write
from rllib_nlac.envs import registry
from rllib_nlac.language.prompts import resolved_prompts
from rllib_nlac.names import is_address

logger = logging.getLogger(__name__)


class CheckedCheckpoints(Algorithm):
    """Writes checkpoints that are whole or not there, with checksums, and verifies one before anything of it is used.

    A mixin: it goes before RLlib's class.
    """

    config: Any
    notices: Any  # of the run

    @override(Algorithm)
    def setup(self, config: Any) -> None:
        # As they are read now: a file may change while the run goes on with what it has read.
        self._named_files, self._prompts = named_files(self.config), resolved_prompts(self.config.model_defaults.prompts)
        super().setup(config)

    @staticmethod
    @override(Algorithm)
    def _get_env_id_and_creator(env_specifier: Any, config: Any) -> tuple[Any, Any]:
        """Says what to import where a name means nothing, as in a script that restores a checkpoint of another one's world.

        Raises:
            ValueError: No environment of that name is registered in this process.
        """
        env = env_specifier
        known = not isinstance(env, str) or registry.is_known(env) or _global_registry.contains(ENV_CREATOR, env)
        if not known and env not in gym.registry and not {".", ":"} & set(env):
            raise ValueError(
                f"the environment {env!r} is not registered in this process: import the module that calls "
                f"rllib_nlac.register({env!r}, ...) first, or name the environment by its place, as in my_module:MyEnvironment"
            )
        return Algorithm._get_env_id_and_creator(env, config)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of this algorithm."""
        chat = getattr(self, "chat", None) or self.config.make_chat()
        return {
            "algorithm": type(self).__name__,
            "language_model": self.config.language_model,
            "model": checkpoint.fingerprint(self.config.model_path, chat),
            "lora": checkpoint.lora_facts(self.config),
            "shards": None,
            "iteration": self.iteration,
        }

    def save_parts(self, folder: Path) -> None:
        """Writes what is too large for the state that RLlib pickles in one piece."""

    def load_parts(self, folder: Path) -> None:
        """Reads what ``save_parts`` wrote."""

    @override(Algorithm)
    def save_to_path(self, path: Any = None, *, state: Any = None, use_msgpack: bool = False, **kwargs: Any) -> str:
        """Writes a checkpoint that is whole or not there: a former one at ``path`` stays until the new one is complete.

        Args:
            path: A local folder or a URI; None makes a temporary folder.
            state: To be written in place of the algorithm's own.
            use_msgpack: As for RLlib.
            **kwargs: None is known.
        """
        if kwargs.get("filesystem") is not None:
            raise ValueError("save_to_path takes no filesystem: name it in the path, as in s3://bucket/folder")
        final = str(path) if path is not None else tempfile.mkdtemp()
        with checkpoint.written_at_once(final) as folder:
            super().save_to_path(str(folder), state=state, use_msgpack=use_msgpack)
            self._name_class(folder / checkpoint.CONSTRUCTOR)
            self.save_parts(folder)
            plain = json.loads(json.dumps(self._prompts, default=str))
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
            (folder / checkpoint.PROMPTS).write_text(text, encoding="utf-8")
            checkpoint.write_manifest(folder, {**self.facts(), checkpoint.NAMED_FILES: self._named_files})
        return final

    def _name_class(self, constructor: Path) -> None:
        """Writes again what RLlib pickled to construct the algorithm, with a class that can be imported.

        The process of a Tune trial is an actor. Ray derives the actor's class from ours, with a wrapper of every method, and
        nobody can import it: pickled in full, it could not be loaded any more after a method was removed.
        """
        own = getattr(type(self), "__ray_actor_class__", type(self))
        with constructor.open("wb") as file:
            cloudpickle.dump({"class": own, "ctor_args_and_kwargs": self.get_ctor_args_and_kwargs()}, file)

    @classmethod
    @override(Algorithm)
    def from_checkpoint(cls, path: Any, filesystem: pyarrow.fs.FileSystem | None = None, **kwargs: Any) -> Algorithm:
        """Builds an algorithm from a checkpoint, whose class and configuration RLlib unpickles first.

        Args:
            path: A folder, a URI or a Ray checkpoint.
            filesystem: Where ``path`` is, if not what it says itself.
            **kwargs: RLlib's.

        Raises:
            CheckpointError: The checkpoint is damaged.
            FileNotFoundError: There is none.
        """
        place, where = _place(path)
        with checkpoint.opened(place, where or filesystem) as verified:
            return super().from_checkpoint(str(verified.folder), **kwargs)

    @override(Algorithm)
    def restore_from_path(
        self, path: Any, *, component: str | None = None, filesystem: pyarrow.fs.FileSystem | None = None, **kwargs: Any
    ) -> None:
        """Restores a checkpoint, or with ``component`` a part of one.

        Args:
            path: A folder or a URI; with ``component`` the folder of that part.
            component: As for RLlib, for example ``learner_group/learner/rl_module/default_policy``.
            filesystem: Where ``path`` is, if not what it says itself.
            **kwargs: RLlib's.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another version, algorithm or model. Nothing was changed.
            FileNotFoundError: There is none.
        """
        if component is not None:
            self._restore_component(path, component, filesystem, **kwargs)
        else:
            with checkpoint.opened(path, filesystem) as verified:
                self._check_fit(verified)
                super().restore_from_path(str(verified.folder), **kwargs)
                self.load_parts(verified.folder)

    def _check_fit(self, verified: checkpoint.VerifiedFolder) -> None:
        checkpoint.check(verified, self.facts())
        changed = changes(verified.manifest.get(checkpoint.NAMED_FILES), self._named_files)
        text = (
            f"{verified.name} was written with other files than this run reads: {changed}. What it holds, such as a replay "
            f"buffer, is of the former; its prompts stand in its {checkpoint.PROMPTS}"
        )
        self.notices.update("named files", text if changed else None)

    def _restore_component(self, path: Any, component: str, filesystem: pyarrow.fs.FileSystem | None, **kwargs: Any) -> None:
        """A part of a whole checkpoint is verified with it; what stands alone, as RLlib's modules write it, cannot be."""
        whole = checkpoint.holder(path) if not is_address(str(path)) else None
        if whole is None:
            logger.warning("%s belongs to no checkpoint with checksums, and is read unchecked", path)
            super().restore_from_path(path, component=component, filesystem=filesystem, **kwargs)
            return
        with checkpoint.opened(whole):
            super().restore_from_path(str(Path(path).absolute()), component=component, **kwargs)

    @override(Algorithm)
    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Tune's way out: it copies a checkpoint from a temporary folder, which goes also where the process is killed.

        Raises:
            StorageError: The checkpoint cannot be written.
        """
        if checkpoint_dir is not None or self._storage is None:
            return super().save(checkpoint_dir)
        storage, scratch = self._storage, ScratchFolder("rllib_nlac_checkpoint_")
        try:
            saved = super().save(str(scratch.path / "checkpoint"))
        except OSError as error:
            target = storage.checkpoint_fs_path
            if isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
                checkpoint.remove_unfinished(Path(target))  # half a checkpoint takes room
            raise cannot_write("a checkpoint", target, error, Path(storage.trial_fs_path)) from error
        finally:
            scratch.remove()
        # Tune looks for the score by which it keeps checkpoints among the names as they stand, not within nested results.
        nested = {name: value for name, value in saved.metrics.items() if isinstance(value, Mapping) and name != "config"}
        saved.metrics.update(flatten_dict(nested))
        return saved

    @override(Algorithm)
    def restore(self, checkpoint_path: Any) -> None:
        """Tune's way in, which would set counters and unpickle a file before ``restore_from_path`` is called.

        Args:
            checkpoint_path: A folder, a Ray checkpoint, or Tune's record of one with the metrics of its iteration.
        """
        source = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        with checkpoint.opened(*_place(source)) as verified:
            self._check_fit(verified)
            local: Any = Checkpoint.from_directory(str(verified.folder))
            if source is not checkpoint_path:
                local = type(checkpoint_path)(checkpoint=local, metrics=checkpoint_path.metrics)
            super().restore(local)


def _place(source: Any) -> tuple[str, pyarrow.fs.FileSystem | None]:
    """Path and file system of a folder or a Ray checkpoint."""
    return (str(source.path), source.filesystem) if isinstance(source, Checkpoint) else (os.fspath(source), None)
