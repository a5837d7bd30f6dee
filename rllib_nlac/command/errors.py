"""What every command shares: mappings given as options, and errors that a person can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from rllib_nlac.command.failures import lines_of, text_of, write_traceback
from rllib_nlac.command.terminal import Terminal, terminal
from rllib_nlac.inputs import plain_yaml


def mapping(text: str, option: str) -> dict[str, Any]:
    """An option given as YAML or JSON.

    Raises:
        ValueError: It is neither, or no mapping.
    """
    value = plain_yaml.parse(text, option)
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a mapping such as {json.dumps({'lr': 1e-4})}, and it is {text!r}")
    return value


class RunFailed(Exception):
    """What was asked for was right, and failed while it ran."""


@contextmanager
def running() -> Iterator[None]:
    """Within it an error is one of what runs, and no longer one of what was typed.

    Raises:
        RunFailed: Something failed.
    """
    try:
        yield
    except Exception as error:
        raise RunFailed from error


@contextmanager
def clear_errors() -> Iterator[None]:
    """Prints errors in few lines, without a traceback: exit code 2 for what was typed, 1 for what failed while it ran."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        terminal.say(f"Error: {error}", "red")
        sys.exit(2)
    except Exception as error:
        from rllib_nlac.checkpoints.storage import StorageError  # too long to import before anything is printed

        if isinstance(error, StorageError):
            terminal.say(f"Error: {error}", "red")
            sys.exit(1)
        text = text_of(error.__cause__ if isinstance(error, RunFailed) and error.__cause__ else error)
        terminal.say("Failed:", "red")
        for line in lines_of(text, write_traceback(text)):
            terminal.say(line)
        sys.exit(1)


class Commands(TyperGroup):
    """All commands; what is wrong with the words of a command line is printed as any other text."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            code = 1
        except Exception as error:
            context = getattr(error, "ctx", None)
            if not standalone_mode or not hasattr(error, "format_message"):  # what the parser raises can say its message
                raise
            if type(error).__name__ != "NoArgsIsHelpError":  # that has printed the help
                errors = Terminal(stderr=True)
                if context is not None:
                    errors.say(f"{context.get_usage()}\nTry '{context.command_path} --help'.")
                errors.say(f"Error: {error.format_message()}", "red")
            code = error.exit_code  # type: ignore[attr-defined]
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)
