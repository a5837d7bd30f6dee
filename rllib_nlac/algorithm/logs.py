"""Learning from logs, off-policy or supervised: what ``input_`` names, and runs that have no environment."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from rllib_nlac.replay.dialogues import input_files

LOGGED = "LoggedDialogues"  # the environment of a run that has none


def played_env(config: Any) -> str:
    """The environment that episodes are of: of a run on logs alone the one that evaluation plays, if it plays one."""
    if config.env == LOGGED and isinstance(config.evaluation_config, Mapping):
        return str(config.evaluation_config.get("env") or config.env)
    return str(config.env)


def take_logs(config: Any, what: str) -> None:
    """Takes names of files as RLlib does, a text or a list of texts, and names the environment of a run that has none.

    Raises:
        ValueError: ``input_`` is neither; ``what`` it should name is said.
    """
    names = _as_texts(config.input_)
    if names != config.input_:  # a frozen configuration stays as it is
        config.input_ = names
    is_list = isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
    if not (is_list or isinstance(names, str)):
        raise ValueError(
            f"config.input_ is {names!r} and must name the {what}: a file, a pattern or a folder, or a list of them"
        )
    if config.env is None and config.is_offline:
        config.env = LOGGED


def check_logs(config: Any, alone: bool) -> None:
    """Looks whether the files are there; ``alone`` says that no episodes are collected beside them.

    Raises:
        ValueError: There are none, or the learning rate follows steps that are never made.
    """
    if config.is_offline:
        input_files(config.input_)
    if alone and isinstance(config.lr, (list, tuple)):
        raise ValueError(
            f"config.lr is {config.lr!r} and counts environment steps, and learning from logs alone makes none: give one "
            "number, or a scheduler of DeepSpeed"
        )


def _as_texts(names: Any) -> Any:
    if isinstance(names, (list, tuple)):
        return [_as_texts(name) for name in names]
    return fspath(names) if isinstance(names, PathLike) else names
