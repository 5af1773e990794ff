"""Run gated MLPs, `down(silu(gate(x)) * up(x))`, with their first half in one kernel.

With few rows the kernel is `skinny_matmul`'s. With many rows, on a GPU with warp-specialised kernels, it is
`hopper_gather_matmul_kernel`, whether the rows are here or, with sequence parallelism, spread over the ranks. Where
a row's bits are promised one of the two computes any number of rows on any GPU.

A module is replaced only if its forward has exactly this form, its gate and up are one product (see `merge`), its
activation is silu, and it has no other hooks. Its contents keep their names. The kernel bypasses gate, up and
activation. So where a user replaces or hooks one of them later, all of them are called again. With sequence parallelism
that makes another op, so then all ranks must do it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from iris import platform
from iris_ops.local import skinny_matmul
from iris_ops.local.gated_matmul import FEW
from iris_ops.planning.epilogues import GATE
from iris_ops.recording import row_count
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..linear import ColumnParallelLinear
from .merge import Product
from .styles import is_hooked

_MERGED = "gate_up_proj"


class GatedMLP(nn.Module):
    """`mlp`, with all its attributes but its hook, `product`, which makes the merged product of gate and up."""

    gate_proj: nn.Module
    up_proj: nn.Module
    act_fn: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module, product: Product):
        super().__init__()
        vars(self).update((key, held) for key, held in vars(mlp).items() if not key.startswith("_forward_pre_hooks"))
        self._product = product
        self._original = self._bypassed()  # in a tuple, so no further children
        self._hopper_configs = platform.has_warp_specialisation(product.merged.ctx.device)  # a compiler would warn

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        (x,) = *args, *kwargs.values()  # under any name
        merged = self.merged
        x = merged.check(x, merged.in_features)
        if merged.rows_alike and keeps_bits(x, merged):
            if self._is_unchanged():
                return self.down_proj(merged.gated(x))
        elif merged.own_steps and x.dtype == merged.dtype:  # otherwise autocast's
            alone = not self._product.exchanges(x)
            tensors = merged.weight, merged.bias, merged.weight_scale
            taken = merged.inputs(x)
            few = alone and skinny_matmul.is_faster(taken, *tensors, GATE.name)
            many = not few and (alone or x.dim() == 2) and has_many_rows(x, merged, self._hopper_configs)
            if (few or many) and self._is_unchanged():
                return self.down_proj(skinny_matmul.called(taken, *tensors, GATE.name) if few else merged.gated(x))
        both = self._product.product(x, {})
        return self.down_proj(self.act_fn(self.gate_proj(both)) * self.up_proj(both))

    @property
    def merged(self) -> ColumnParallelLinear:
        """Return the linear that holds gate and up."""
        return self._product.merged

    def _bypassed(self) -> tuple:
        return self.gate_up_proj, self.gate_proj, self.up_proj, self.act_fn

    def _is_unchanged(self) -> bool:
        """Return whether the bypassed modules are the original ones, without hooks."""
        now = self._bypassed()
        same = all(mine is first for mine, first in zip(now, self._original, strict=True))
        return same and not any(is_hooked(each) for each in now)


def keeps_bits(x: torch.Tensor, merged: ColumnParallelLinear) -> bool:
    """Return whether `merged.gated` takes `x` with the same bits among any number of rows."""
    is_supported = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and merged.weight_scale is None
    return is_supported and x.dtype == merged.dtype and not _needs_gradient(x, merged)


def has_many_rows(x: torch.Tensor, merged: ColumnParallelLinear, specialised: bool) -> bool:
    """Return whether a warp-specialised kernel may multiply `x`: it has many rows, or a compiler leaves this open."""
    if not specialised or x.dtype not in (torch.bfloat16, torch.float16) or merged.weight_scale is not None:
        return False
    open_ = torch.jit.is_tracing() or not statically_known_true(row_count(x) <= FEW)
    return not _needs_gradient(x, merged) and open_


def _needs_gradient(x: torch.Tensor, merged: ColumnParallelLinear) -> bool:
    tensors = [t for t in (x, merged.weight, merged.bias) if t is not None]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def fuse_gates(model: nn.Module) -> int:
    """Replace the gated MLPs of `model`; return their number."""
    plain: dict[type, bool] = {}
    replacements = []
    for parent in model.modules():
        for child, module in parent.named_children():
            if not _is_merged(module) or is_hooked(module.act_fn) or not is_silu(module.act_fn):
                continue
            if type(module) not in plain:
                plain[type(module)] = is_plain(type(module).forward)
            if plain[type(module)]:
                hooks: Any = module._forward_pre_hooks.values()
                (hook,) = hooks
                replacements.append((parent, child, GatedMLP(module, hook)))
    for parent, child, mlp in replacements:
        setattr(parent, child, mlp)
    return len(replacements)


def _is_merged(module: nn.Module) -> bool:
    """Return whether it has all that is replaced, and its class's forward gets nothing but a merged product."""
    hooks, own = list(module._forward_pre_hooks.values()), {*vars(module), *dict(module.named_children())}
    plainly = len(hooks) == 1 and isinstance(hooks[0], Product) and not module._forward_hooks
    # attributes that replace those of the class
    return plainly and own >= {_MERGED, "act_fn", "down_proj"} and own.isdisjoint({"forward", "_compiled_call_impl"})


def is_silu(activation: Any) -> bool:
    """Return whether it is silu, by trying it."""
    x = torch.linspace(-100, 100, 401, device="cpu")
    try:
        return torch.allclose(activation(x), nn.functional.silu(x))
    except Exception:  # of any callable
        return False


def is_plain(forward: Any) -> bool:
    """Return whether a forward of one argument is `self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))`"""
    if hasattr(forward, "__wrapped__"):  # its source would be the wrapped function's
        return False
    try:
        function: Any = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
        module, name = (argument.arg for argument in function.args.args)
    except (OSError, TypeError, SyntaxError, AttributeError, ValueError):
        return False
    if function.decorator_list or function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
        return False
    expected = f"{module}.down_proj({module}.act_fn({module}.gate_proj({name})) * {module}.up_proj({name}))"
    lines = [ast.unparse(line) for line in function.body]
    return lines == [f"return {expected}"] or lines == [f"down_proj = {expected}", "return down_proj"]
