"""A model's folder that cannot work is refused by the configuration, before Ray starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rllib_nlac import NLACConfig
from rllib_nlac.baselines.react import ReActConfig
from rllib_nlac.engine import model_folder
from rllib_nlac.engine.model_folder import precision

WEIGHTS = "model.safetensors"


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def larger_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(9)])
    tokenizer.save_pretrained(folder)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def fewer_embeddings(folder: Path) -> None:
    state = load_file(folder / WEIGHTS)
    state = {name: value[:-7].contiguous() if "embed_tokens" in name else value for name, value in state.items()}
    save_file(state, folder / WEIGHTS)


def lost_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


BROKEN = {
    "no tokenizer": (without_tokenizer, "no tokenizer in"),
    "damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{garbage"), "tokenizer of .* cannot be read"),
    "tokenizer of a larger model": (larger_tokenizer, r"makes ids up to 544, and the model knows 536 \(vocab_size"),
    "no chat template": (without_template, "has no chat template"),
    "damaged config": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "qw'),
        "config.json is no valid",
    ),
    "config of nothing": (lambda folder: (folder / "config.json").write_text("{}"), "has no 'model_type'"),
    "unknown kind": (lambda folder: edit(folder, model_type="nonsense"), "configuration of .* cannot be used.*nonsense"),
    "encoder": (lambda folder: edit(folder, model_type="bert", architectures=["BertForMaskedLM"]), "BertForMaskedLM.*left to"),
    "encoder and decoder": (lambda folder: edit(folder, model_type="t5", architectures=None), "t5.*left to right"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights in"),
    "weights cut off": (truncate, r"model.safetensors \([\d,]+ bytes\) is cut off or damaged"),
    "a pointer of git": (lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs"), "git lfs pull"),
    "a file lost": (lost_shard, "model-00002-of-00002.safetensors is missing"),
    "weights of another model": (fewer_embeddings, "has 529 rows, and vocab_size in config.json is 536"),
}


@pytest.fixture()
def folder(model_path, tmp_path) -> Path:
    return Path(shutil.copytree(model_path, tmp_path / "model"))


@pytest.mark.parametrize(("damage", "complaint"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_said(config, folder, damage, complaint):
    config.language(language_model=str(folder)).validate()
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as found:
        config.validate()
    assert str(folder) in str(found.value)


def test_no_weights_are_loaded_for_it(config, folder, monkeypatch):
    for name in ("load", "empty", "frombuffer"):
        monkeypatch.setattr(torch, name, None)
    config.language(language_model=str(folder)).validate()


def test_behind_an_endpoint_only_the_tokenizer_is_needed(folder):
    config = ReActConfig().environment("TwentyQuestions").language(language_model=str(folder), prompts="compact")
    config.training(endpoint={"base_url": "http://localhost:1/v1", "model": "m"})
    (folder / WEIGHTS).unlink()
    config.validate()
    with pytest.raises(FileNotFoundError, match="no weights"):
        config.training(endpoint={}).validate()


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_a_cpu_takes_bfloat16_where_it_computes_in_it_and_the_model_is_saved_in_it(
    model_path, tmp_path, monkeypatch, computes, saved
):
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    edit(folder, dtype=saved)
    monkeypatch.setattr(model_folder, "computes_in_bfloat16", lambda: computes)
    expected = "bfloat16" if computes and saved == "bfloat16" else "float32"
    assert (
        precision(str(folder), "auto", on_gpu=False) == expected and precision(str(folder), "auto", on_gpu=True) == "bfloat16"
    )
    assert precision(str(folder), "float32", on_gpu=True) == "float32"
    config = NLACConfig().language(language_model=str(folder))
    assert config.held_model.dtype == expected
    assert config.language(learner_model={"dtype": "float32"}).held_model.dtype == "float32"
    config.language(learner_model={}).learners(num_gpus_per_learner=1)
    assert config.held_model.dtype == "float32"  # as before; a GPU's learner is asked for bfloat16
    assert precision("nobody/knows", "auto", on_gpu=False) == "float32"
