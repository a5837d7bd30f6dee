"""Sweeps in YAML: search spaces, schedulers, search algorithms and loggers, each by the name that Tune has for it.

lr: {loguniform: [1.0e-4, 1.0e-2]}        any function of ``ray.tune`` that makes a search space
num_futures: {choice: [1, 2, 4]}
tau: {grid_search: [0.01, 0.1]}
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray import tune
from ray.tune import TuneError
from ray.tune.schedulers import SCHEDULER_IMPORT, HyperBandScheduler
from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

from rllib_nlac.names import unknown_key

RANGES = ("uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint", "lograndint", "qlograndint")
LISTS = ("grid_search", "choice")
LOGGERS = {
    "wandb": "ray.air.integrations.wandb.WandbLoggerCallback",
    "mlflow": "ray.air.integrations.mlflow.MLflowLoggerCallback",
    "comet": "ray.air.integrations.comet.CometLoggerCallback",
}


class ExperimentError(ValueError):
    """An experiment file or a command line that cannot run; the message names the place and the fix."""


def space_of(value: Any) -> str | None:
    """Name of the search space that a value stands for."""
    if isinstance(value, Mapping) and len(value) == 1 and (name := next(iter(value))) in (*RANGES, *LISTS):
        return name
    return None


def has_spaces(value: Any) -> bool:
    """Whether a value is a search space, or holds one."""
    return space_of(value) is not None or (isinstance(value, Mapping) and any(map(has_spaces, value.values())))


def num_trials(config: Mapping[str, Any], num_samples: int) -> int:
    """How many trials a search makes; 0 where it has no end."""

    def points(value: Any) -> int:
        if space_of(value) == "grid_search":
            return len(value["grid_search"])
        return math.prod(map(points, value.values())) if isinstance(value, Mapping) else 1

    return max(points(config) * num_samples, 0)


def variants(config: Mapping[str, Any], where: str = "config") -> list[dict[str, Any]]:
    """The configuration with each search space replaced by one of its values, the others at their first.

    A list gives all its values, a range its two ends.

    Raises:
        ExperimentError: A search space is malformed.
    """
    return _one_changed({key: _examples(value, f"{where}, {key}") for key, value in config.items()})


def _examples(value: Any, where: str) -> list[Any]:
    name = space_of(value)
    if name in LISTS:
        if not isinstance(value[name], list) or not value[name]:
            raise ExperimentError(f"{where}: {name} needs a list of values, and it has {value[name]!r}")
        return value[name]
    if name in RANGES:
        domain(value, where)
        low, high = value[name][:2]
        # Tune draws up to the upper bound, but for whole numbers that it does not round, where it stops before.
        return [low, high - 1] if name in ("randint", "lograndint") else [low, high]
    if isinstance(value, Mapping):
        return _one_changed({key: _examples(inner, f"{where}/{key}") for key, inner in value.items()})
    return [value]


def _one_changed(examples: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Mappings with the first example of each key, then with another example of one key at a time."""
    first = {key: values[0] for key, values in examples.items()}
    return [first, *({**first, key: other} for key, values in examples.items() for other in values[1:])]


def domain(value: Any, where: str = "config") -> Any:
    """A value with its search spaces as Tune's own objects, also those within mappings.

    Raises:
        ExperimentError: A search space is malformed.
    """
    name = space_of(value)
    if name == "grid_search":
        return dict(value)
    if name == "choice":
        return tune.choice(value[name])
    if name is not None:
        try:
            return getattr(tune, name)(*value[name])
        except (TypeError, ValueError) as error:
            raise ExperimentError(f"{where}: {name} {value[name]!r} is no range: {error}") from error
    if isinstance(value, Mapping):
        return {key: domain(inner, f"{where}/{key}") for key, inner in value.items()}
    return value


def scheduler(
    given: Mapping[str, Any] | str | None, where: str, metric: str | None = None, evaluation_interval: Any = None
) -> Any:
    """Tune's scheduler, as in ``{type: pbt, perturbation_interval: 4, hyperparam_mutations: {lr: [1.0e-3, 1.0e-4]}}``.

    Raises:
        ExperimentError: There is none of that name, or an argument is wrong.
    """
    if given is None:
        return None
    name, arguments = _named(given, where, "scheduler")
    known_names = {**SCHEDULER_IMPORT, "asha": SCHEDULER_IMPORT["async_hyperband"]}
    if name not in known_names:
        raise ExperimentError(f"{where}, scheduler: {unknown_key(name, known_names, 'scheduler')}")
    found = known_names[name]
    cls = found() if inspect.isfunction(found) else found
    known = _parameters(cls, arguments, f"{where}, scheduler")
    if "time_attr" in known:
        arguments.setdefault("time_attr", "training_iteration")
    if "require_attrs" in known:
        arguments.setdefault("require_attrs", False)  # results before the first evaluation have no metric of it
    if "hyperparam_mutations" in arguments:
        if "custom_explore_fn" in known:
            arguments["custom_explore_fn"] = partial(_within, arguments["hyperparam_mutations"])
        arguments["hyperparam_mutations"] = _mutations(arguments["hyperparam_mutations"], where)
    if issubclass(cls, HyperBandScheduler) and str(metric).startswith("evaluation/") and evaluation_interval != 1:
        raise ExperimentError(
            f"{where}, scheduler: {name} compares trials by a result of the same iteration each, which needs "
            f"evaluation_interval: 1; it is {evaluation_interval}. asha takes trials as they come"
        )
    return _create(cls, arguments, f"{where}, scheduler")


def _mutations(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What PBT changes: lists are values to step through, ranges Tune's objects."""
    result: dict[str, Any] = {}
    for key, value in given.items():
        if space_of(value) in LISTS:
            result[key] = next(iter(value.values()))
        elif isinstance(value, Mapping) and space_of(value) is None:
            result[key] = _mutations(value, f"{where}, {key}")
        else:
            result[key] = domain(value, f"{where}, {key}")
    return result


def _within(given: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as PBT made it, back in the ranges of the file: Tune multiplies by 0.8 or 1.2 and looks at none."""
    for key, value in given.items():
        if space_of(value) in RANGES:
            low, high = _examples(value, key)
            config[key] = min(max(config[key], low), high)
        elif isinstance(value, Mapping) and space_of(value) is None:
            config[key] = _within(value, config[key])
    return config


def check_mutated(given: Any, config: Mapping[str, Any], where: str) -> None:
    """Looks whether what PBT shall change within a mapping of the configuration is there: Tune fills in whole keys alone.

    Raises:
        ExperimentError: An entry of a mapping is missing.
    """

    def look(mutations: Mapping[str, Any], own: Any, path: str) -> None:
        for key, value in mutations.items():
            is_there = isinstance(own, Mapping) and key in own
            if path and not is_there:
                raise ExperimentError(
                    f"{where}, scheduler: hyperparam_mutations changes {path}{key}, which config does not set: give it a first "
                    "value there"
                )
            if is_there and isinstance(value, Mapping) and space_of(value) is None:
                look(value, own[key], f"{path}{key}/")

    mutations = given.get("hyperparam_mutations") if isinstance(given, Mapping) else None
    look(mutations if isinstance(mutations, Mapping) else {}, config, "")


def mutated(given: Any, where: str) -> dict[str, Any]:
    """What a scheduler may change while a trial runs, as search spaces, so that its values can be checked.

    Raises:
        ExperimentError: It is no mapping.
    """

    def as_spaces(value: Any) -> Any:
        if isinstance(value, list):
            return {"choice": value}
        if isinstance(value, Mapping) and space_of(value) is None:
            return {key: as_spaces(inner) for key, inner in value.items()}
        return value

    if not isinstance(given, Mapping):
        return {}
    for key in ("hyperparam_bounds", "hyperparam_mutations"):
        value = given.get(key) or {}
        if not isinstance(value, Mapping) or (key.endswith("bounds") and not all(isinstance(v, list) for v in value.values())):
            raise ExperimentError(f"{where}, scheduler: {key} is {value!r} and must map keys to what they may be")
    bounds = {key: {"uniform": list(pair)} for key, pair in (given.get("hyperparam_bounds") or {}).items()}  # PB2's
    return {**bounds, **as_spaces(given.get("hyperparam_mutations") or {})}


def varied(config: Mapping[str, Any], scheduler_: Any, where: str) -> set[str]:
    """The keys that trials may differ in: those that are searched, and those that a scheduler changes."""
    return {*(key for key, value in config.items() if has_spaces(value)), *mutated(scheduler_, where)}


def chosen(trial: Any, config: Mapping[str, Any], scheduler_: Any, where: str) -> dict[str, Any]:
    """What a trial of Tune's was given of a sweep; of keys that a scheduler changes Tune itself remembers the first values."""
    if not mutated(scheduler_, where):
        return dict(trial.evaluated_params)
    return {key: trial.config.get(key) for key in sorted(varied(config, scheduler_, where))}


def search_algorithm(given: Mapping[str, Any] | str | None, where: str, metric: str | None, mode: str | None) -> Any:
    """Tune's search algorithm, as in ``{type: optuna, seed: 0}``.

    Raises:
        ExperimentError: There is none of that name, an argument is wrong, or its package is not installed.
    """
    if given is None:
        return None
    name, arguments = _named(given, where, "search_alg")
    if name not in SEARCH_ALG_IMPORT:
        raise ExperimentError(f"{where}, search_alg: {unknown_key(name, SEARCH_ALG_IMPORT, 'search algorithm')}")
    cls = _create(SEARCH_ALG_IMPORT[name], {}, f"{where}, search_alg", package=name)
    _parameters(cls, arguments, f"{where}, search_alg")
    if name not in ("random", "variant_generator"):
        arguments |= {"metric": metric, "mode": mode}
    if issubclass(cls, Searcher):
        cls = type(cls.__name__, (ToldOfEvaluations, cls), {})
    return _create(cls, arguments, f"{where}, search_alg", package=name)


class ToldOfEvaluations(Searcher):
    """A mixin for Tune's search algorithms: most results have no metric of evaluation, and not all algorithms bear that.

    A result without the metric is not told. A trial that ends with such a one is told its last that had it, or none at all.
    """

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if self.metric in result:
            self.__dict__.setdefault("last_told", {})[trial_id] = result[self.metric]
            super().on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        last = self.__dict__.get("last_told", {}).pop(trial_id, None)
        if result and self.metric not in result:
            result = None if last is None else {**result, self.metric: last}
        super().on_trial_complete(trial_id, result, error)


def loggers(given: Mapping[str, Mapping[str, Any] | None] | None, where: str) -> list[Any]:
    """Tune's own integrations beside TensorBoard, CSV and JSON, as in ``{wandb: {project: nlac, mode: offline}}``.

    Raises:
        ExperimentError: There is none of that name, or its package is not installed.
    """
    callbacks = []
    for name, arguments in (given or {}).items():
        if name not in LOGGERS:
            raise ExperimentError(f"{where}, loggers: {unknown_key(name, LOGGERS, 'logger')}")
        if not isinstance(arguments or {}, Mapping):
            raise ExperimentError(f"{where}, loggers: {name} takes a mapping of its settings, and it has {arguments!r:.60}")
        module, _, cls = LOGGERS[name].rpartition(".")
        make = getattr(importlib.import_module(module), cls)
        callbacks.append(_create(make, dict(arguments or {}), f"{where}, loggers", package=name))
    return callbacks


def _named(given: Mapping[str, Any] | str, where: str, key: str) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping) or "type" not in given:
        raise ExperimentError(
            f"{where}, {key}: name it by 'type', as in '{{type: {'pbt' if key == 'scheduler' else 'optuna'}}}'"
        )
    arguments = dict(given)
    return str(arguments.pop("type")), arguments


def _parameters(cls: type, arguments: Mapping[str, Any], where: str) -> set[str]:
    """Names of what a class of Tune's takes; Tune itself drops an argument that it does not know without a word."""
    known = set(inspect.signature(cls).parameters)
    for key in arguments:
        if key not in known:
            raise ExperimentError(f"{where}: {unknown_key(key, known)}")
    return known


def _create(make: Callable[..., Any], arguments: dict[str, Any], where: str, package: str = "") -> Any:
    try:
        return make(**arguments)
    except (ImportError, RuntimeError) as error:  # of a package that Tune would need
        raise ExperimentError(f"{where}: {error} (pip install {package})") from error
    except (TypeError, ValueError, AssertionError, TuneError) as error:
        raise ExperimentError(f"{where}: {error}") from error
