"""Looks at a model's folder before anything is started: whether all files are there, whole, and fit each other.

Only headers of the weights are read, so that this takes no longer for a large model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rllib_nlac.engine.places import computes_in_bfloat16

# A tokenizer has one of these; without any Transformers makes up one that knows next to nothing.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")
INDEX = "model.safetensors.index.json"


def read_config(model: str) -> PreTrainedConfig:
    """The configuration of a model that writes text from left to right.

    Raises:
        ValueError: config.json cannot be read, or the model is of another kind.
    """
    path = Path(model)
    if path.is_dir():
        try:
            read = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'} is no valid JSON ({error}): copy the model again") from None
        if not isinstance(read, dict) or "model_type" not in read:
            raise ValueError(f"{path / 'config.json'} has no 'model_type', so it is no model's: copy the model again")
    try:
        config = AutoConfig.from_pretrained(model)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the configuration of {model!r} cannot be used: {error}") from error
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    classes = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "unknown")]
    if config.is_encoder_decoder or not known & set(classes):
        raise ValueError(
            f"the model {model!r} is a {', '.join(classes)} ({config.model_type}), which does not write text from left to "
            "right: take a causal language model, as Qwen2ForCausalLM"
        )
    return config


def suits_bfloat16(model: str) -> bool:
    """Whether a model is held in bfloat16 on this machine's processor: that computes in it, and the weights are saved in it.

    False where nobody knows how they are saved.
    """
    try:
        return computes_in_bfloat16() and AutoConfig.from_pretrained(model).dtype == torch.bfloat16
    except (OSError, ValueError):  # it is on a hub that cannot be reached; who loads it will say so
        return False


def precision(model: str, asked: str, on_gpu: bool) -> str:
    """The precision in which vLLM computes.

    Args:
        model: A Hugging Face folder or name.
        asked: As ``engine_config`` has it; "auto" chooses by device and model.
        on_gpu: Whether the engine has a GPU.
    """
    if asked != "auto":
        return asked
    return "bfloat16" if on_gpu or suits_bfloat16(model) else "float32"


def check_tokenizer_files(path: Path) -> None:
    """Says that a model's folder has no tokenizer.

    Raises:
        FileNotFoundError: None of the files is there that a tokenizer can be read from.
    """
    if not _has_tokenizer(path):
        raise FileNotFoundError(
            f"no tokenizer in {str(path)!r}: it has none of {', '.join(TOKENIZER_FILES)}. Copy the tokenizer's files there, "
            "as by AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"
        )


def _has_tokenizer(path: Path) -> bool:
    return any(next(path.glob(name), None) for name in TOKENIZER_FILES)


def num_ids(model: str) -> int | None:
    """Number of ids that stand for text, up to the largest of the tokenizer; None where a folder has no tokenizer.

    Many models have more rows, so that their number divides well. An id of such a row decodes to nothing: a policy that says
    it loses its turn and nobody sees why. So engine and learner leave these ids out of the distribution, both, for else their
    log-probabilities would differ. A learner that kept them would also push them up, unseen, where it pushes others down.
    """
    if Path(model).is_dir() and not _has_tokenizer(Path(model)):
        return None
    return _largest_id(AutoTokenizer.from_pretrained(model)) + 1


def _largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=0)


def check_vocabulary(model: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Says that a tokenizer is not the model's.

    Raises:
        ValueError: It makes ids that the model has no embedding for.
    """
    largest, rows = _largest_id(tokenizer), config.get_text_config().vocab_size
    if largest >= rows:
        raise ValueError(
            f"the tokenizer of {model!r} makes ids up to {largest}, and the model knows {rows} (vocab_size in config.json): "
            "take the tokenizer that belongs to it, or enlarge the model's embeddings (resize_token_embeddings)"
        )


def check_weights(path: Path) -> None:
    """Reads the headers of the weights.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is cut off or damaged, or its embeddings are not as many as config.json says.
    """
    rows = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    for name, shape in weight_shapes(path).items():
        if name.endswith(EMBEDDINGS) and len(shape) == 2 and "position" not in name and shape[0] != rows:
            raise ValueError(
                f"{path}: {name} has {shape[0]} rows, and vocab_size in config.json is {rows}: config and weights are of "
                "different models"
            )


def weight_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a model's safetensors files, by their names; none where it has weights of the older kind.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is cut off or damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, which {INDEX} names: copy the model again")
        try:
            with safe_open(file, framework="pt") as weights:
                names = weights.keys()
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} ({file.stat().st_size:,} bytes) is cut off or damaged ({error}): copy the model again; where it came "
                "through git, by `git lfs pull`"
            ) from None
    return shapes


def _weight_files(path: Path) -> Iterator[Path]:
    """The safetensors files of a model; none where it has weights of the older kind."""
    if (path / "model.safetensors").exists():
        yield path / "model.safetensors"
    elif (path / INDEX).is_file():
        try:
            index: dict[str, Any] = json.loads((path / INDEX).read_text(encoding="utf-8"))
            yield from (path / name for name in sorted(set(index["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is no index of weights ({error!r}): copy the model again") from None
    elif not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise FileNotFoundError(f"no weights in {str(path)!r}: it has no *.safetensors and no pytorch_model*.bin")
