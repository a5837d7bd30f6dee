"""RLlib's classic experiment files: read, checked against the algorithm's configuration, and handed to Tune.

Everything wrong with a file is said before Ray starts, with the name of the key that was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.registry import ALGORITHMS
from ray.tune import CheckpointConfig
from ray.tune.registry import ENV_CREATOR, _global_registry, get_trainable_cls

import rllib_nlac
from rllib_nlac import algorithms
from rllib_nlac.algorithm.config import LanguageAlgorithmConfig
from rllib_nlac.algorithm.language_config import LanguageConfig
from rllib_nlac.algorithm.placement import PlacementError, check_room, kinds_of
from rllib_nlac.command import search
from rllib_nlac.command.search import ExperimentError
from rllib_nlac.command.tune_keys import check_metrics, check_stop, check_tune_keys
from rllib_nlac.engine.places import Node
from rllib_nlac.envs import registry
from rllib_nlac.inputs import plain_yaml
from rllib_nlac.names import is_address, unknown_key

rllib_nlac.load()  # registers NLAC and the environments

# Keys beside ``config``; those of the second line go to Tune, the plain ones as they stand.
OWN_KEYS = {"run", "env", "config"}
PLAIN_TUNE_KEYS = {"num_samples", "max_failures", "time_budget_s", "metric", "max_concurrent_trials"}
TUNE_KEYS = PLAIN_TUNE_KEYS | {"stop", "checkpoint_config", "storage_path", "mode", "scheduler", "search_alg", "loggers"}
EXAMPLE_METRIC = "evaluation/env_runners/success_rate"
# Names of older versions of RLlib, and theirs now.
RENAMED = {
    "num_workers": "num_env_runners",
    "num_rollout_workers": "num_env_runners",
    "num_envs_per_worker": "num_envs_per_env_runner",
    "num_cpus_for_driver": "num_cpus_for_main_process",
    "sgd_minibatch_size": "minibatch_size",
    "num_sgd_iter": "num_epochs",
    "local_dir": "storage_path",
    "checkpoint_freq": "checkpoint_config",
    "checkpoint_at_end": "checkpoint_config",
}


@dataclass(frozen=True)
class Experiment:
    """One experiment, ready for Tune.

    Attributes:
        name: Its folder below the storage path.
        run: Name of the algorithm.
        config: The user's keys, search spaces included; they complete the algorithm's defaults.
        stop: Metric to threshold; reaching any of them stops a trial.
        tune: Tune's own keys.
    """

    name: str
    run: str
    config: dict[str, Any]
    stop: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=dict)

    def override(
        self, stop: Mapping[str, Any] | None = None, storage_path: str | None = None, num_samples: int | None = None
    ) -> Experiment:
        """The experiment with what a command line says instead of the file."""
        tune = dict(self.tune)
        if storage_path is not None:
            tune["storage_path"] = storage_path
        if num_samples is not None:
            tune["num_samples"] = num_samples
        return replace(self, stop={**self.stop, **(stop or {})}, tune=tune)

    @property
    def storage(self) -> str | None:
        """Where its folder is made: an address such as s3://bucket/results, or an absolute path; None is Ray's default."""
        path = self.tune.get("storage_path")
        return str(Path(path).expanduser().absolute()) if path and not is_address(path) else path

    @property
    def folder(self) -> Path | None:
        """The folder of its trials; None where only Ray reads and writes, as at s3://bucket/results."""
        if self.storage and is_address(self.storage):
            return None
        return (Path(self.storage) if self.storage else Path.home() / "ray_results") / self.name

    @property
    def place(self) -> str:
        """Folder or address of its trials, for a person."""
        return str(self.folder or f"{str(self.storage).rstrip('/')}/{self.name}")

    @property
    def metrics(self) -> list[tuple[str, str]]:
        """What a run of it must report: pairs of the key that names a metric, and its path in the results."""
        score = (self.tune.get("checkpoint_config") or {}).get("checkpoint_score_attribute")
        named = [("metric", self.tune.get("metric")), ("checkpoint_score_attribute", score)]
        return [*(("stop", key) for key in self.stop), *((key, metric) for key, metric in named if metric)]


def load_experiments(path: Path) -> list[Experiment]:
    """Reads an experiment file.

    Raises:
        ExperimentError: The file is missing, is no YAML mapping, or holds an unknown key.
    """
    if not path.is_file():
        raise ExperimentError(f"no experiment file at {path}")
    try:
        data = plain_yaml.read(path)
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    form = "it must map experiment names to their settings, as in 'my-experiment: {run: NLAC, ...}'"
    if not isinstance(data, dict) or not data:
        kind = f"a {type(data).__name__}" if data else "nothing"
        raise ExperimentError(f"{path} holds {kind}; {form}")
    for name, entry in data.items():
        if not isinstance(entry, dict):
            # A file that begins with 'run:' lacks the experiment's name.
            flat = name in OWN_KEYS | TUNE_KEYS
            raise ExperimentError(f"{path}, {name}: {'the experiment has no name' if flat else f'it is {entry!r:.60}'}; {form}")
    return [read_experiment(name, _extended(entry, path, name), f"{path}, {name}") for name, entry in data.items()]


def _extended(entry: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
    """An entry on top of the file that it extends: mappings are merged, everything else is the entry's.

    Raises:
        ExperimentError: There is no such file, it is no mapping, or files extend each other in a circle.
    """
    seen: list[Path] = []
    merged, folder = _said(entry), path.parent
    while "extends" in merged:
        file = folder / str(merged.pop("extends"))
        where = f"{path}, {name}: extends: {file}"
        if file.resolve() in seen or not file.is_file():
            raise ExperimentError(f"{where} {'extends itself' if file.is_file() else 'is no file'}")
        seen.append(file.resolve())
        try:
            base = plain_yaml.read(file)
        except ValueError as error:
            raise ExperimentError(str(error)) from error
        if not isinstance(base, dict):
            raise ExperimentError(f"{where} must hold the keys of one experiment, and holds a {type(base).__name__}")
        merged, folder = _over(_said(base), merged), file.parent
    return merged


def _said(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without a ``config:`` or ``stop:`` below which nothing stands, which takes nothing back of what is extended."""
    return {key: value for key, value in entry.items() if value is not None or key not in ("config", "stop")}


def _over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = (value, merged.get(key))
        is_merged = all(isinstance(each, Mapping) and not search.space_of(each) for each in both)
        merged[key] = _over(merged[key], value) if is_merged else value
    return merged


def read_experiment(name: str, entry: Mapping[str, Any], where: str) -> Experiment:
    """Checks one entry of an experiment file.

    Raises:
        ExperimentError: A key is unknown, or its value is of another kind, or ``run`` is missing.
    """
    if not isinstance(name, str) or not name.strip() or name in (".", "..") or "/" in name or not name.isprintable():
        raise ExperimentError(f"{where}: the experiment's name, {name!r}, must do as the name of a folder")
    for key in entry:
        if key not in OWN_KEYS | TUNE_KEYS:
            raise ExperimentError(f"{where}: {_unknown(key, OWN_KEYS | TUNE_KEYS)}")
    if "run" not in entry:
        raise ExperimentError(f"{where}: 'run' is missing; name the algorithm, as in 'run: NLAC'")
    check_tune_keys(entry, where)
    config = dict(entry.get("config") or {})
    if "env" in entry and config.setdefault("env", entry["env"]) != entry["env"]:
        raise ExperimentError(f"{where}: env is {entry['env']!r}, and config.env is {config['env']!r}: leave one of them out")
    tune = {key: value for key, value in entry.items() if key in TUNE_KEYS - {"stop"}}
    experiment = Experiment(name, str(entry["run"]), config, dict(entry.get("stop") or {}), tune)
    resolve(experiment, where)
    return experiment


def resolve(experiment: Experiment, where: str = "config") -> AlgorithmConfig:
    """The full, validated configuration; of a search space its values or bounds are checked, and the first is in the result.

    Raises:
        ExperimentError: An algorithm, key or value is wrong.
    """
    trainable = algorithm_class(experiment.run, where, str(experiment.config.get("env")))
    first: AlgorithmConfig | None = None
    mutated = search.mutated(experiment.tune.get("scheduler"), where)
    in_turn = (
        variant for each in (experiment.config, _over(experiment.config, mutated)) for variant in search.variants(each, where)
    )
    for variant in in_turn:
        config = trainable.get_default_config()
        known = config_keys(config) | {"lambda", "callbacks", "framework"}
        if unknown := [_unknown(key, known, of_config=True) for key in variant if key not in known]:
            raise ExperimentError(f"{where}, config: {'; '.join(unknown)}")
        if "env_config" in variant and variant["env_config"] is None:
            raise ExperimentError(
                f"{where}: env_config is empty and must be a mapping; leave it out if there is nothing to say"
            )
        for key in ("env_config", "evaluation_config"):
            if not isinstance(variant.get(key) or {}, Mapping):
                raise ExperimentError(f"{where}: {key} is {variant[key]!r} and must be a mapping")
        evaluation = variant.get("evaluation_config") or {}
        if unknown := [_unknown(key, known) for key in evaluation if key not in known]:
            raise ExperimentError(f"{where}, evaluation_config: {'; '.join(unknown)}")
        env = variant.get("env")
        if env is None and not variant.get("input_"):
            raise ExperimentError(f"{where}: 'env' is missing; name an environment, as in 'env: TwentyQuestions'")
        try:
            config.update_from_dict(dict(variant))
            config.validate()
            if env is not None:
                _try_environment(env, variant.get("env_config"), config)
        except (ValueError, TypeError, FileNotFoundError, KeyError, AttributeError) as error:
            raise ExperimentError(f"{where}: {error}") from error
        if evaluation:
            _check_evaluation(config, where)
        first = first or config
    assert first is not None
    return first


def _try_environment(name: Any, env_config: Any, config: AlgorithmConfig) -> None:
    """Builds an environment once, unless it is one that only RLlib or Tune knows.

    Raises:
        ValueError: There is none of that name, or its configuration is wrong.
    """
    on_text = isinstance(config, LanguageConfig) and not _global_registry.contains(ENV_CREATOR, name)
    if registry.is_known(name) or on_text:
        registry.make(name, env_config).close()


def _check_evaluation(config: AlgorithmConfig, where: str) -> None:
    """What RLlib merges over the run's own, checked: RLlib looks at it when everything has started."""
    try:
        if (own := config.get_evaluation_config_object()) is not None:
            own.validate()
            if own.env is not None:
                _try_environment(own.env, own.env_config, own)
    except (ValueError, TypeError, FileNotFoundError, KeyError, AttributeError) as error:
        raise ExperimentError(f"{where}, evaluation_config: {error}") from error


def config_keys(config: AlgorithmConfig) -> set[str]:
    """Every key that a configuration knows: its public attributes and the properties that can be set."""
    properties = {
        name for name in dir(type(config)) if isinstance(value := getattr(type(config), name), property) and value.fset
    }
    return {key for key in {*vars(config), *properties} if not key.startswith("_") and _readable(config, key)}


def _readable(config: AlgorithmConfig, key: str) -> bool:
    """False for the names that RLlib keeps only to say that they are deprecated."""
    try:
        getattr(config, key)
    except ValueError:
        return False
    return True


def algorithm_class(name: str, where: str = "run", env: str | None = None) -> type[Algorithm]:
    """The algorithm of that name, ours or RLlib's; on a text environment RLlib's PPO and APPO come fitted for text.

    Raises:
        ExperimentError: There is none, or it cannot play a text environment.
    """
    ours = algorithms.OURS
    try:
        if (from_outside := algorithms.find_outside(name)) is not None:
            return from_outside
    except ValueError as error:
        raise ExperimentError(f"{where}, run: {error}") from error
    known = {*ours, *ALGORITHMS}
    if name not in known:
        raise ExperimentError(f"{where}, run: {unknown_key(name, known, 'algorithm')}")
    if name in ours:
        return ours[name]
    if not registry.is_known(env):
        known_to_rllib = env in gym.registry or _global_registry.contains(ENV_CREATOR, env)
        if isinstance(env, str) and not known_to_rllib and difflib.get_close_matches(env, registry.ENVIRONMENTS):
            raise ExperimentError(f"{where}, env: {unknown_key(env, registry.ENVIRONMENTS, 'environment')}")
        return get_trainable_cls(name)
    on_text = algorithms.STOCK_ON_TEXT
    if name not in on_text:
        raise ExperimentError(
            f"{where}, run: RLlib's {name} does not know text environments such as {env!r}; on text run "
            f"{', '.join(sorted({*ours, *on_text}))}"
        )
    return on_text[name]


def trainable_of(experiment: Experiment) -> type[Algorithm]:
    """What Tune shall run for an experiment."""
    return algorithm_class(experiment.run, env=str(experiment.config.get("env")))


def checkpoint_config(experiment: Experiment) -> CheckpointConfig:
    """Tune's checkpoint settings of an experiment.

    Raises:
        ExperimentError: Checkpoints are to be kept by an evaluation that is not theirs.
    """
    given = experiment.tune.get("checkpoint_config") or {}
    score, frequency = str(given.get("checkpoint_score_attribute") or ""), given.get("checkpoint_frequency") or 0
    interval = experiment.config.get("evaluation_interval")
    if not score.startswith("evaluation/"):
        return CheckpointConfig(**given)
    if isinstance(interval, Mapping):
        raise ExperimentError(
            f"{experiment.name}, config: evaluation_interval must be one number where checkpoints are kept by {score!r}"
        )
    if not interval or not frequency or frequency % interval:
        # A checkpoint without a score counts as the best for Tune.
        raise ExperimentError(
            f"{experiment.name}, checkpoint_config: to keep checkpoints by {score!r}, checkpoint_frequency must be a multiple "
            f"of evaluation_interval; they are {frequency} and {interval}"
        )
    if given.get("checkpoint_at_end"):
        last = experiment.stop.get("training_iteration")
        if set(experiment.stop) != {"training_iteration"} or not isinstance(last, int) or last % interval:
            raise ExperimentError(
                f"{experiment.name}, checkpoint_config: to keep checkpoints by {score!r}, leave out checkpoint_at_end, or let "
                "the run end by a training_iteration that is a multiple of evaluation_interval: a checkpoint from between "
                "would have no score, and Tune would take it for the best"
            )
    return CheckpointConfig(**given)


def tune_arguments(experiment: Experiment) -> dict[str, Any]:
    """What ``tune.run`` gets of an experiment: search space, scheduler, search algorithm, loggers and the keys as they stand.

    Raises:
        ExperimentError: Something of it is wrong.
    """
    given, where = experiment.tune, experiment.name
    check_tune_keys(given, where)
    check_stop(experiment.stop, where)
    check_metrics(experiment.metrics, experiment.config, where)
    searches = {key for key in ("scheduler", "search_alg") if given.get(key)}
    if searches and not given.get("metric"):
        raise ExperimentError(f"{where}: {' and '.join(sorted(searches))} need 'metric', as in 'metric: {EXAMPLE_METRIC}'")
    search.check_mutated(given.get("scheduler"), experiment.config, where)
    mode = given.get("mode", "max" if given.get("metric") else None)
    plain = {key: given[key] for key in PLAIN_TUNE_KEYS if key in given}
    return {
        **plain,
        "config": search.domain(experiment.config, where),
        "stop": experiment.stop or None,
        "storage_path": experiment.storage,
        "mode": mode,
        "checkpoint_config": checkpoint_config(experiment),
        "scheduler": search.scheduler(
            given.get("scheduler"), where, given.get("metric"), experiment.config.get("evaluation_interval")
        ),
        "search_alg": search.search_algorithm(given.get("search_alg"), where, given.get("metric"), mode),
        "callbacks": search.loggers(given.get("loggers"), where),
    }


def check_resources(experiment: Experiment, nodes: Sequence[Node]) -> None:
    """Says at once that a machine or a cluster is too small, where Tune would wait for ever.

    Raises:
        ExperimentError: One trial needs more than the nodes have, or a process of it more than any one of them.
    """
    config = resolve(experiment)
    try:
        request = trainable_of(experiment).default_resource_request(dict(config.to_dict()))
        check_room(kinds_of(request, config), nodes, request.strategy)
    except PlacementError as error:
        raise ExperimentError(f"{experiment.name}: {error}") from error


def describe(experiment: Experiment) -> str:
    """The resolved configuration as YAML, keys that differ from the algorithm's defaults first."""
    config = resolve(experiment)
    default = trainable_of(experiment).get_default_config()
    values = {key: getattr(config, key) for key in sorted(config_keys(config))}
    changed = {key: value for key, value in values.items() if getattr(default, key, None) != value}
    rest = {key: value for key, value in values.items() if key not in changed and _plain(value)}
    parts = {
        "run": experiment.run,
        "stop": experiment.stop,
        **experiment.tune,
        **({"storage_path": experiment.storage} if experiment.storage else {}),
        "config (set)": changed,
        "config (defaults)": rest,
    }
    if isinstance(config, LanguageAlgorithmConfig):
        parts["deepspeed"] = config.deepspeed_settings
    return yaml.safe_dump({experiment.name: json.loads(json.dumps(parts, default=str))}, sort_keys=False, width=120).rstrip()


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, list, dict, tuple))


def _unknown(key: Any, known: set[str], of_config: bool = False) -> str:
    if key in RENAMED:
        return f"unknown key {key!r}; it is called {RENAMED[key]!r} now"
    others = (
        [name for name, cls in algorithms.OURS.items() if key in config_keys(cls.get_default_config())] if of_config else []
    )
    if others:
        return f"unknown key {key!r} for this algorithm: it is one of {', '.join(others[:3])}"
    return unknown_key(key, known)
