"""Times and sizes of checkpoints, and the memory of a long run.

    python -m benchmarks.checkpoints                   # save, save again, restore, export; what is in a checkpoint
    python -m benchmarks.checkpoints --iterations 500  # also the resident set over so many quick iterations

The replay buffer is filled with ``--transitions`` transitions of the base model's own games first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ray

from rllib_nlac import NLACConfig
from rllib_nlac.checkpoints.checkpoint import export_model, read_manifest


def resident_mib() -> float:
    """Resident set of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quick_config() -> NLACConfig:
    """An iteration of a fraction of a second: 4 episodes, 16 transitions, one gradient step."""
    return (
        NLACConfig()
        .environment("TwentyQuestions", env_config={"num_objects": 16, "num_attributes": 8, "max_turns": 6})
        .env_runners(num_envs_per_env_runner=32, episodes_per_iteration=4)
        .training(lr=1e-4, train_batch_size_per_learner=16, minibatch_size=16, replay_buffer_config={"capacity": 20_000})
        .debugging(seed=0)
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def sizes(folder: Path) -> Counter[str]:
    """Bytes by the part of a checkpoint."""
    parts: Counter[str] = Counter()
    for file in folder.rglob("*"):
        if file.is_file():
            parts[file.relative_to(folder).parts[0]] += file.stat().st_size
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transitions", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.transitions > (capacity := quick_config().replay_settings.capacity):
        parser.error(f"--transitions must be at most {capacity:,}: the buffer keeps no more")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    algorithm = quick_config().build_algo()
    if arguments.iterations:
        warm_up = min(50, arguments.iterations)
        for number in range(1, arguments.iterations + 1):
            algorithm.train()
            if number == warm_up:
                before = resident_mib()
            if number % max(arguments.iterations // 10, 1) == 0:
                print(f"iteration {number:4d}: resident set {resident_mib():7.0f} MiB", flush=True)
        after = resident_mib()
        print(
            f"from iteration {warm_up} to {arguments.iterations}: {before:.0f} to {after:.0f} MiB ({after / before - 1:+.1%})"
        )
    buffer = algorithm.local_replay_buffer  # type: ignore[attr-defined]
    while buffer.get_num_timesteps() < arguments.transitions:
        buffer.add(algorithm.env_runner.sample(num_episodes=256))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"a checkpoint with {buffer.get_num_timesteps()} transitions in {buffer.get_num_episodes()} episodes")
        print(f"  first save           {timed(lambda: algorithm.save_to_path(folder / 'a')):6.2f} s")
        buffer.add(algorithm.env_runner.sample(num_episodes=32))
        print(f"  save, 32 episodes on {timed(lambda: algorithm.save_to_path(folder / 'b')):6.2f} s")
        print(f"  restore              {timed(lambda: algorithm.restore_from_path(folder / 'b')):6.2f} s")
        print(f"  export               {timed(lambda: export_model(folder / 'b', folder / 'model')):6.2f} s")
        parts = sizes(folder / "b")
        seconds = timed(lambda: read_manifest(folder / "b"))
        speed = sum(parts.values()) / 2**20 / seconds
        print(f"  of each, checksums   {seconds:6.2f} s, {speed:.0f} MiB/s; a restore takes them twice")
        print(
            f"  size                 {sum(parts.values()) / 2**20:6.2f} MiB: "
            + ", ".join(f"{name} {size / 2**20:.2f}" for name, size in parts.most_common(4))
        )
        linked = sum(file.stat().st_size for file in (folder / "b" / "replay_buffer").iterdir() if file.stat().st_nlink > 2)
        print(f"  of the buffer        {linked / 2**20:6.2f} MiB are links to files of the save before")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
