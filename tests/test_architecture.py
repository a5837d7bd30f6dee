"""The house: which rooms there are, on which floors they stand, and that nothing below knows what is above it."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from pathlib import Path

import grimp
import pytest
from rooms import FLOORS

from rllib_nlac.nlac import NLAC, NLACConfig

TESTS = Path(__file__).parent
BOUND = 36_850
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Which module imports which, wherever the line stands, within functions too."""
    graph = grimp.build_graph("rllib_nlac", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_every_room_has_its_floor(imports):
    assert {room_of(module) for module in imports} == set(FLOOR)


def test_arrows_point_down(imports):
    upward = [
        f"{module} -> {other}"
        for module, others in imports.items()
        for other in others
        if room_of(module) != room_of(other) and FLOOR[room_of(other)] >= FLOOR[room_of(module)]
    ]
    assert not upward, "\n".join(sorted(upward))


@pytest.mark.parametrize("level", ["files", "folders"])
def test_there_is_no_circle(imports, level):
    arrows = defaultdict(set)
    for module, others in imports.items():
        a = module if level == "files" else room_of(module)
        for other in others:
            b = other if level == "files" else room_of(other)
            if a != b:
                arrows[a].add(b)
    graphlib.TopologicalSorter(arrows).prepare()  # raises with the circle


def test_tests_import_no_tests():
    """What several of them need stands in pages of its own, so that each can be read, run and removed alone."""
    imported = [
        f"{path.relative_to(TESTS)}:{node.lineno} imports {name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert not imported, "\n".join(imported)


def test_the_figures(imports, record_property):
    """Prints what the documentation says of the house; ``pytest -s`` shows it."""
    arrows = {(room_of(a), room_of(b)) for a, others in imports.items() for b in others if room_of(a) != room_of(b)}
    figures = f"{len(FLOOR)} rooms, {len(FLOORS)} floors, {len(arrows)} arrows, none upward"
    record_property("house", figures)
    print(figures)
    assert len(FLOOR) <= 28 and len(FLOORS) <= 13


def test_a_line_of_a_docstring_can_be_read_alone():
    """As in "port: TCP port of the store.", and not "port: Of the store."."""
    of = re.compile(r'^\s+\*{0,2}\w+(?: \(.*\))?: Of |"""Of |help="Of ')
    root = TESTS.parent
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for folder in ("rllib_nlac", "tests", "benchmarks", "research")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if of.search(line) and path != Path(__file__)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        (NLAC, ["NLAC", "ReplayAlgorithm", "LanguageAlgorithm", "CheckedCheckpoints"]),
        (NLACConfig, ["NLACConfig", "ReplayConfig", "CriticConfig", "LanguageAlgorithmConfig", "LanguageConfig"]),
    ],
)
def test_the_chains_of_classes_are_short(kind, chain):
    """What watches, records or examines is an object that an algorithm has, and no base class."""
    assert [base.__name__ for base in kind.__mro__ if base.__module__.startswith("rllib_nlac")] == chain


def test_the_package_does_not_grow_unseen():
    """Where it fails, subtract first; the commit of a new feature may raise the bound."""
    files = [path for path in (TESTS.parent / "rllib_nlac").rglob("*") if path.suffix in (".py", ".js")]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= BOUND, f"{lines} lines of Python and JavaScript in rllib_nlac"
