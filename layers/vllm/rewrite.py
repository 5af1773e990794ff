"""Replacement of all-reduces, with the product before and the norm after, in a graph that vLLM compiles.

The graph is the functional one after Inductor's post-grad passes, where vLLM's own fusion with FlashInfer has run and
its norms are still one node each. Every all-reduce of the tensor-parallel group is a `Site`:

    product -> all-reduce -> add and norm -> products     few rows: matmul_all_reduce_norm, and the norm's second half
                                                          becomes a factor of the rows of the products that follow
    product -> all-reduce -> add and norm                 matmul_all_reduce_rms_norm, which leaves the whole norm
    product -> all-reduce                                 matmul_all_reduce
    mixture -> all-reduce -> add and norm                 experts_all_reduce_rms_norm
    mixture -> all-reduce                                 experts_all_reduce
    all-reduce -> add and norm                            all_reduce_norm
    all-reduce                                            all_reduce

A product whose columns are a gate and its partner, silu(gate) * partner, becomes one kernel, too. Nodes that do not
match, such as a quantised product, stay. This module imports no vLLM: it recognises targets by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
import operator
from typing import Any

from iris.ccl.norm import MAX_COLUMNS
from iris_ops.planning.epilogues import GATE
import torch
from torch import fx
from torch.nn import functional as F

from . import ops  # noqa: F401 (registers what is inserted)

aten = torch.ops.aten
Node = Any  # an fx.Node; the declared type of its arguments is an uninformative union
_DTYPE = torch.bfloat16  # float16 may have no room for h * weight, which is not divided yet
_FLASHINFER = "vllm::flashinfer_trtllm_fused_allreduce_norm"
_MIXTURE = "vllm::moe_forward"
_WITH_NORM = {"matmul_all_reduce": "_rms_norm", "experts_all_reduce": "_rms_norm", "all_reduce": "_norm"}
_PLAIN_NORM = 1  # FlashInfer's code of a norm without quantisation
_TO_END = 2**63 - 1


@dataclass(frozen=True)
class Norm:
    """The residual sum and RMSNorm after an all-reduce, and which nodes hold the two results."""

    residual: Node
    weight: Node
    eps: float
    normed: list[Node]
    summed: list[Node]


@dataclass(frozen=True)
class Site:
    """One all-reduce of `source`. `nodes`: those of vLLM's graph that compute it and its norm."""

    source: Node
    norm: Norm | None
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class _Part:
    """What runs together with a sum over ranks, by the operator `name`; `nodes` of vLLM's graph computed it."""

    name: str
    operands: tuple[Node, ...]
    nodes: tuple[Node, ...] = ()


def rewrite(graph: fx.Graph, group: str, few_rows: bool, products: bool = True, experts: bool = False) -> Counter[str]:
    """Replace the matching nodes of `graph` in place, and return how many of each operator were inserted.

    Args:
        group: vLLM's name of the tensor-parallel group.
        few_rows: whether the graph's rows are so few that a norm's factor goes to the products that follow.
        products: False where ranks' products differ, as with a bias on rank 0 only: then only sums are replaced.
        experts: whether mixtures of experts are replaced, too.
    """
    inserted: Counter[str] = Counter()
    for node in list(graph.nodes):
        site = _site(node, group)
        if site is None or _value(site.source).dtype != _DTYPE or _value(site.source).ndim != 2:
            continue
        product = _product(site.source) if products else None
        if product and few_rows and site.norm and all(map(_feeds_products, site.norm.normed)):
            _fuse_norm(graph, site, site.norm, product, group)
            inserted["matmul_all_reduce_norm"] += 1
            continue
        part = _Part("matmul_all_reduce", product, (site.source,)) if product else None
        if part is None and experts:
            part = _mixture(site.source)
        if part is None and few_rows:
            part = _Part("all_reduce", (site.source,))
        if part is None or (part.name == "all_reduce" and site.norm and _value(site.source).shape[1] > MAX_COLUMNS):
            continue
        name = part.name + _WITH_NORM[part.name] if site.norm else part.name
        target = getattr(torch.ops.iris_vllm, name).default
        if site.norm:
            _with_norm(graph, site, site.norm, target, part.operands, group)
        else:
            (old,) = site.nodes
            _replace(graph, old, _call(graph, old, target, *part.operands, group))
        for node in part.nodes:
            graph.erase_node(node)
        inserted[name] += 1
    graph.eliminate_dead_code()
    return inserted


def _site(node: Node, group: str) -> Site | None:
    if node.op != "call_function":
        return None
    if str(node.target) == "vllm.all_reduce.default":
        source, name = (*node.args, *node.kwargs.values())[:2]
        if name != group:
            return None
        users = list(node.users)
        is_norm = len(users) == 1 and str(users[0].target) == "vllm_ir.fused_add_rms_norm.default"
        if is_norm and users[0].args[0] is node and _plain(users[0]):
            norm = users[0]
            _, residual, weight, eps = norm.args[:4]
            return Site(source, Norm(residual, weight, eps, _parts(norm, 0), _parts(norm, 1)), (node, norm))
        return Site(source, None, (node,))
    if "auto_functionalized" in str(node.target) and node.args and _name(node.args[0]) == _FLASHINFER:
        given = node.kwargs
        if given["pattern_code"] != _PLAIN_NORM or given.get("norm_out") is not None or given.get("weight_bias"):
            return None
        fused = Norm(given["residual"], given["rms_gamma"], given["rms_eps"], _parts(node, 1), _parts(node, 2))
        return Site(given["allreduce_in"], fused, (node,))
    return None


def _plain(norm: Node) -> bool:
    """Return whether a norm has a weight of its input's dtype and covers all columns."""
    arguments = (*norm.args, *norm.kwargs.values())
    weight, rest = arguments[2], arguments[4:]
    alike = isinstance(weight, fx.Node) and _value(weight).dtype == _value(norm.args[0]).dtype
    return len(norm.args) >= 4 and alike and all(each is None for each in rest)


def _name(target: Any) -> str:
    return getattr(getattr(target, "_schema", None), "name", str(target))


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _parts(node: Node, index: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def _product(node: Node) -> tuple[Node, Node] | None:
    """Return (A, weight [N, K]) if `node` is A @ weight.T of contiguous rows and nothing else reads it, else None."""
    if node.op != "call_function" or node.target is not aten.mm.default or len(node.users) != 1:
        return None
    A, B = node.args
    transposed = B.op == "call_function" and (
        B.target is aten.t.default or (B.target is aten.permute.default and list(B.args[1]) == [1, 0])
    )
    if not transposed or not isinstance(B.args[0], fx.Node) or _value(A).dtype != _value(B).dtype:
        return None
    return A, B.args[0]


def _mixture(node: Node) -> _Part | None:
    """Return the mixture whose result is `node`, if nothing else reads it and it takes nothing but rows and logits."""
    call, nodes = node, (node,)
    if node.target is operator.getitem:
        (call, index), nodes = node.args, (node, node.args[0])
        if index != 0 or "auto_functionalized" not in str(call.target) or _name(call.args[0]) != _MIXTURE:
            return None
        given = dict(call.kwargs)
    elif node.op == "call_function" and _name(node.target) == _MIXTURE:
        given = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    else:
        return None
    operands = tuple(given.pop(key, None) for key in ("hidden_states", "router_logits", "layer_name"))
    if None in operands or any(given.values()) or any(len(each.users) > 1 for each in nodes):
        return None
    return _Part("experts_all_reduce", operands, nodes)


def _feeds_products(node: Node) -> bool:
    """Return whether all readers of the norm `node` are products that can apply its second half as a factor."""
    return bool(node.users) and all(_is_left_factor(node, user) for user in node.users)


def _is_left_factor(node: Node, user: Node) -> bool:
    if user.target is not aten.mm.default or user.args[0] is not node or user.args[1] is node:
        return False
    B = user.args[1]
    return B.op == "call_function" and B.target in (aten.t.default, aten.permute.default) and B.args[0].op != "get_attr"


def _call(graph: fx.Graph, before: Node, target: Callable, *args: Any) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
        node.meta["val"] = _fake(target, args)
    return node


def _fake(target: Callable, args: tuple) -> Any:
    """Return the result's shape and dtype by running `target` on the fake tensors of its arguments."""
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    fake = next((v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)), None)
    with fake or nullcontext():
        return target(*values)


def _replace(graph: fx.Graph, old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _items(graph: fx.Graph, before: Node, node: Node, count: int) -> list[Node]:
    return [_call(graph, before, operator.getitem, node, index) for index in range(count)]


def _put(graph: fx.Graph, site: Site, norm: Norm, normed: Node | None, summed: Node) -> None:
    for nodes, result in ((norm.normed, normed), (norm.summed, summed)):
        for node in nodes:
            if result is not None:
                node.replace_all_uses_with(result)
            graph.erase_node(node)
    for node in reversed(site.nodes):
        graph.erase_node(node)


def _fuse_norm(graph: fx.Graph, site: Site, norm: Norm, product: tuple[Node, Node], group: str) -> None:
    last, target = site.nodes[-1], torch.ops.iris_vllm.matmul_all_reduce_norm.default
    fused = _call(graph, last, target, *product, norm.residual, norm.weight, group)
    h, scaled, squares = _items(graph, last, fused, 3)
    for normed in norm.normed:
        for user in list(normed.users):
            weight, gate = user.args[1].args[0], _gate(user)
            end = gate.result if gate else user
            new = _call(
                graph, end, torch.ops.iris_ops.skinny_matmul.default, scaled, weight, None, None,
                GATE.name if gate else "", squares, norm.eps,
            )  # fmt: skip
            end.replace_all_uses_with(new)
            for node in (*reversed(gate.nodes), user) if gate else (user,):
                graph.erase_node(node)
    _put(graph, site, norm, None, h)
    graph.erase_node(site.source)


def _with_norm(
    graph: fx.Graph, site: Site, norm: Norm, target: Callable, operands: tuple[Node, ...], group: str
) -> None:
    """Put one operator, which returns the norm and the sum before it, in place of a site's nodes."""
    last = site.nodes[-1]
    fused = _call(graph, last, target, *operands, norm.residual, norm.weight, norm.eps, group)
    _put(graph, site, norm, *_items(graph, last, fused, 2))


@dataclass(frozen=True)
class _Gate:
    """silu(gate) * partner of a product's two halves. `nodes`: all between the product and `result`, which is last."""

    nodes: list[Node]
    result: Node


def _gate(product: Node) -> _Gate | None:
    width = _value(product).shape[1]
    halves = [_half(user, width) for user in product.users]
    if sorted(str(half) for half in halves) != ["0", "1"]:
        return None
    users = sorted(product.users, key=lambda user: _half(user, width) or 0)
    first, second = users
    if len(second.users) != 1:
        return None
    result = next(iter(second.users))
    nodes = _between(first, result)
    if result.target is not aten.mul.Tensor or nodes is None or not _is_silu(first, second, nodes, result):
        return None
    return _Gate([first, second, *nodes, result], result)


def _half(user: Node, width: Any) -> int | None:
    """Return 0 or 1 where `user` is that half of the columns, else None."""
    if user.target is not aten.slice.Tensor or not isinstance(width, int) or width % 2:
        return None
    given = (*user.args, *(None, None, None, 1)[len(user.args) - 1 :])
    _, dim, start, end, step = (*given, 1)[:5]
    if dim not in (1, -1) or step not in (None, 1):
        return None
    start, end = start or 0, width if end is None or end >= min(width, _TO_END) else end
    return {(0, width // 2): 0, (width // 2, width): 1}.get((start, end))


def _between(first: Node, result: Node) -> list[Node] | None:
    """Return the nodes between `first` and `result` in the graph's order; None where another node reads them."""
    between: set[Node] = set()
    pending = list(first.users)
    while pending:
        node = pending.pop()
        if node is result or node in between:
            continue
        if node.op != "call_function" or len(between) > 16:
            return None
        between.add(node)
        pending += node.users
    return [node for node in first.graph.nodes if node in between]


def _is_silu(first: Node, second: Node, nodes: list[Node], result: Node) -> bool:
    """Return whether the nodes compute silu(first) * second, by a run on random numbers."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x, y = (3 * torch.randn(2, 4, 64, generator=generator, device="cpu")).to(_value(first).dtype)
    values: dict[Node, Any] = {first: x, second: y}

    def load(arg: Any) -> Any:
        return values[arg]

    try:
        for node in (*nodes, result):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), load)
            values[node] = node.target(*args, **kwargs)
        actual = values[result].double()
    except (KeyError, RuntimeError, TypeError):
        return False
    expected = F.silu(x.double()) * y.double()
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= 0.03 * expected.abs() + 1e-3).all())
