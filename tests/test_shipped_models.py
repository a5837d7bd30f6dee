"""The shipped models do what they were trained for. ``shipped_models.jsonl`` holds examples of another seed than training's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_nlac import NLACConfig

EXAMPLES = [json.loads(line) for line in Path(__file__).with_name("shipped_models.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["tiny", "tiny_house"])
def test_a_shipped_model_knows_its_roles(name):
    """Greedily, by Transformers: a second vLLM engine would cost more than the answer is worth."""
    folder = NLACConfig().language(language_model=name).model_path
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = [example for example in EXAMPLES if example["model"] == name]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in example["messages"]],
            add_generation_prompt=True,
            tokenize=False,
        )
        for example in own
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(**batch, max_new_tokens=48, do_sample=False)[:, batch["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for role in ("backup", "refine", "evaluate"):
        # The house's advice was drawn at random, so nobody can know it.
        exact = [
            (answer.partition("\nFix: ")[0] if name == "tiny_house" else answer) == example["answer"]
            for answer, example in zip(answers, own, strict=True)
            if example["role"] == role
        ]
        assert len(exact) == 24 and sum(exact) / 24 >= 0.85, role
    assert (Path(folder) / "MODEL_CARD.md").is_file()


def test_words_of_the_world_are_single_tokens(chat):
    for word in (" dog", " alive", " left", " SUCCESS", "Optimal", "Future", " few"):
        assert len(chat.tokenizer.encode(word, add_special_tokens=False)) == 1, word
