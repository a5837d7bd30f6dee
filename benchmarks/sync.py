"""What a weight sync and a swap cost across processes: ``python -m benchmarks.sync [--hidden 1024] [--layers 8]``.

A learner and a vLLM engine, each an actor of its own, and a model of random weights between the small one that is shipped and
those that people train. Beside them, in the same run, one plain copy of the same bytes in memory. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.learner import seconds
from rllib_nlac import NLACConfig
from rllib_nlac.tiny.worlds import TWENTY_QUESTIONS
from rllib_nlac.types import Request, Weights


def build(source: str, folder: Path, hidden: int, layers: int) -> int:
    """A model like the shipped one, of that width and depth; returns its number of parameters."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size = hidden, 4 * hidden
    config.num_attention_heads = config.num_key_value_heads = hidden // 32
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = (
        NLACConfig()
        .environment("TwentyQuestions", env_config=TWENTY_QUESTIONS.env_config)
        .language(language_model="tiny", prompts="compact", max_action_tokens=12)
        .learners(num_learners=1)
        .engines(num_engines=1, engine_timeout_s=600)
        .fault_tolerance(learner_snapshot_interval=0)
        .debugging(seed=0)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        size = build(config.model_path, folder, arguments.hidden, arguments.layers)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        algorithm = config.language(language_model=str(folder)).build_algo()
        block = torch.zeros(size)
        ask = [Request((5, 6, 7), 1, seed=0, weights=Weights.TARGET)]
        syncs, swaps, copies = [], [], []
        for _ in range(arguments.rounds):
            syncs.append(seconds(algorithm.sync_weights))
            changed = seconds(lambda: algorithm.engine.generate(ask))
            swaps.append(changed - seconds(lambda: algorithm.engine.generate(ask)))
            copies.append(seconds(block.clone))
        algorithm.stop()
    ray.shutdown()
    print(f"{size:,} parameters in float32, {4 * size / 2**30:.2f} GiB, learner and engine in processes of their own")
    for name, values in (
        ("sync of policy and target, verified", syncs),
        ("swap of one for the other, verified", swaps),
        ("one copy of as many bytes in memory", copies),
    ):
        print(f"  {name}   {statistics.median(values):7.3f} s   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
