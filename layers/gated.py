"""Gated MLPs, `down(silu(gate(x)) * up(x))`, whose first half is one kernel where rows are few (see `step_product`).

A module is exchanged only if its forward reads just so, its gate and up are one product (see `fused`), its activation
is silu, and nobody else has hooked it. Children keep their names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch
from torch import nn

from . import step_product
from .fused import Product

_MERGED = "gate_up_proj"


class GatedMLP(nn.Module):
    """`mlp`, with its children; `product` makes the merged product of gate and up."""

    def __init__(self, mlp: nn.Module, product: Product):
        super().__init__()
        for name, child in mlp.named_children():
            setattr(self, name, child)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = self.gate_up_proj
        alone = merged.own_steps and merged.weight_scale is None and not self.product.exchanges(x)
        if alone and step_product.serves(x, merged.weight):
            merged.check(x, merged.in_features)
            return self.down_proj(step_product.gated(x, merged.weight, merged.bias))
        both = self.product.product(x, {})
        return self.down_proj(self.act_fn(self.gate_proj(both)) * self.up_proj(both))


def fuse_gates(model: nn.Module) -> int:
    """Exchanges the gated MLPs of `model`; how many there were."""
    plain: dict[type, bool] = {}
    found = []
    for parent in model.modules():
        for child, module in parent.named_children():
            hooks = list(module._forward_pre_hooks.values())
            if not hasattr(module, _MERGED) or len(hooks) != 1 or not isinstance(hooks[0], Product):
                continue
            if module._forward_hooks or not is_silu(getattr(module, "act_fn", None)):
                continue
            if type(module) not in plain:
                plain[type(module)] = is_plain(type(module).forward)
            if plain[type(module)]:
                found.append((parent, child, GatedMLP(module, hooks[0]).train(module.training)))
    for parent, child, mlp in found:
        setattr(parent, child, mlp)
    return len(found)


def is_silu(activation: object) -> bool:
    """Whether it is silu, seen by trying."""
    x = torch.linspace(-8, 8, 33)
    try:
        return torch.allclose(activation(x), nn.functional.silu(x))
    except Exception:  # whatever it is
        return False


def is_plain(forward) -> bool:
    """Whether a forward of one argument returns `self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))`."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0]
        module, name = (argument.arg for argument in function.args.args)
    except (OSError, TypeError, SyntaxError, AttributeError, ValueError):
        return False
    wanted = f"{module}.down_proj({module}.act_fn({module}.gate_proj({name})) * {module}.up_proj({name}))"
    lines = [ast.unparse(line) for line in function.body]
    return lines == [f"return {wanted}"] or lines == [f"down_proj = {wanted}", "return down_proj"]
