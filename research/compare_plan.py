"""What ``compare.yaml`` says: worlds, methods, and the training runs that they make together."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rllib_nlac.algorithm.model_defaults import SHIPPED_MODELS
from rllib_nlac.algorithms import OURS, STOCK_ON_TEXT
from rllib_nlac.inputs import plain_yaml
from rllib_nlac.names import nearest

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "tuned_examples"
SEARCH_SEED = 1000  # never among the reported ones


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        world: Name of the world in the plan.
        method: Name of the method, with the candidate's number in a search.
        seed: Seeds everything in it.
        experiment: What ``rllib train`` runs.
    """

    world: str
    method: str
    seed: int
    experiment: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.world} {self.method} {self.seed}".lower())


class Plan:
    """What ``compare.yaml`` says.

    Args:
        path: The file: ``worlds``, ``methods``, ``search``, ``runs`` and ``quick``.
        models: Where the models are built that a world names and the package does not ship.
    """

    def __init__(self, path: Path, models: Path) -> None:
        self.models = models.absolute()
        self._plan = plain_yaml.read(path)
        for key in ("worlds", "methods"):
            if not isinstance(self._plan, dict) or not self._plan.get(key):
                raise ValueError(f"{path} is no plan: it has no {key!r}")
        self.worlds: dict[str, dict[str, Any]] = self._plan["worlds"]
        self.methods: dict[str, dict[str, Any]] = self._plan["methods"]
        self.summary: list[str] = self._plan.get("summary", [])

    def cells(self, runs: str, worlds: Sequence[str], methods: Sequence[str], seeds: int | None) -> list[Cell]:
        """The cells of "runs" or "quick", those of other worlds and methods left out."""
        cells = [
            self.cell(world, method, seed, episodes=run.get("episodes"))
            for run in self._plan[runs]
            for seed in range(seeds or run["seeds"])
            for world in run["worlds"]
            for method in run["methods"]
            if (not worlds or world in worlds) and (not methods or method in methods)
        ]
        return list({cell.name: cell for cell in cells}.values())

    def search_cells(self, worlds: Sequence[str], methods: Sequence[str]) -> list[Cell]:
        """Every candidate of every method that is searched in a world, each for as many episodes."""
        search = self._plan["search"]
        return [
            self.cell(run["world"], method, SEARCH_SEED, candidate, number, run["episodes"])
            for run in search["runs"]
            for method in run["methods"]
            for number, candidate in enumerate(search["candidates"][method][self.kind(run["world"])], start=1)
            if (not worlds or run["world"] in worlds) and (not methods or method in methods)
        ]

    def select(self, runs: str, worlds: Sequence[str], methods: Sequence[str], seeds: int | None) -> list[Cell]:
        """The cells of "runs", "quick" or "search" that are of these worlds and methods; of all where none are named.

        Raises:
            ValueError: There are none.
        """

        def cells(worlds: Sequence[str], methods: Sequence[str]) -> list[Cell]:
            return self.search_cells(worlds, methods) if runs == "search" else self.cells(runs, worlds, methods, seeds)

        if runs not in self._plan:
            raise ValueError(f"the plan has no {runs!r}; it has {', '.join(self._plan)}")
        found = cells(worlds, methods)
        if not found:
            every = cells([], [])
            known = sorted({cell.world for cell in every})
            for world in worlds:
                if world not in known:
                    near = nearest(world, known)
                    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
                    raise ValueError(f"no run of {runs!r} is in the world {world!r}; {hint}")
            beside = sorted({cell.method.partition(" #")[0] for cell in every if not worlds or cell.world in worlds})
            raise ValueError(f"no run of {runs!r} is of {asked_for(worlds, methods)}; there are {', '.join(beside)}")
        return found

    def kind(self, world: str) -> str:
        """The tuned examples that a world goes by: "twenty_questions", "text_house".

        Candidates are for a kind, and so is what was chosen, where the world has no choice of its own.
        """
        return self.worlds.get(world, {}).get("like", world)

    def cell(
        self,
        world: str,
        method: str,
        seed: int,
        candidate: dict[str, Any] | None = None,
        number: int = 0,
        episodes: int | None = None,
    ) -> Cell:
        """A method's tuned example, in another world where that is one, with the changes that the plan names."""
        place, settings = self.worlds[world], self.methods[method]
        kind = self.kind(world)
        examples = [EXAMPLES / f"{name}_{settings['file']}.yaml" for name in (kind, "twenty_questions")]
        experiment = copy.deepcopy(_example(next(path for path in examples if path.is_file())))
        chosen = settings.get("chosen", {})
        chosen = chosen.get(world, chosen.get(kind, {})) if candidate is None else {}
        config = {
            **experiment["config"],
            **place.get("config", {}),
            **settings.get("by_world", {}).get(kind, {}),
            **chosen,
            **settings.get("config", {}),
            **(candidate or {}),
            "seed": seed,
            "num_cpus_for_main_process": 1,
        }
        if "build" in place:
            spoken_to = spoken_to_as(config["language_model"], settings.get("run", experiment["run"]))
            config = {**spoken_to, **config, "language_model": str(self.models / world)}
        if "env_config" in settings:
            config["env_config"] = {**config["env_config"], **settings["env_config"]}
        stop = experiment["stop"]
        if "evaluation_interval" in config and "own_stop" not in settings:  # all but prompting alone and logged dialogues
            per_iteration = config.get("episodes_per_iteration") or (
                config["train_batch_size_per_learner"] / config["env_config"]["max_turns"]
            )
            every = settings.get("evaluate_every", place["evaluate_every"])
            config["evaluation_interval"] = max(1, round(every / per_iteration))
            stop = {"env_runners/num_episodes_lifetime": (episodes or place["episodes"]) * settings.get("longer", 1)}
        experiment = {
            **experiment,
            "run": settings.get("run", experiment["run"]),
            "stop": stop,
            "config": config,
            "checkpoint_config": {"checkpoint_frequency": 8, "num_to_keep": 1, "checkpoint_at_end": True},
        }
        if "env" in place:
            experiment["env"] = place["env"]
        return Cell(world, f"{method} #{number}" if number else method, seed, experiment)


@functools.cache
def _example(path: Path) -> dict[str, Any]:
    (experiment,) = yaml.safe_load(path.read_text(encoding="utf-8")).values()
    return experiment


@functools.cache
def spoken_to_as(shipped: str, run: str) -> dict[str, Any]:
    """The keys by which an algorithm speaks to a model as to the shipped one in whose place it is: a folder has none."""
    config = {**OURS, **STOCK_ON_TEXT}[run].get_default_config()
    defaults = asdict(SHIPPED_MODELS[shipped])
    return {key: value for key, value in defaults.items() if key != "folder" and hasattr(config, key)}


def asked_for(worlds: Sequence[str], methods: Sequence[str]) -> str:
    """What was selected, in words."""
    return f"the worlds {', '.join(worlds) or 'of the plan'} and the methods {', '.join(methods) or 'of the plan'}"
