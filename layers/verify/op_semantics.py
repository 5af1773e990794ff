"""Find ops that mean something else on a rank's shard than on the whole tensor, by the sizes of their tensors.

The same code runs twice, once on whole tensors and once on shards, so the ops of the two runs correspond one by
one. A dimension whose size differs in the second run is split. Most ops treat the entries of a dimension alike, one by
one: they are right on any shard. Three kinds are wrong, though every shape fits:

    they join entries            a product's inner dimension, a sum, a softmax, a norm
    they select by position      a slice, chunks (gate and up side by side), a concatenation
    they count them              arange, or a factor that is computed from their number
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Of products: an operand, and its inner dimension.
_PRODUCTS = {
    "mm": ("self", -1),
    "addmm": ("mat1", -1),
    "bmm": ("self", -1),
    "baddbmm": ("batch1", -1),
    "mv": ("self", -1),
    "dot": ("self", -1),
}
_REDUCTIONS = frozenset(
    ("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "std_mean",
     "norm", "linalg_vector_norm", "logsumexp", "any", "all", "median", "topk", "sort", "cumsum", "cumprod", "_softmax",
     "_log_softmax", "_safe_softmax", "count_nonzero")
)  # fmt: skip
_NORMS = frozenset(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"))
_CUTS = frozenset(
    ("slice", "split", "split_with_sizes", "chunk", "select", "unbind", "narrow", "flip", "roll", "unfold")
)
_COUNTS = frozenset(("arange", "linspace", "logspace", "eye", "randperm"))
_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "pow"))


@dataclass(frozen=True)
class Op:
    """A call of a torch operator, with sizes in place of tensors."""

    function: Any
    given: dict[str, Any]
    out: Any

    @classmethod
    def of(cls, function: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> Op:
        names = [argument.name for argument in function._schema.arguments]
        given = {name: _sizes(value) for name, value in zip(names, args, strict=False)}
        return cls(function, {**given, **{name: _sizes(value) for name, value in kwargs.items()}}, _sizes(out))

    @property
    def name(self) -> str:
        return self.function._schema.name.partition("::")[2].rstrip("_")

    @property
    def is_cut(self) -> bool:
        """Return whether the op splits or concatenates blocks along a dimension: gate and up, or q, k and v."""
        return self.name in _CUTS or self.name == "cat"

    def differs(self, part: Op) -> str | None:
        """Return why `part`, this op on a rank's shard, means something else; None if it does not."""
        if self.name in _COUNTS and self.out != part.out:
            return f"counts {_text(self.out)}, of which a rank has {_text(part.out)} ({self.name})"
        if self.name in _ARITHMETIC:
            for key, value in self.given.items():
                if isinstance(value, (int, float)) and value != part.given.get(key):
                    return f"computes with {value}, which would be {part.given.get(key)} ({self.name})"
        for (verb, full), (_, own) in zip(self._joined(), part._joined(), strict=False):
            if full != own:
                return f"{verb} {_text(full)} entries, of which a rank has {_text(own)} ({self.name})"
        return None

    def _joined(self) -> Iterator[tuple[str, Any]]:
        """Yield what the op does to entries that it does not treat one by one, and their number."""
        name, given = self.name, self.given
        if name in _PRODUCTS:
            operand, dim = _PRODUCTS[name]
            yield "sums over", given[operand][dim]
        elif "scaled_dot_product" in name:
            yield "sums over", given["query"][-1]
            yield "sums over", given["key"][-2]
        elif name in _NORMS:
            across = given["normalized_shape"] if "normalized_shape" in given else given["weight"]
            yield "normalises", given["input"][-len(across) :]
        elif name in _REDUCTIONS:
            yield "joins", _along(given.get("self"), given.get("dim"))
        elif name in _CUTS and isinstance(given.get("self"), torch.Size):
            size = given["self"]
            dims = given.get("dims", given.get("dim", 0))
            if self.out != size:  # else all of it is taken
                yield "cuts", _along(size, dims)
        elif name == "cat":
            tensors = [each for each in given["tensors"] if isinstance(each, torch.Size) and len(each) > 1]
            if len(tensors) > 1:
                yield "concatenates", [_along(each, given.get("dim", 0)) for each in tensors]


def _along(size: Any, dims: Any) -> Any:
    """Return the sizes along `dims`, all for None."""
    if not isinstance(size, torch.Size):
        return None
    if dims is None or (isinstance(dims, tuple) and not dims):
        return tuple(size)
    return tuple(size[dim] for dim in (dims if isinstance(dims, tuple) else (dims,)) if -len(size) <= dim < len(size))


def _sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return tuple(_sizes(each) for each in value)
    return value


def _text(sizes: Any) -> str:
    if isinstance(sizes, tuple) and len(sizes) == 1:
        return _text(sizes[0])
    return " x ".join(map(_text, sizes)) if isinstance(sizes, (tuple, list)) else str(sizes)
