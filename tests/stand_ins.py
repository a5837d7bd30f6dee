"""What examples with smollm2 need and no test fetches or trains: the shipped small model stands in its places."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from rllib_nlac import NLACConfig
from rllib_nlac.inputs.pretrained import MARK, SMOLLM2, converted_folder

EXAMPLES = Path(__file__).parent.parent / "tuned_examples"
CHAT = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "7"}]


def needed_by_examples() -> set[str]:
    """The files of conversations and the folders of warm-ups that the keys of the examples with smollm2 name."""
    lines = [line for path in EXAMPLES.glob("**/*smollm2*.yaml") for line in path.read_text("utf-8").splitlines()]
    return {name for line in lines if not line.startswith("#") for name in re.findall(r"results/[\w.-]+", line)}


def stand_in_for_smollm2(folder: Path, monkeypatch) -> None:
    """Makes a folder the current one, in which a warm-up has run, with a cache that has the model."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    cached, needed = converted_folder(SMOLLM2), [folder / name for name in needed_by_examples()]
    for place in (cached, *(path for path in needed if path.suffix != ".jsonl")):
        shutil.copytree(NLACConfig().model_path, place)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    sizes = {path.name: path.stat().st_size for path in cached.iterdir()}
    (cached / MARK).write_text(json.dumps({"sizes": sizes}))
    for path in needed:
        if path.suffix == ".jsonl":
            path.write_text(json.dumps({"messages": CHAT}) + "\n")
