"""Compute products of replicated modules, a mixture's router for one, where a row's bits are promised.

Such a module multiplies by torch's linear, which may add up a row in another order where there are more rows. Then a
token could go to other experts. So a module that has a separate matrix is called inside a mode, in which
`iris_ops/local/matmul.py` computes each `torch.nn.functional.linear`, whatever else the module's code does. Instances
are changed, classes are not. Modules that multiply by another function, such as Conv1D, keep torch's product.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from iris_ops.local import matmul
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..experts import SplitExperts
from ..sharded import ShardedLinear

if TYPE_CHECKING:
    from iris.context import Iris


class _RowByRow(TorchFunctionMode):
    """Inside, a row of a linear's result does not depend on the number of rows."""

    def __init__(self, ctx: Iris) -> None:
        super().__init__()
        self._ctx = ctx

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(self._ctx, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(ctx: Iris, input: Any, weight: Any, bias: Any = None) -> Any:
    return matmul.linear(ctx, input, weight, bias)


def keep_rows_alike(model: nn.Module, ctx: Iris) -> int:
    """Make replicated modules of `model` multiply row by row; return their number."""
    count = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, (ShardedLinear, SplitExperts, nn.Embedding)):
            continue
        if not weight.dtype.is_floating_point or "forward" in vars(module) or hasattr(module, "padding_idx"):
            continue
        changed: Any = module
        changed._row_by_row = _RowByRow(ctx)
        changed.forward = MethodType(_forward, module)
        count += 1
    return count


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    with module._row_by_row:
        return type(module).forward(module, *args, **kwargs)
