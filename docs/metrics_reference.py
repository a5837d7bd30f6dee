"""Writes the table of metrics from the docstrings of what logs them: sections such as ``Metrics (replay_buffer):``.

``conf.py`` calls it, so the table is never older than the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from config_reference import table

PACKAGE = Path(__file__).parent.parent / "rllib_nlac"
SECTION = re.compile(r"^Metrics \((.+)\):\n((?:    .*\n?)+)", re.MULTILINE)
TOP = "top level"
#: In the order of an iteration; what is not named here stands at the end.
ORDER = (TOP, "evaluation", "evaluation/critic", "env_runners", "collection", "replay_buffer", "language_stages")
ORDER += ("learners/default_policy", "sync", "seconds", "idle", "tokens, prompt_tokens, cached_tokens", "faults")


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each section's prefix and its entries: names of metrics, separated by commas, and their meaning."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                for prefix, body in SECTION.findall(text + "\n"):
                    yield prefix, list(_entries(textwrap.dedent(body).strip()))


def _entries(body: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?! )", body):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        yield names, meaning


def reference() -> str:
    """The tables as Markdown, one for each prefix."""
    entries: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for prefix, found in sections():
        entries[prefix] += found
    parts = []
    for prefix in sorted(entries, key=lambda prefix: (ORDER.index(prefix) if prefix in ORDER else len(ORDER), prefix)):
        rows = [(", ".join(f"`{name}`" for name in names.split(", ")), meaning) for names, meaning in entries[prefix]]
        heading = prefix if prefix == TOP else ", ".join(f"`{name}`" for name in prefix.split(", "))
        parts += [f"### {heading}", table(("metric", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference())
