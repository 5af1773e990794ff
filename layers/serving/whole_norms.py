"""Fold the preceding sum into norms of a compiled layer that are separate kernels.

Where a row's bits are promised a norm is one operator (`iris_ops/local/norm.py`), and the preceding sum with the
residual would be one kernel more. So in a traced graph

    add -> rms_norm -> products                two kernels
    add_rms_norm -> products                   one, which writes the sum, too
"""

from __future__ import annotations

import operator
from typing import Any

from iris_ops.local import norm
import torch
from torch import fx


def fold(graph: fx.Graph) -> None:
    """Fold the sum of two like tensors into the norm that takes it, if no node between them may change it."""
    for node in graph.nodes:
        if node.target is norm.rms_norm and not node.kwargs and node.args[0] is node.prev and _adds_alike(node.prev):
            _fold(graph, node.prev, node)


def _adds_alike(total: fx.Node) -> bool:
    """Return whether it is the sum of two tensors of its own size and dtype."""
    if total.target is not operator.add or total.kwargs:
        return False
    values = [each.meta.get("example_value") for each in (total, *total.args) if isinstance(each, fx.Node)]
    if len(values) < 3 or not all(torch.is_tensor(each) for each in values):
        return False
    whole: Any = values[0]
    return all(each.shape == whole.shape and each.dtype == whole.dtype for each in values[1:] if torch.is_tensor(each))


def _fold(graph: fx.Graph, total: fx.Node, node: fx.Node) -> None:
    _, *parameters = node.args
    with graph.inserting_before(total):
        both = graph.call_function(norm.add_rms_norm, (*total.args, *parameters))
        parts = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for before, part in zip((total, node), parts, strict=True):
        part.meta = dict(before.meta)
        before.replace_all_uses_with(part)
    graph.erase_node(node)
    graph.erase_node(total)
