"""What a weight sync and a swap cost across processes: ``python -m benchmarks.sync [--hidden 1024] [--layers 8]``.

With all weights by each way, one after the other, and with adapters over one base, which the engine serves apart or merged
(``--rank 16``; 0 leaves them out, ``--only-adapters`` the former, which take several times as much memory).

A learner and a vLLM engine, each an actor of its own unless the way is ``in_process``, and a model of random weights between
the small one that is shipped and those that people train. Beside them, in the same run, one plain copy of the same bytes into
memory that is in use already. Nothing is asserted.
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

from benchmarks.figures import SYNC as GOAL
from benchmarks.figures import Figure, add_option, hand_over
from benchmarks.learner import seconds
from rllib_nlac import NLACConfig
from rllib_nlac.engine.weight_transfer import Way
from rllib_nlac.types import Request, Weights

SYNC = "sync of policy and target, verified"
SWAP = "one set after the other, verified"
COPY = "one copy of the model in memory"
LABEL = "sync of policy and target {}, beside one copy of the model in memory"
WAYS = (Way.OBJECT_STORE, Way.IN_PROCESS)  # between GPUs see ``benchmarks.gpu``


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


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only-adapters", action="store_true")
    add_option(parser)
    return parser


def main() -> None:
    arguments = options().parse_args()
    config = (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .language(language_model="tiny", prompts="compact", max_action_tokens=12)
        .learners(num_learners=1)
        .engines(num_engines=1, engine_config={"timeout_s": 600})
        .fault_tolerance(learner_snapshot_interval=0)
        .debugging(seed=0)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        size = build(config.model_path, folder, arguments.hidden, arguments.layers)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        config.language(language_model=str(folder))
        where = "learner and engine in processes of their own unless in_process"
        print(f"{size:,} parameters in float32, {4 * size / 2**30:.2f} GiB, {where}")
        for way in WAYS if not arguments.only_adapters else ():
            print(f"with all weights by {way}")
            own = config.copy(copy_frozen=False)
            if way is Way.IN_PROCESS:
                own.learners(num_learners=0).engines(num_engines=0)
            ratio = measure(own, size, arguments.rounds)
            if way is Way.OBJECT_STORE:
                hand_over(arguments.figures, Figure(LABEL.format("with all weights"), ratio, "", *GOAL))
        for serving in ("adapter", "merged") if arguments.rank else ():
            what = f"with adapters of rank {arguments.rank}, lora_serving: {serving}"
            print(what)
            own = config.copy(copy_frozen=False).language(lora={"rank": arguments.rank})
            own.engines(engine_config={**config.engine_config, "lora_serving": serving})
            hand_over(arguments.figures, Figure(LABEL.format(what), measure(own, size, arguments.rounds), ""))
    ray.shutdown()


def figures(config: NLACConfig, num_bytes: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """What one configuration takes. A sync that is not verified, by checksums of what the engine serves, is an error.

    Args:
        config: Says where learner and engine are.
        num_bytes: Bytes of the model, of which a copy is made beside it.
        rounds: How often.

    Returns:
        Seconds of each round by what was done, and the bytes of a sync.
    """
    algorithm = config.build_algo()
    block = torch.ones(num_bytes, dtype=torch.uint8)
    beside = block.clone()  # or most of the time would go to the system, which gives fresh memory page by page
    ask = [Request((5, 6, 7), 1, seed=0, weights=Weights.TARGET)]
    found: dict[str, list[float]] = {SYNC: [], SWAP: [], COPY: []}
    for _ in range(rounds):
        found[SYNC].append(seconds(algorithm.sync_weights))
        changed = seconds(lambda: algorithm.engine.generate(ask))
        found[SWAP].append(changed - seconds(lambda: algorithm.engine.generate(ask)))
        found[COPY].append(seconds(lambda: beside.copy_(block)))
    sent = int(algorithm.metrics.peek(("sync", "num_bytes")))
    failed = config.transfer.backend and not algorithm.engine.transfer
    algorithm.stop()
    if failed:
        raise RuntimeError(f"vLLM's transfer of weights ({config.transfer}) failed; see the log")
    return found, sent


def measure(config: NLACConfig, size: int, rounds: int) -> float:
    """Prints the seconds of a sync and a swap of one configuration, and of a copy of as many bytes as the model has.

    Returns:
        A sync's seconds in such copies, the median of the rounds.
    """
    found, sent = figures(config, 4 * size, rounds)
    print(f"  {sent / 2**20:.1f} MiB a sync")
    for name, values in found.items():
        print(f"  {name:35}   {statistics.median(values):7.3f} s   ({min(values):.3f} to {max(values):.3f})", flush=True)
    return statistics.median(sync / copy for sync, copy in zip(found[SYNC], found[COPY], strict=True))


if __name__ == "__main__":
    main()
