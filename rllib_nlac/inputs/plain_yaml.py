"""YAML as experiments are written in: JSON's numbers are numbers, and what YAML would drop without a word is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1, where ``1e-4`` would be a text, with the numbers of YAML 1.2 and JSON."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._checked: dict[int, yaml.MappingNode] = {}  # by its id, which no other gets while it is here

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Checks a mapping once, before the keys that it merges stand in it beside its own."""
        if id(node) not in self._checked:
            self._checked[id(node)] = node
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                first = seen[key].line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice, first in line {first}: remove one", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen[key] = key_node.start_mark


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse(text: str, where: str) -> Any:
    """Reads YAML or JSON.

    Args:
        text: The YAML.
        where: What errors call it.

    Raises:
        ValueError: It is neither; the message names line, column and, where it is known, the fix.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fix = ": indent with spaces, YAML takes no tabs" if "'\\t'" in problem else ""
        raise ValueError(f"{where}{place}: not valid YAML or JSON: {problem}{fix}") from error
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply to be read") from None


def read(path: Path) -> Any:
    """Reads a YAML file.

    Raises:
        ValueError: It cannot be read, is no UTF-8 text, or no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse(text, str(path))


def mapping(text: str, option: str) -> dict[str, Any]:
    """An option given as YAML or JSON.

    Raises:
        ValueError: It is neither, or no mapping.
    """
    value = parse(text, option)
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a mapping such as {json.dumps({'lr': 1e-4})}, and it is {text!r}")
    return value
