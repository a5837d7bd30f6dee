"""How a model answers the critic's roles: how many answers parse, free and structured, and whether they say what is right.

    rllib env expert GuessNumber --episodes 200 --skill 0.4 --seed 77 --out results/test.jsonl
    python -m benchmarks.roles smollm2 results/test.jsonl --env GuessNumber
    python -m benchmarks.roles results/guess-number-smollm2-sft results/test.jsonl --env GuessNumber

The prompts of the file are asked as they stand, so each prompt set needs a file of its own (``--prompts`` of both commands).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.checkpoints.start import starting_point
from rllib_nlac.engine.chat import Chat
from rllib_nlac.engine.vllm_engine import VLLMEngine
from rllib_nlac.engine.vllm_settings import VLLMSettings
from rllib_nlac.language.prompts import load_prompts
from rllib_nlac.types import Message, Request

TEMPERATURES = {"predict": 1.0, "backup": 0.0, "evaluate": 0.0, "refine": 0.0}
COLUMNS = ("role", "asked", "parsed, free", "parsed, structured", "right", "what is right")


def rows_by_role(file: Path, most: int) -> dict[str, list[dict[str, Any]]]:
    """The conversations of each role, at most so many."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if len(found[row["kind"]]) < most:
            found[row["kind"]].append(row)
    return found


def asked(
    engine: VLLMEngine, chat: Chat, rows: Sequence[dict[str, Any]], temperature: float, room: int, pattern: str | None
) -> list[str]:
    """What the engine says to the prompts of conversations; empty where an answer was cut off."""
    requests = [
        Request(
            chat.prompt_ids([Message(m["role"], m["content"]) for m in row["messages"][:-1]]),
            room,
            temperature,
            seed=number,
            logprobs=False,
            pattern=pattern,
        )
        for number, row in enumerate(rows)
    ]
    return [chat.said(g) if g.finished else "" for g in engine.generate(requests)]


def measured(engine: VLLMEngine, chat: Chat, forms: Any, role: str, rows: Sequence[dict[str, Any]], room: int) -> list[str]:
    """A row of the table."""
    form = {"predict": forms.future, "backup": forms.future, "evaluate": forms.critique}.get(role)
    free = asked(engine, chat, rows, TEMPERATURES[role], room, None)
    if form is None:
        truth = [row["messages"][-1]["content"] for row in rows]
        right = sum(a == b for a, b in zip(free, truth, strict=True)) / len(rows)
        return [role, str(len(rows)), f"{sum(map(bool, free)) / len(rows):.2f}", "-", f"{right:.2f}", "the expert's action"]
    held = asked(engine, chat, rows, TEMPERATURES[role], room, form.pattern(room))
    parsed = [sum(form.parse(text) is not None for text in texts) / len(rows) for texts in (free, held)]
    said = [form.parse(text) for text in held]
    truth = [form.parse(row["messages"][-1]["content"]) for row in rows]
    if role == "evaluate":
        right = sum(s is not None and s.optimal == t.optimal for s, t in zip(said, truth, strict=True)) / len(rows)
        what = "the expert's verdict"
    elif role == "backup":
        right = sum(s == t for s, t in zip(said, truth, strict=True)) / len(rows)
        what = "begins with the reply, keeps the outcome"
    else:
        predicted = sum(s is not None and s.success for s in said) / len(rows)
        came = sum(t.success for t in truth) / len(rows)
        return [
            role,
            str(len(rows)),
            *(f"{rate:.2f}" for rate in parsed),
            f"{predicted:.2f}",
            f"success predicted; {came:.2f} came",
        ]
    return [role, str(len(rows)), *(f"{rate:.2f}" for rate in parsed), f"{right:.2f}", what]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as language_model")
    parser.add_argument("file", type=Path, help="conversations that the model was not trained on")
    parser.add_argument("--env", default=None)
    parser.add_argument("--prompts", default="small", help="the set that worded the file")
    parser.add_argument("--most", type=int, default=96, help="conversations of each role")
    parser.add_argument("--room", type=int, default=64, help="tokens of an answer")
    given = parser.parse_args()
    config = LanguageConfig().language(language_model=starting_point(given.model))
    chat = Chat.from_pretrained(config.model_path, 1024)
    engine = VLLMEngine(config.model_path, 1024, list(chat.end_ids), VLLMSettings(max_num_seqs=64))
    forms = load_prompts(given.prompts, given.env).forms
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for role, rows in rows_by_role(given.file, given.most).items():
        if role in TEMPERATURES:
            print(f"| {' | '.join(measured(engine, chat, forms, role, rows, given.room))} |", flush=True)


if __name__ == "__main__":
    main()
