"""Compute several column-parallel linears of one input as one product: query, key and value; gate and up.

The Hugging Face module keeps its forward. Before it runs, a hook replaces its input by the merged product of it; the
former q_proj, k_proj and v_proj then take their columns of that. So no state passes from one call to the next: any
order of calls is right, an exception leaves no state, and a compiler sees a product and three slices. Only where
the product is as wide as the input, slices distinguish the two by the product that was computed last.

    attention(hidden)  ->  forward(qkv_proj(hidden)):  q_proj(x) = x[..., :a]   k_proj(x) = x[..., a:b]   ...

That is right only if forward does nothing with its input but read its leading dimensions and pass it to those
linears. Its source is checked for that; where it does more, or cannot be read, the linears stay unmerged.

The weight is stored once, merged, rows in the order of the linears. A `Slice` loads its rows by slices of the
checkpoint as its linear would, under its linear's name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
import inspect
import textwrap
from typing import Any, TypeGuard
import weakref

from iris.errors import ShapeError
import torch
from torch import nn

from ..linear import ColumnParallelLinear
from ..shard import Shard
from ..verify.views import WeightView

_ANY = True  # equal in a copy of the model
_FILLED = "_is_hf_initialized"  # transformers initialises no tensor that has this mark


class Slice(WeightView, nn.Module):
    """One output of a merged linear: takes its columns of the merged product. `merged` holds the weight."""

    dim = 0
    stored_transposed = False

    def __init__(self, merged: ColumnParallelLinear, index: int):
        super().__init__()
        before = sum(part.size for part in merged.parts[:index])
        part = merged.parts[index]
        self.start, self.stop, self.width = before, before + part.size, merged.local_shape[0]
        self.index, self.parts, self.ctx = index, (part,), merged.ctx
        self.in_features, self.out_features = merged.in_features, part.total
        self._of = (merged,)  # in a tuple: the merged linear is a child of the module only

    def forward(self, product: torch.Tensor) -> torch.Tensor:
        if product.shape[-1] != self.width or not _is_product(self.merged, product):
            raise ShapeError(
                f"input has shape {tuple(product.shape)}: expected [..., {self.width}], the merged product, which the"
                " parent module's call prepares; call the parent, or its merged linear"
            )
        return product.narrow(-1, self.start, self.stop - self.start)

    def views_in(self, function: str) -> bool:
        """Return whether every property of a slice views a part of the merged linear."""
        return function != "forward"

    @property
    def merged(self) -> ColumnParallelLinear:
        return self._of[0]

    @property
    def weight(self) -> torch.Tensor:
        return self._rows(self.merged.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.merged.bias is None else self._rows(self.merged.bias)

    def _rows(self, whole: torch.Tensor) -> torch.Tensor:
        rows: Any = whole[self.start : self.stop]
        if hasattr(whole, _FILLED):  # a view does not inherit it, and would be filled anew
            setattr(rows, _FILLED, getattr(whole, _FILLED))
        return rows

    def numbers(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of local rows of this output's weight, in `dtype`, however they are stored."""
        return self.merged.numbers(self.start + start, self.start + stop, dtype)

    @property
    def local_shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.in_features

    @property
    def weight_scale(self) -> torch.Tensor | None:
        return None if self.merged.weight_scale is None else self.merged.weight_scale[self.start : self.stop]

    @property
    def dtype(self) -> torch.dtype:
        return self.merged.dtype

    @property
    def storage(self) -> Any:
        return self.merged.storage

    def load_shard(self, name: str, source: Any) -> None:
        """Fill this rank's rows of parameter `name` from the whole tensor, or from a safetensors slice of it."""
        self.merged.load_shard(name, source, self.index)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Refuse the unsplit model's tensors, which would be dropped silently where `strict` is False."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for key in ("weight", "bias"):
            if prefix + key in state_dict:
                errors.append(
                    f"{prefix}{key} is the unsplit model's: expected a state_dict() of a model that is split alike;"
                    " load it into the unsplit model, and split that"
                )

    def extra_repr(self) -> str:
        return f"columns {self.start} to {self.stop} of the merged product"


class Product:
    """The forward pre-hook: replaces the module's first argument by the merged product of it."""

    def __init__(self, merged: ColumnParallelLinear, name: str):
        self.merged, self.name = merged, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self.product(args[0], kwargs), *args[1:]), kwargs
        return args, {**kwargs, self.name: self.product(kwargs[self.name], kwargs)}

    def product(self, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """Return the merged product of `x`, and `kwargs` of the module's forward, in the form of its slices."""
        product = self.multiply(x, kwargs)
        if _is_ambiguous(self.merged):
            merged: Any = self.merged
            merged.last_product = _ANY if torch.compiler.is_compiling() else weakref.ref(product)
        return product

    def multiply(self, x: torch.Tensor, kwargs: dict) -> torch.Tensor:
        return self.merged(x)

    def exchanges(self, x: torch.Tensor) -> bool:
        """Return whether the product of `x` needs data of other ranks."""
        return False


def _is_ambiguous(merged: ColumnParallelLinear) -> bool:
    """Return whether a product is as wide as its input."""
    return merged.local_shape[0] == merged.in_features


def _is_product(merged: ColumnParallelLinear, product: torch.Tensor) -> bool:
    """Return whether `product`, of the right width, is one; if its input is as wide, whether it is the last product.

    Compilers' traces are not remembered: there, and afterwards, slices take any input.
    """
    if not _is_ambiguous(merged) or torch.compiler.is_compiling():
        return True
    last = getattr(merged, "last_product", None)
    return last is _ANY or (last is not None and last() is product)


def families_of(styles: dict[str, str]) -> dict[str, list[str]]:
    """Return by parent the children whose outputs are split and stay so."""
    families: dict[str, list[str]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        if style == "colwise":
            families.setdefault(parent, []).append(child)
    return families


def merge_siblings(model: nn.Module, styles: dict[str, str], hook: type[Product] = Product) -> dict[str, str]:
    """Merge the split linears of `model`, named in `styles`, that share an input; return merged names and styles."""
    merged = {}
    for parent, children in families_of(styles).items():
        module = model.get_submodule(parent)
        if "forward" in vars(module):
            continue  # the instance's own replaces its class's
        used = sole_use(type(module).forward)
        linears = [getattr(module, child) for child in children]
        name = _name(children)
        if used and used[1] == set(children) and mergeable(linears) and not hasattr(module, name):
            _merge(module, name, children, linears, hook, used[0])
            merged[f"{parent}.{name}"] = "colwise, merged from " + ", ".join(children)
    return merged


def mergeable(linears: Sequence[nn.Module]) -> bool:
    """Return whether one product can compute all of `linears`."""
    kinds = {
        (type(each), each.in_features, each.bias is None, each.weight.dtype, each.sequence_parallel)
        if isinstance(each, ColumnParallelLinear)
        else None
        for each in linears
    }
    alike = len(linears) > 1 and len(kinds) == 1 and None not in kinds
    return alike and not any(
        each.gather_output or each.stored_transposed or hasattr(each, "tied_to") for each in linears
    )


@cache
def sole_use(forward: Callable) -> tuple[str, set[str]] | None:
    """Return the name of a forward's first argument and the children that take it; None if it has other uses.

    Reading its leading dimensions (`x.shape[:-1]`), its dtype and its device is allowed.
    """
    try:
        function: Any = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0]
        module, name = (argument.arg for argument in function.args.args[:2])
    except (OSError, TypeError, SyntaxError, AttributeError, ValueError):
        return None
    parent_of = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    children = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            user = parent_of[node]
            if (
                isinstance(user, ast.Call)
                and user.args == [node]
                and not user.keywords
                and _is_child(user.func, module)
            ):
                children.add(user.func.attr)
            elif not (isinstance(user, ast.Attribute) and _is_leading(user, parent_of[user])):
                return None
    return name, children


def _is_child(node: ast.AST, module: str) -> TypeGuard[ast.Attribute]:
    """Return whether `node` is `self.something`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module


def _is_leading(node: ast.Attribute, user: ast.AST) -> bool:
    """Return whether `node` is `x.dtype`, `x.device`, or `x.shape[:-1]`."""
    return node.attr in ("dtype", "device") or (node.attr == "shape" and ast.unparse(user).endswith(".shape[:-1]"))


def _merge(
    module: nn.Module, name: str, children: list[str], linears: Sequence[ColumnParallelLinear], hook: type[Product],
    argument: str,
) -> None:  # fmt: skip
    first = linears[0]
    parts: tuple[Shard, ...] = sum((each.parts for each in linears), ())
    sizes = (first.in_features, sum(each.out_features for each in linears))
    merged = type(first)(*sizes, first.bias is not None, sequence_parallel=first.sequence_parallel,
                         ctx=first.ctx, dtype=first.weight.dtype, device="meta", parts=parts)  # fmt: skip
    for key in ("weight",) if first.bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(each, key).detach() for each in linears])
        setattr(merged, key, nn.Parameter(whole, requires_grad=False))
    setattr(module, name, merged.train(first.training))
    for index, child in enumerate(children):
        setattr(module, child, Slice(merged, index).train(first.training))
    module.register_forward_pre_hook(hook(merged, argument), with_kwargs=True)


def _name(children: list[str]) -> str:
    """Return the merged name: q_proj, k_proj, v_proj: qkv_proj; gate_proj, up_proj: gate_up_proj."""
    stems = [child.removesuffix("_proj") for child in children]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_proj"
