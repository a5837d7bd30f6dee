"""One self-contained page: data, style and script in one file that fetches nothing.

The data is compressed and in base64, so that no text in it can end an element. The page's own policy (CSP) allows its script
and its style by their hashes and nothing else: no other script, no picture from anywhere, no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

# In the order in which they are joined.
SCRIPTS = ("data.js", "dom.js", "charts.js", "diff.js", "list.js", "transition.js", "run.js", "critic.js", "main.js")


def packed(data: dict[str, Any]) -> bytes:
    """Data as the page unpacks it; equal data gives equal bytes. What UTF-8 cannot hold becomes a question mark."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)


def render(data: bytes, title: str) -> bytes:
    """The page.

    Args:
        data: As ``packed`` gave it.
        title: Title of the window.
    """
    style, script = source("page.css"), "\n".join(map(source, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": _escaped(title),
        "STYLE": style,
        "DATA": base64.b64encode(data).decode(),
        "SCRIPT": script,
    }
    # In one pass: no part is looked through for the names of others.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], source("page.html")).encode("utf-8", "replace")


def source(name: str) -> str:
    """A part of the page as it lies in the package."""
    return (files("rllib_nlac.inspector") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
