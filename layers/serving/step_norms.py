"""Fold RMSNorms of a decode step into other kernels, in the graph that torch.compile compiles (`compiled`).

A norm between an all-reduce and products of few rows is split (`iris_ops/kernels/rmsnorm_epilogue.py`). Its first
half ends the all-reduce's kernel, which adds the residual, too. Its second half, a factor of each row, goes to the
products.

    matmul_all_reduce -> add -> rms_norm -> skinny_matmul, ...    two kernels and one of the compiler's between them
    matmul_all_reduce_norm -> skinny_matmul, ...                  two kernels

That is right only if no other node reads the norm's result. And nothing between the all-reduce and the norm
may change their inputs, or compute an operand of the fused kernel. The graph shows whether that is so.

Between two layers, whose graphs are compiled separately, a norm comes in two halves from the start. The halves are
functions that stay in the graph until `fold` folds them. Where it cannot, they become torch's code like any other, and
`fold` returns False.
"""

from __future__ import annotations

from collections.abc import Callable
import operator
from typing import Any

from iris_ops.kernels.rmsnorm_epilogue import OP, first_half, second_half
import torch
from torch import fx
from torch.nn import functional as F

_NORMS = torch.rms_norm, F.rms_norm
_DTYPES = (torch.bfloat16,)  # fp16 may have no room for h * weight, which is not yet divided


def keep_in_graphs() -> None:
    """Let compilers trace a call of a half as one node."""
    for half in (first_half, second_half):
        torch.compiler.allow_in_graph(half)


def fold(graph: fx.Graph) -> bool:
    """Fold the norms of a traced graph; return whether no half is left. Where a second half stays, fold nothing."""
    if not all(_feeds_products(node) for node in _calls(graph, second_half)):
        return False
    for node in _calls(graph, *_NORMS):
        if _norms_a_sum(node) and _feeds_products(node):
            _halve(graph, node)
    for node in _calls(graph, second_half):
        _fold_second(graph, node)
    for node in _calls(graph, first_half):
        if _norms_a_sum(node):
            _fold_first(graph, node)
    return not _calls(graph, first_half)


def _calls(graph: fx.Graph, *targets: Callable) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _feeds_products(node: fx.Node) -> bool:
    """Return whether its users are products of few rows, of which it is the input and nothing else."""
    product = torch.ops.iris_ops.skinny_matmul
    return bool(node.users) and all(
        user.target is product and len(user.args) == 5 and not user.kwargs
        and user.args[0] is node and node not in user.args[1:]
        for user in node.users
    )  # fmt: skip


def _norms_a_sum(norm: fx.Node) -> bool:
    """Return whether it directly follows the sum of an all-reduce and a residual, its input."""
    return bool(norm.args) and norm.prev is norm.args[0] and _reduced(norm.prev) is not None


def _reduced(total: object) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return (all-reduce, view of it, residual) where `total`, the sum of the latter two, alone uses the first.

    The three follow each other.
    """
    if not isinstance(total, fx.Node) or total.target is not operator.add or total.kwargs:
        return None
    for view, residual in (total.args, total.args[::-1]):
        if not isinstance(view, fx.Node) or not isinstance(residual, fx.Node) or view is residual:
            continue
        reduction = view.prev
        if view.op != "call_method" or view.target not in ("view", "reshape") or view.args[0] is not reduction:
            continue
        if reduction.target is not torch.ops.iris_ops.matmul_all_reduce or view.kwargs or reduction.kwargs:
            continue
        alone = total.prev is view and len(view.users) == len(reduction.users) == 1
        whole, added, sum_ = _value(view), _value(residual), _value(total)
        alike = whole.shape == added.shape == sum_.shape and whole.shape[-1] == _value(reduction).shape[-1]
        if alone and alike and whole.dtype == added.dtype and whole.dtype in _DTYPES:
            return reduction, view, residual
    return None


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["example_value"]


def _call(graph: fx.Graph, target: Callable | str, args: tuple) -> fx.Node:
    return graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)


def _parts(graph: fx.Graph, node: fx.Node, count: int) -> list[fx.Node]:
    return [_call(graph, operator.getitem, (node, index)) for index in range(count)]


def _halve(graph: fx.Graph, norm: fx.Node) -> None:
    args: tuple[Any, ...] = (*norm.args, None, None)
    total, shape, weight, eps = args[:4]
    if list(shape) != [_value(total).shape[-1]] or weight is None or eps is None or norm.kwargs:
        return
    if _value(weight).dtype != _value(total).dtype:
        return
    with graph.inserting_before(norm):
        scaled, squares = _parts(graph, _call(graph, first_half, (total, weight)), 2)
        whole = _call(graph, second_half, (scaled, squares, eps))
    norm.replace_all_uses_with(whole)
    graph.erase_node(norm)


def _fold_second(graph: fx.Graph, half: fx.Node) -> None:
    scaled, squares, eps = half.args
    for product in list(half.users):
        product.args = (scaled, *product.args[1:], squares, eps)
    graph.erase_node(half)


def _fold_first(graph: fx.Graph, half: fx.Node) -> None:
    given: tuple[Any, ...] = half.args
    total, weight = given
    sum_parts = _reduced(total)
    assert sum_parts is not None  # by `_norms_a_sum`
    reduction, view, residual = sum_parts
    args: tuple[Any, ...] = (*reduction.args, None, None, None)
    A, B, bias, size, group, mean_part, scale, k_per_rank = args[:8]
    with graph.inserting_before(total):
        flat = _call(graph, "reshape", (residual, *size))
        operands = A, B, bias, flat, weight, group, mean_part, scale, k_per_rank
        fused = _call(graph, getattr(torch.ops.iris_ops, OP), operands)
        out, scaled, squares = _parts(graph, fused, 3)
        out, scaled = (_call(graph, "view", (each, *view.args[1:])) for each in (out, scaled))
    out.meta["example_value"] = _value(total)  # for the next sum's check
    total.replace_all_uses_with(out)
    for part in list(half.users):
        _, index = part.args
        part.replace_all_uses_with(squares if index else scaled)
        graph.erase_node(part)
    for node in (half, total, view, reduction):
        graph.erase_node(node)
