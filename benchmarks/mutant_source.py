"""Mutants of a module: each changes one place of a function's body. The operators are mutmut's, and one of our own.

Not mutated are strings, annotations, decorators, what is logged, and what only asserts (``raise``, ``assert``, the ``strict``
of ``zip``): what a message says is no rule of the algorithm, and no test breaks an assertion that always holds. mutmut's
replacement of arguments by None is left out, too: nearly all of these die of a TypeError.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

BORROWED = (
    "number",
    "name",
    "remove_unary_ops",
    "arg_removal",
    "keywords",
    "swap_op",
    "if_exp",
    "augmented_assignment",
)
UNTOUCHED = (cst.Annotation, cst.Decorator, cst.Raise, cst.Assert, cst.BaseString)


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        source: The whole module with the change.
        lines: First and last line of the changed statement up to the change, by the numbers of the original.
        was: What the changed lines were, on one line.
        now: What they are.
    """

    source: str
    lines: tuple[int, int]
    was: str
    now: str


def drop_operand(node: cst.BinaryOperation | cst.BooleanOperation) -> Iterable[cst.BaseExpression]:
    """``a + b`` becomes ``a``, and ``b``."""
    for operand in (node.left, node.right):
        is_plain = operand.lpar or isinstance(operand, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber))
        yield operand if is_plain else operand.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def fewer_arguments(operator: Callable) -> Callable:
    """Of mutmut's changes of a call's arguments those that drop one."""

    def fewer(node: cst.Call) -> Iterator[cst.Call]:
        for new in operator(node):
            dropped = [arg for arg in node.args if arg not in new.args]
            if len(dropped) == 1 and len(new.args) < len(node.args) and not is_strict(dropped[0]):
                last = new.args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                yield new.with_changes(args=[*new.args[:-1], last])

    return fewer


def operators() -> list[tuple[type, Callable]]:
    """Type of a node, and what makes changed nodes of it."""
    chosen = [(kind, make) for kind, make in mutation_operators if make.__name__.removeprefix("operator_") in BORROWED]
    found = {make.__name__.removeprefix("operator_") for _, make in chosen}
    if found != set(BORROWED):
        raise RuntimeError(f"mutmut lacks the operators {sorted(set(BORROWED) - found)}")
    chosen = [(kind, fewer_arguments(m) if m.__name__ == "operator_arg_removal" else m) for kind, m in chosen]
    return [*chosen, (cst.BinaryOperation, drop_operand), (cst.BooleanOperation, drop_operand)]


class Places(cst.CSTVisitor):
    """All places of a module that have mutants, each with its changed nodes and its lines."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, tuple[int, int]]] = []
        self._operators = operators()
        self._functions = 0
        self._statements: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Collects the mutants of a node; says whether its children are looked at."""
        if isinstance(node, UNTOUCHED) and not isinstance(node, cst.FormattedString):
            return False
        if (isinstance(node, cst.Call) and is_logging(node)) or (isinstance(node, cst.Arg) and is_strict(node)):
            return False
        if isinstance(node, cst.FunctionDef):
            self._functions += 1
            node.body.visit(self)  # neither its decorators nor its parameters
            self._functions -= 1
            return False
        if isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
            self._statements.append(node)
        if self._functions:
            last = self.get_metadata(PositionProvider, node).end.line
            first = self.get_metadata(PositionProvider, self._statements[-1]).start.line if self._statements else last
            for kind, make in self._operators:
                if isinstance(node, kind):
                    self.found += [(node, new, (first, last)) for new in make(node)]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._statements and self._statements[-1] is original_node:
            self._statements.pop()


def is_logging(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and isinstance(call.func.value, cst.Name) and call.func.value.value == "logger"


def is_strict(argument: cst.Arg) -> bool:
    return argument.keyword is not None and argument.keyword.value == "strict"


def drawn(source: str, seed: str) -> Iterator[Mutant]:
    """All mutants of a module in a random order, each once."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    places = Places()
    wrapper.visit(places)
    random.Random(seed).shuffle(places.found)
    seen = {source}
    for node, new, lines in places.found:
        mutated = wrapper.module.deep_replace(node, new).code
        if mutated in seen:
            continue
        seen.add(mutated)
        try:
            compile(mutated, "mutant", "exec", dont_inherit=True)
        except SyntaxError:
            continue
        yield Mutant(mutated, lines, *changed(source, mutated))


def changed(source: str, mutated: str) -> tuple[str, str]:
    """The lines in which two sources differ, of each on one line."""
    old, new = source.splitlines(), mutated.splitlines()
    places = [p for p in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if p[0] != "equal"]
    was = [line.strip() for _, start, end, _, _ in places for line in old[start:end]]
    now = [line.strip() for _, _, _, start, end in places for line in new[start:end]]
    return " ".join(was), " ".join(now)
