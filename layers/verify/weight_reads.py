"""Find forwards that read the weight of a linear themselves: `F.linear(x, self.dense.weight[:, a:b])`.

Once the linear is split, such a forward would compute with this rank's shard and exchange nothing: a silently wrong
result. So this module parses the sources of the modules around it: their forwards, and the methods and functions that
these call with `self`. It follows names like `self.a.b.weight`, and variables assigned from `self.a.b`. It ignores code
that a condition on the module's settings rules out (`if self.pretraining_tp > 1`), and reads of a dtype, a device or a
shape. The dry run (see `proof`) finds reads that no source shows. Sources show what no dry run does: forwards whose
inputs nobody can make up, and branches that a run does not take.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
import inspect
import operator
import textwrap
from types import FunctionType
from typing import Any

from iris.errors import StyleError
import torch
from torch import nn

_READ = "weight", "bias"
_HARMLESS = frozenset(
    ("dtype", "device", "shape", "ndim", "is_meta", "is_cuda", "requires_grad", "size", "dim", "numel", "data_ptr")
)
_CONFINED = "isinstance", "hasattr", "type", "id"
_COMPARISONS: dict[type, Callable] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_UNKNOWN = object()


@dataclass(frozen=True)
class _Condition:
    """A test that gives `expected` where a line is reached; in it the module is called `root`."""

    test: ast.expr
    expected: bool
    root: str

    def may_hold(self, module: nn.Module) -> bool:
        value = _value(self.test, self.root, module)
        return value is _UNKNOWN or bool(value) == self.expected


_Conditions = frozenset[_Condition]
_Read = tuple[tuple[str, ...], _Conditions]  # names after `self`, and when


def refusal(name: str) -> str:
    """Return the message for a parameter `name` that a forward reads."""
    module, _, key = name.rpartition(".")
    return (
        f"{module} would be split, but a forward around it reads its {key} itself, of which each rank has a part:"
        " leave it whole"
    )


def check(model: nn.Module, linears: Collection[str]) -> None:
    """Raise `StyleError` if the forward of a module around one of `linears` reads its weight or bias itself."""
    split = {id(model.get_submodule(name)): name for name in linears}
    for around in sorted({parent for name in linears for parent in _parents(name)}):
        module = model.get_submodule(around)
        kind: Any = type(module)
        for chain, conditions in _reads_of(kind):
            owner: Any = module
            for key in chain[:-1]:
                owner = getattr(owner, key, None)
            if id(owner) in split and all(each.may_hold(module) for each in conditions):
                where = f"{around}, a {type(module).__name__}" if around else f"{type(module).__name__}"
                raise StyleError(f"{refusal(f'{split[id(owner)]}.{chain[-1]}')} ({where})")


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


@cache
def _reads_of(kind: Any) -> tuple[_Read, ...]:
    """Return the parameters that the forward of a class reads from its module, itself or in functions it calls."""
    reads: list[_Read] = []
    known = set()
    pending: list[tuple[Any, _Conditions]] = [(kind.forward, frozenset())]
    while pending:
        function, conditions = pending.pop()
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or (function, conditions) in known:
            continue
        known.add((function, conditions))
        source = _parsed(function)
        if source is None or not source.args.args:
            continue
        reader = _Reader(source, conditions)
        reads += reader.reads
        pending += [(inspect.getattr_static(kind, name, None), under) for name, under in reader.methods]
        pending += [(function.__globals__.get(name), under) for name, under in reader.functions]
    return tuple(reads)


@cache
def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) else None


class _Reader:
    """A visitor of a function whose first argument is the module."""

    def __init__(self, source: ast.FunctionDef, conditions: _Conditions) -> None:
        self.reads: list[_Read] = []
        self.methods: list[tuple[str, _Conditions]] = []
        self.functions: list[tuple[str, _Conditions]] = []
        self._root = source.args.args[0].arg
        self._names: dict[str, list[tuple[str, ...]]] = {self._root: [()]}
        for node in ast.walk(source):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                for chain in self._chains(node.value):
                    self._names.setdefault(node.targets[0].id, []).append(chain)
        self._block(source.body, conditions)

    def _chains(self, node: ast.expr) -> list[tuple[str, ...]]:
        """Return a and b of `self.a.b`; several where a variable is assigned several."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, [])
        if isinstance(node, ast.Attribute):
            return [(*chain, node.attr) for chain in self._chains(node.value)]
        return []

    def _block(self, lines: list[ast.stmt], conditions: _Conditions) -> None:
        for line in lines:
            self._visit(line, conditions)
            if isinstance(line, ast.If) and not line.orelse and isinstance(line.body[-1], (ast.Return, ast.Raise)):
                conditions |= {_Condition(line.test, False, self._root)}

    def _visit(self, node: ast.AST, conditions: _Conditions) -> None:
        if isinstance(node, (ast.If, ast.IfExp)):
            self._visit(node.test, conditions)
            for branch, expected in ((node.body, True), (node.orelse, False)):
                under = conditions | {_Condition(node.test, expected, self._root)}
                self._block(branch, under) if isinstance(branch, list) else self._visit(branch, under)
            return
        if isinstance(node, ast.Attribute):
            if node.attr in _HARMLESS and isinstance(node.value, ast.Attribute) and node.value.attr in _READ:
                return
            if node.attr in _READ and isinstance(node.ctx, ast.Load):
                self.reads += [(chain, conditions) for chain in self._chains(node)]
        elif isinstance(node, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            return
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _CONFINED:
                return
            if isinstance(node.func, ast.Attribute) and self._chains(node.func.value) == [()]:
                self.methods.append((node.func.attr, conditions))
            elif isinstance(node.func, ast.Name) and node.args and self._chains(node.args[0]) == [()]:
                self.functions.append((node.func.id, conditions))
        for key, value in ast.iter_fields(node):
            if key == "body" and isinstance(value, list):
                self._block(value, conditions)
            else:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self._visit(each, conditions)


def _value(node: ast.expr, root: str, module: nn.Module) -> Any:
    """Return the value of an expression of the module's attributes and constants, `_UNKNOWN` for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return module if node.id == root else _UNKNOWN
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, root, module)
        try:
            value = _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr)
        except Exception:  # a property's own
            return _UNKNOWN
        return _UNKNOWN if isinstance(value, torch.Tensor) else value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, root, module)
        return _UNKNOWN if value is _UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(each, root, module) for each in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) == decisive for value in values):
            return decisive
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decisive
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = (_value(each, root, module) for each in (node.left, node.comparators[0]))
        try:
            return _UNKNOWN if left is _UNKNOWN or right is _UNKNOWN else _COMPARISONS[type(node.ops[0])](left, right)
        except Exception:
            return _UNKNOWN
    return _UNKNOWN
