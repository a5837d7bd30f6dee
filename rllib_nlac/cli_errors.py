"""What every command shares: mappings given as options, and errors that a person can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from rllib_nlac.storage import StorageError


def mapping(text: str, option: str) -> dict[str, Any]:
    """An option given as YAML or JSON.

    Raises:
        ValueError: It is neither, or no mapping.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{option} is not valid YAML or JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a mapping such as {json.dumps({'lr': 1e-4})}, and it is {text!r}")
    return value


@contextmanager
def clear_errors(console: Console) -> Iterator[None]:
    """Prints what is wrong with the input in one line, without a traceback, and exits with 2; with 1 where storage fails."""
    try:
        yield
    except StorageError as error:
        console.print(f"[red]Error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        console.print(f"[red]Error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
