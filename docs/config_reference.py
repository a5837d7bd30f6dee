"""Writes the configuration reference from the config classes: each key that a setter method takes, its default and its meaning.

``conf.py`` calls it, so the page is never older than the code. A key without documentation is an error.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided

from rllib_nlac import algorithms
from rllib_nlac.ablations import ABLATIONS
from rllib_nlac.engine.lora import LoRASettings
from rllib_nlac.engine.make import ENGINES, EngineKeys
from rllib_nlac.nlac import PRESETS

PACKAGE = "rllib_nlac"
NO_MEANING = "(no documentation)"


class Undocumented(ValueError):
    """A key that users can set has no documentation."""


@dataclass(frozen=True)
class Key:
    """One key of a setter method.

    Attributes:
        owner: The config class whose method takes it.
        method: The method's name.
        name: The key.
        meaning: What its docstring says.
    """

    owner: type
    method: str
    name: str
    meaning: str


def configs() -> dict[str, AlgorithmConfig]:
    """The default configuration of every algorithm, by the name that ``run:`` takes."""
    classes = {**algorithms.OURS, **algorithms.STOCK_ON_TEXT}
    return {name: cls.get_default_config() for name, cls in classes.items()}


def arguments_of(docstring: str, section: str = "Args") -> dict[str, str]:
    """The entries of a section of a Google style docstring, each on one line."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    entries: dict[str, str] = {}
    name = ""
    for line in (found[1] if found else "").splitlines():
        if start := re.match(r"    (\w+): (.*)", line):
            name = start[1]
            entries[name] = start[2].strip()
        elif line.strip():
            entries[name] += " " + line.strip()
    return entries


def keys_of(cls: type) -> Iterator[Key]:
    """The keys that a class's own setter methods take, in their order."""
    for name, method in vars(cls).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        taken = [p.name for p in inspect.signature(method).parameters.values() if p.default is NotProvided]
        meanings = arguments_of(method.__doc__ or "")
        yield from (Key(cls, name, key, meanings.get(key, NO_MEANING)) for key in taken)


def own_classes(config: AlgorithmConfig) -> list[type]:
    """The classes of this package that a configuration is made of, the most general first."""
    return [cls for cls in reversed(type(config).__mro__) if cls.__module__.split(".")[0] == PACKAGE]


def rllib_defaults(config: AlgorithmConfig) -> AlgorithmConfig:
    """RLlib's own configuration behind one of this package."""
    theirs = next(cls for cls in type(config).__mro__ if cls.__module__.startswith("ray."))
    return theirs()


def check(all_configs: Mapping[str, AlgorithmConfig]) -> None:
    """Looks whether every key has documentation.

    Raises:
        Undocumented: A key of a setter method has none, or an attribute is set by no setter method.
    """
    keys = {
        algorithm: [key for cls in own_classes(config) for key in keys_of(cls)] for algorithm, config in all_configs.items()
    }
    # Some are set in a base class and are a key of some algorithms alone, as episodes_per_task of GRPO.
    taken = {key.name for of_one in keys.values() for key in of_one}
    missing = [
        f"{k.owner.__name__}.{k.method}({k.name})" for of_one in keys.values() for k in of_one if k.meaning == NO_MEANING
    ]
    for algorithm, config in all_configs.items():
        own = set(vars(config)) - taken - set(vars(rllib_defaults(config)))
        missing += [f"{algorithm}: {name}, which no setter method takes" for name in sorted(own) if not name.startswith("_")]
    if missing:
        raise Undocumented("keys without documentation: " + "; ".join(dict.fromkeys(missing)))


def allowed(config: AlgorithmConfig, name: str) -> str:
    """Which numbers a key takes, in words; empty where its docstring has to say it."""
    for cls in type(config).__mro__:
        bounds = vars(cls).get("RANGES", {}).get(name)
        if bounds is None:
            continue
        if not is_dataclass(bounds) or not hasattr(bounds, "low") or not fields(bounds):
            return "true, false"
        words = _interval(bounds.low, bounds.high, bounds.above)
        return words + (", or None" if bounds.optional else "")
    return ""


def _interval(low: float, high: float, above: bool) -> str:
    start = f"above {low:g}" if above else f"{low:g}"
    if low == high:
        return start
    if high == float("inf"):
        return "any number" if low == -float("inf") else start if above else f"{start} or more"
    return f"{start} to {high:g}"


def shown(value: Any) -> str:
    """A default as a table's cell shows it."""
    if isinstance(value, type) or callable(value):
        return f"`{getattr(value, '__name__', value)}`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return f"`{value!r}`"


def default_of(name: str, users: Mapping[str, AlgorithmConfig]) -> str:
    """The default that most algorithms have, and those that have another."""
    values = {algorithm: shown(getattr(config, name)) for algorithm, config in users.items()}
    common = Counter(values.values()).most_common(1)[0][0]
    others = [f"{algorithm}: {value}" for algorithm, value in values.items() if value != common]
    return f"{common} ({', '.join(others)})" if others else common


def own_keys(config: AlgorithmConfig) -> list[str]:
    """The keys that a configuration adds to RLlib's ``AlgorithmConfig``."""
    return sorted(set(vars(config)) - set(vars(AlgorithmConfig())))


def heading(users: list[str], everyone: list[str]) -> str:
    """Which algorithms take the keys of a class."""
    if set(users) == set(everyone):
        return "Every algorithm"
    absent = [name for name in everyone if name not in users]
    if set(ABLATIONS) <= set(users):
        users = [*(name for name in users if name not in ABLATIONS), "NLAC's ablations"]
    if len(absent) <= 2:
        return f"Every algorithm but {' and '.join(absent)}"
    return ", ".join(users[:-1]) + f" and {users[-1]}" if len(users) > 1 else users[0]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def reference() -> str:
    """The reference as Markdown.

    Raises:
        Undocumented: A key has no documentation.
    """
    everyone = configs()
    check(everyone)
    users: dict[type, dict[str, AlgorithmConfig]] = {}
    for algorithm, config in everyone.items():
        for cls in own_classes(config):
            users.setdefault(cls, {})[algorithm] = config
    parts = [f"NLAC has {len(own_keys(everyone['NLAC']))} keys beside RLlib's own."]
    for cls in sorted(users, key=lambda cls: -len(users[cls])):
        keys = list(keys_of(cls))
        if not keys:
            continue
        parts += [f"(config-{cls.__name__})=", f"## {heading(list(users[cls]), list(everyone))}"]
        for method in dict.fromkeys(key.method for key in keys):
            rows = [
                (f"`{k.name}`", default_of(k.name, users[cls]), allowed(next(iter(users[cls].values())), k.name), k.meaning)
                for k in keys
                if k.method == method
            ]
            parts += [f"### `.{method}()` of {cls.__name__}", table(("key", "default", "values", "meaning"), rows)]
    parts += [*_nested(everyone), *_presets(everyone), *_changed(everyone)]
    return "\n\n".join(parts) + "\n"


def _nested(everyone: Mapping[str, AlgorithmConfig]) -> Iterator[str]:
    spec = next(iter(everyone.values())).engine_spec
    yield "## Keys of `engine_config`"
    yield f"The first {len(fields(EngineKeys))} are keys of any engine ({', '.join(ENGINES)}), the others of `{spec.kind}`."
    rows = [*_fields("engine_config", EngineKeys), *_fields("engine_config", type(spec.settings))]
    yield table(("key", "default", "meaning"), rows)
    mappings: dict[str, type] = {"lora": LoRASettings}
    for config in everyone.values():
        mappings |= config.of_all_bases("SETTINGS")  # type: ignore[attr-defined]
    for key, settings in mappings.items():
        yield f"## Keys of `{key}`"
        yield table(("key", "default", "meaning"), list(_fields(key, settings)))


def _fields(key: str, settings: type) -> Iterator[tuple[str, str, str]]:
    """The keys of a mapping: the fields of a dataclass, and what its docstring says of them."""
    meanings = arguments_of(settings.__doc__ or "", "Attributes")
    for field in fields(settings):
        if field.name not in meanings:
            raise Undocumented(f"{key}: {field.name}")
        yield f"`{field.name}`", shown(field.default), meanings[field.name]


def _presets(everyone: Mapping[str, AlgorithmConfig]) -> Iterator[str]:
    for name, settings in PRESETS.items():
        if settings:
            yield f"## Settings of `preset: {name}`"
            rows = [(f"`{key}`", shown(value), shown(getattr(everyone["NLAC"], key))) for key, value in settings.items()]
            yield table(("key", "there", "default"), rows)


def _changed(everyone: Mapping[str, AlgorithmConfig]) -> Iterator[str]:
    """RLlib's own keys whose default is another one here."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for algorithm, config in everyone.items():
        theirs = rllib_defaults(config)
        # Of the batch RLlib keeps the attribute under a name of its own and shows it by a property.
        for name in sorted({*vars(theirs), "train_batch_size_per_learner"}):
            value = getattr(theirs, name)
            own = getattr(config, name, value)
            plain = all(isinstance(each, (bool, int, float, str, type(None))) for each in (own, value))
            if plain and own != value and not name.startswith("_"):
                rows.setdefault((f"`{name}`", shown(own), shown(value)), []).append(algorithm)
    yield "## RLlib's keys with another default here"
    head = ("key", "here", "RLlib's", "algorithms")
    yield table(head, [(*row, heading(algorithms, list(everyone))) for row, algorithms in sorted(rows.items())])


def write(path: Path, text: str) -> None:
    """Writes generated text where a page includes it; a file that has it already keeps its time, and is not built again."""
    path.parent.mkdir(exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    print(reference())
