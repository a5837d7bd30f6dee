"""Where MiniWoB++'s pages are: in the installed package ``miniwob``, or in its wheel, which is fetched once.

Only the files are used. The package's Python part asks for a gymnasium that is newer than the one that Ray allows, so pip
refuses to install both, and no extra can name it. Its wheel is therefore fetched by pip, without its dependencies, checked
against the checksum below, and unpacked; nothing in it is ever run outside the browser.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

VERSION = "1.1.0"
SHA256 = "297006e84219d56ad037e843527ed773a4a82509dc43b6031ec4a3ad3e3e61d9"
INSTALL = f"pip install --no-deps miniwob=={VERSION}"
FETCH_S = 120


def folder() -> Path:
    """The folder ``html`` of MiniWoB++, in which ``miniwob/NAME.html`` are the pages.

    Raises:
        ValueError: The package is not installed and its wheel cannot be had; the text says what to install.
    """
    # Not importlib.resources, which imports the package, and with it the environment that is not wanted.
    spec = find_spec("miniwob")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(place) / "html" / "core" / "core.js").is_file():
            return Path(place) / "html"
    kept = cache() / f"miniwob-{VERSION}"
    if not (kept / "miniwob" / "html" / "core" / "core.js").is_file():
        _fetch(kept)
    return kept / "miniwob" / "html"


def cache() -> Path:
    """Where the wheel is unpacked."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllib_nlac"


def _fetch(kept: Path) -> None:
    """Fetches the wheel and unpacks it; processes that do so at the same time do not disturb each other."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
            wanted = Path(temporary) / "wanted.txt"
            wanted.write_text(f"miniwob=={VERSION} --hash=sha256:{SHA256}\n")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--no-input"]
            command += ["--disable-pip-version-check", "--require-hashes", "-r", str(wanted), "-d", temporary]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
            if done.returncode:
                raise OSError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:300])
            (wheel,) = Path(temporary).glob("miniwob-*.whl")
            unpacked = Path(temporary) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith("miniwob/html/")])
            if not kept.exists():
                os.rename(unpacked, kept)
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired, zipfile.BadZipFile) as error:
        if kept.exists():
            return  # another process was faster
        raise ValueError(
            f"the environment MiniWoB needs the pages of the package miniwob, and they could not be fetched "
            f"({error!s:.300}): {INSTALL}"
        ) from error
