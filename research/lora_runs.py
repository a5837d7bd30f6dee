"""A tuned example with all weights and with adapters, side by side: ``python -m research.lora_runs [--ranks 0 16]``.

Every run is one example with another ``lora``, learning rate and seed and nothing else changed, in a process of its own, one
after the other; rank 0 trains all weights. With ``--record`` runs that have finished are not repeated. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", default="twenty_questions_nlac", help="a file of tuned_examples")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 16], help="0 trains all weights")
    parser.add_argument("--lr", type=float, nargs="+", default=[], help="of each rank; else the example's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, help="of a run; else the example's")
    parser.add_argument("--serving", default="auto", help="lora_serving of engine_config")
    parser.add_argument("--record", type=Path, help="JSON lines, one a run")
    arguments = parser.parse_args()
    if len(arguments.lr) > len(arguments.ranks):
        parser.error(f"{len(arguments.lr)} of --lr for {len(arguments.ranks)} of --ranks: give each rank one")
    rates = [*arguments.lr, *[None] * (len(arguments.ranks) - len(arguments.lr))]
    ways = list(dict.fromkeys(zip(arguments.ranks, rates, strict=True)))
    common = {"example": arguments.example, "episodes": arguments.episodes, "serving": arguments.serving}
    done: dict[tuple[int, float | None], list[dict[str, Any]]] = {way: [] for way in ways}
    for seed in arguments.seeds:  # the ways in turn, so that whatever else the machine does meets all of them
        for rank, lr in ways:
            done[rank, lr].append(finished(arguments.record, {**common, "rank": rank, "lr": lr, "seed": seed}))
    for own in done.values():
        report(own)


def finished(record: Path | None, asked: dict[str, Any]) -> dict[str, Any]:
    """What a run came to, from the record where it is there."""
    if record is not None and record.exists():
        for line in record.read_text().splitlines():
            with contextlib.suppress(ValueError):  # of half a line, which is left by a command that was killed
                if (known := json.loads(line)).items() >= asked.items():
                    return known
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = asked | pool.apply(run, (asked,))
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Trains and returns the figures of a run."""
    import ray

    from rllib_nlac.algorithms import OURS
    from rllib_nlac.command.experiment import load_experiments

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    (example,) = load_experiments(EXAMPLES / f"{asked['example']}.yaml")
    config = OURS[example.run].get_default_config().update_from_dict(example.config)
    config.debugging(seed=asked["seed"])
    if asked["rank"]:
        config.language(lora={"rank": asked["rank"]})
        config.engines(engine_config={**config.engine_config, "lora_serving": asked["serving"]})
    if asked["lr"] is not None:
        config.training(lr=asked["lr"])
    episodes = asked["episodes"] or example.stop["env_runners/num_episodes_lifetime"]
    algorithm = config.build_algo()
    results = [algorithm.train() for _ in range(episodes // config.episodes_per_iteration)]
    algorithm.stop()
    ray.shutdown()
    last, later = results[-1], results[1:]  # the first one's time holds what is compiled and read once
    curve = [
        r["evaluation"]["env_runners"]["success_rate"]
        for r in results
        if r["training_iteration"] % config.evaluation_interval == 0
    ]
    if not curve:
        first = config.evaluation_interval * config.episodes_per_iteration
        raise SystemExit(f"--episodes {episodes} ends before the first evaluation: give at least {first}")
    own = ("play", "replay", "waves", "logprob_gap", "learner", "sync")
    waves = [result["language_stages"]["num_generated_tokens"] / result["seconds"]["waves"] for result in later]
    return {
        "success": curve[-1],
        "iteration_s": statistics.median(sum(result["seconds"].get(part, 0.0) for part in own) for result in later),
        "waves_tokens_per_s": statistics.median(waves),
        "learner_s": statistics.median(result["seconds"]["learner"] for result in later),
        "sync_ms": 1e3 * statistics.median(result["sync"]["time_s"] for result in later),
        "kl_to_base": last.get("kl_to_base"),
        "curve": curve,
    }


def report(done: list[dict[str, Any]]) -> None:
    """Prints one way to train, its seeds together."""
    success = np.array([each["success"] for each in done])
    spread = f"{success.std(ddof=1):.3f}" if len(success) > 1 else "-"
    names = ("waves_tokens_per_s", "iteration_s", "learner_s", "sync_ms")
    speed, whole, learner, sync = (statistics.median(each[name] for each in done) for name in names)
    rank, lr = done[0]["rank"], done[0]["lr"]
    print(f"{f'rank {rank}' if rank else 'all weights'}, lr {'of the example' if lr is None else lr}")
    print(f"  success {success.mean():.3f}, deviation {spread} ({', '.join(f'{value:.3f}' for value in success)})")
    print(f"  {speed:,.0f} tokens/s in waves, {whole:.1f} s an iteration, of which learner {learner:.1f} s, sync {sync:.0f} ms")
    if moved := [each["kl_to_base"] for each in done if each["kl_to_base"] is not None]:
        print(f"  kl_to_base {statistics.mean(moved):.3f}", flush=True)


if __name__ == "__main__":
    main()
