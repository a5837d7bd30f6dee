"""The page of ``rllib inspect`` and what recording costs: ``python -m benchmarks.inspector``.

Trains the quick start, all 512 transitions of each iteration recorded, until there are 10,000; ``--run`` takes a run that is
there already. Then, in Chromium without a window: the time from opening the file to the first paint and to the list of all
transitions, what a filter takes from its change to the next frame, and the size of the file. Recording: its share of an
iteration's seconds, by ``seconds/record`` in the results, and for the default of 64 transitions the same of a shorter run.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.figures import FILTER_MS, FIRST_PAINT_MS, PAGE_MB, RECORDING, Figure, add_option, hand_over
from rllib_nlac.inspector.bundle import MOST, bundle
from rllib_nlac.inspector.page import packed, render
from rllib_nlac.inspector.run import read_run, trial_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browsed import Page, start_browser

PARTS = ("play", "replay", "waves", "logprob_gap", "learner", "record", "sync")
FILTERS: dict[str, dict[str, str]] = {
    "text, rare": {"text": "whale"},
    "text, common": {"text": "is it"},
    "outcome": {"outcome": "failure"},
    "verdict and order": {"verdict": "no", "sort": "surprise"},
    "iterations and priority": {"iterationLow": "5", "iterationHigh": "15", "priorityLow": "0.1"},
    "none": {},
}
FILTER = """
const started = performance.now(), done = arguments[1];
Object.assign(app.filters, EMPTY, arguments[0]);
app.filtered();
requestAnimationFrame(() => setTimeout(() => done(performance.now() - started)));
"""
PAINT = "return performance.getEntriesByName('first-contentful-paint').map((each) => each.startTime)[0]"


def train(folder: Path, iterations: int, transitions: int) -> tuple[Path, float]:
    """The quick start with so many transitions recorded; its folder, and recording's share of the iterations."""
    import ray
    import yaml

    from rllib_nlac import NLACConfig
    from rllib_nlac.inputs import examples

    logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)
    example = yaml.safe_load(examples.find("twenty_questions_nlac").read_text())["twenty-questions-nlac"]
    keys = {**example["config"], "evaluation_interval": None, "record": {"transitions": transitions}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    config = NLACConfig().environment(example["env"]).update_from_dict(keys)
    algorithm = config.build_algo()
    spent: list[dict[str, float]] = []
    try:
        for _ in range(iterations):
            spent.append(algorithm.train()["seconds"])
            print(f"iteration {len(spent)} of {iterations}", file=sys.stderr)
    finally:
        algorithm.stop()
    own = algorithm.recorder.record.folder.parent  # RLlib's, in the home folder
    run = Path(shutil.move(own, folder / f"run_{transitions}"))
    return run, share(spent)


def share(spent: list[dict[str, float]]) -> float:
    """Recording's share of all iterations but the first, which starts up."""
    later = spent[1:] or spent
    return sum(own.get("record", 0.0) for own in later) / sum(own.get(part, 0.0) for own in later for part in PARTS)


def measure(page: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what was done, of each round."""
    driver = start_browser()
    view = Page(driver)
    found: dict[str, list[float]] = {}
    try:
        for _ in range(rounds):
            view.open(f"{page.as_uri()}#view=transitions")
            found.setdefault("first paint", []).append(view.until(PAINT))
            found.setdefault("all transitions listed", []).append(
                float(view.js("return document.documentElement.dataset.ready"))
            )
            for name, filters in FILTERS.items():
                found.setdefault(f"filter: {name}", []).append(driver.execute_async_script(FILTER, filters))
    finally:
        driver.quit()
    return found


def transitions(run: Any) -> int:
    """How many a run has."""
    return sum(line["kind"] == "transition" for line in run.lines)


def options() -> argparse.ArgumentParser:
    """Arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run's folder, instead of training one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=28)
    add_option(parser)
    return parser


def main() -> None:
    arguments = options().parse_args()
    with tempfile.TemporaryDirectory(prefix="inspector_") as scratch:
        folder = Path(scratch)
        if arguments.run is None:
            path, all_ = train(folder, arguments.iterations, 512)
            _, usual = train(folder, 8, 64)
            for what, part in (("64 transitions an iteration (the default)", usual), ("512 transitions an iteration", all_)):
                print(f"recording, {what}: {part:.2%} of an iteration")
                hand_over(arguments.figures, Figure(f"recording, {what}", 100 * part, "% of an iteration", *RECORDING))
        else:
            path = trial_of(arguments.run)
        started = time.perf_counter()
        run = read_run(path)
        page = render(packed(bundle([run])), "benchmark")
        seconds = time.perf_counter() - started
        count = f"{min(transitions(run), MOST)} transitions"
        print(f"{count}: {len(page) / 1e6:.2f} MB, written in {seconds:.1f} s")
        hand_over(arguments.figures, Figure(f"page of {count}", len(page) / 1e6, "MB", *PAGE_MB))
        file = folder / "page.html"
        file.write_bytes(page)
        for name, values in measure(file, arguments.rounds).items():
            median = statistics.median(values)
            print(f"{name}: median {median:.0f} ms, slowest {max(values):.0f} ms")
            goal = FIRST_PAINT_MS if name == "first paint" else FILTER_MS if name.startswith("filter") else ()
            hand_over(arguments.figures, Figure(f"page, {name}", median, "ms", *goal))


if __name__ == "__main__":
    main()
