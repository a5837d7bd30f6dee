"""The adapter within the learner's model: PEFT puts it there, and it is all that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_nlac.engine.lora import LoRASettings, adapter_name


def add_adapter(lm: torch.nn.Module, settings: LoRASettings, seed: int = 0) -> None:
    """Puts an adapter into a Hugging Face model, B at zero, so that the model is still its base; all else is frozen.

    A is random, and by its seed the same in every learner.
    """
    from peft import LoraConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm.add_adapter(LoraConfig(task_type="CAUSAL_LM", **settings.for_peft()))
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(_is_adapters(name))
    for layer in _dropouts(lm):
        layer.eval()


def has_adapter(lm: torch.nn.Module) -> bool:
    """Whether a model's weights are an adapter over a base."""
    return any(_is_adapters(name) for name, _ in lm.named_parameters())


def served_names(lm: torch.nn.Module) -> dict[str, str]:
    """Names in the engines of all parameters that they are given: the adapter's, or all if there is no adapter."""
    names = [name for name, _ in lm.named_parameters()]
    own = [name for name in names if _is_adapters(name)]
    return {name: adapter_name(name) for name in own} if own else {name: name for name in names}


@contextmanager
def as_base(lm: torch.nn.Module) -> Iterator[None]:
    """Within it the model answers without its adapter."""
    lm.disable_adapters()
    try:
        yield
    finally:
        lm.enable_adapters()


@contextmanager
def with_dropout(lm: torch.nn.Module, draw: Sequence[int]) -> Iterator[None]:
    """Within it the adapter's dropout is at work; elsewhere learner and engine have to agree.

    Args:
        lm: The model.
        draw: What is left out is drawn from these numbers alone, so that a run that goes on leaves out the same.
    """
    layers = _dropouts(lm)
    if not layers:
        yield
        return
    devices = {parameter.device for parameter in lm.parameters()} - {torch.device("cpu")}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(np.random.SeedSequence(draw).generate_state(1, np.uint64)[0]))
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


def check_targets(model: str, settings: LoRASettings) -> None:
    """Looks for every layer that shall have an adapter; only the model's configuration is read.

    Raises:
        ValueError: The model has no such linear layer, or it is the output layer, whose adapter vLLM does not serve.
    """
    if isinstance(settings.target_modules, str):
        return
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    output = lm.get_output_embeddings()
    layers = [name for name, module in lm.named_modules() if isinstance(module, torch.nn.Linear) and module is not output]
    for target in settings.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(
                f"config.lora['target_modules'] has {target!r}, and {model!r} has no such linear layer within it; it has "
                f"{', '.join(known)}"
            )


def _dropouts(lm: torch.nn.Module) -> list[torch.nn.Dropout]:
    return [module for name, module in lm.named_modules() if "lora_dropout" in name and isinstance(module, torch.nn.Dropout)]


def _is_adapters(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
