"""What examples with smollm2 need and no test fetches or trains: the shipped small model stands in its places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rllib_nlac import NLACConfig
from rllib_nlac.inputs.pretrained import MARK, SMOLLM2, converted_folder

TASKS = ("guess-number", "guess-number-tools", "twenty-questions")  # of the examples with smollm2
CHAT = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "7"}]


def stand_in_for_smollm2(folder: Path, monkeypatch) -> None:
    """Makes a folder the current one, in which a warm-up has run, with a cache that has the model."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    cached = converted_folder(SMOLLM2)
    for place in (
        cached,
        *(folder / "results" / f"{task}-smollm2-sft" for task in TASKS),
    ):
        shutil.copytree(NLACConfig().model_path, place)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    sizes = {path.name: path.stat().st_size for path in cached.iterdir()}
    (cached / MARK).write_text(json.dumps({"sizes": sizes}))
    for task in TASKS:
        (folder / "results" / f"{task.replace('-', '_')}.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
