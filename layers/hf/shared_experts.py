"""Add shared experts of a mixture to the sum of the routed ones, before ranks exchange it.

    block(x) = experts(x, router(x)) + shared(x)      one all-reduce for both, in place of one for each

A block is changed only if it computes just that when tried: a copy of it, whose experts and shared expert return
random values, is called, and its result must be the sum of the two, each for the block's own input. (A shared
expert with a separate gate does not qualify.) The names of all modules and parameters stay.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..experts import SplitExperts
from ..linear import RowParallelLinear
from ..verify.skeleton import kind_of
from ..weight_storage import LOCAL
from .styles import is_hooked

_NAMES = ("shared_experts", "shared_expert")
_BATCH, _TOKENS = 2, 3


class Joined(nn.Module):
    """A module that replaces a shared expert, with all its attributes, and returns zero: its part is in the routed
    experts' sum."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        vars(self).update((key, held) for key, held in vars(shared).items() if not key.endswith("_hooks"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _nothing(x)


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape of `x`, which take no memory."""
    return x.new_zeros(()).expand(x.shape)


def join_shared(model: nn.Module) -> int:
    """Add the shared experts of `model` to the routed ones' sum, where that is right; return the number of blocks."""
    is_sum: dict[tuple, bool] = {}
    count = 0
    for block in list(model.modules()):
        children = dict(block.named_children())
        experts = children.get("experts")
        name = next((each for each in _NAMES if each in children), None)
        if not isinstance(experts, SplitExperts) or name is None or is_hooked(experts) or "forward" in vars(block):
            continue
        shared: Any = children[name]
        last = [each for each in shared.modules() if isinstance(each, RowParallelLinear)]
        if len(last) != 1 or not last[0].reduce_results or last[0].sequence_parallel:
            continue
        if shared._forward_hooks or "forward" in vars(shared):
            continue
        kind = type(block), kind_of(experts)
        if kind not in is_sum:
            is_sum[kind] = _is_sum(block, name)
        if is_sum[kind]:
            last[0].reduce_results = False
            last[0].serve_by(LOCAL)
            experts.shared = (shared,)  # in a tuple: a child of the block only
            setattr(block, name, Joined(shared).train(shared.training))
            count += 1
    return count


class _RandomOutput(nn.Module):
    """A module that returns random values of its input's shape, and records both."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = torch.Generator("cpu").manual_seed(seed)
        self.given: list[torch.Tensor] = []
        self.returned: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.given.append(x)
        self.returned.append(torch.randn(x.shape, generator=self._random, device="cpu"))
        return self.returned[-1]


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _nothing(x)


@torch.no_grad()
def _is_sum(block: Any, name: str) -> bool:
    """Return whether `block` adds the outputs of its experts and its child `name`, and does nothing else."""
    trial, experts, shared = copy.copy(block), _RandomOutput(1), _RandomOutput(2)
    trial._modules, trial._parameters = dict(block._modules), dict(block._parameters)
    trial._forward_pre_hooks, trial._forward_hooks = {}, {}
    hidden = block.experts.hidden
    random = torch.Generator("cpu").manual_seed(0)
    try:
        for child, module in block._modules.items():
            if child not in ("experts", name) and module is not None:
                trial._modules[child] = _drawn(module, random)
        for key, parameter in block._parameters.items():
            if parameter is not None:
                trial._parameters[key] = nn.Parameter(torch.rand(parameter.shape, generator=random, device="cpu"))
        for key, buffer in block._buffers.items():
            if buffer is not None:
                trial._buffers = {**trial._buffers, key: torch.rand(buffer.shape, generator=random, device="cpu")}
        trial._modules |= {"experts": experts, name: shared}
        x = torch.randn(_BATCH, _TOKENS, hidden, generator=random, device="cpu")
        result = type(block).forward(trial, x)
        trial._modules[name] = _Nothing()
        without = type(block).forward(trial, x)
    except Exception:  # for other arguments it needs
        return False
    result, without = (each[0] if isinstance(each, tuple) else each for each in (result, without))
    if len(experts.given) != 2 or len(shared.given) != 1 or not isinstance(result, torch.Tensor):
        return False
    flat = [each.reshape(-1, hidden) for each in (experts.given[0], shared.given[0], x)]
    total = experts.returned[0].reshape(x.shape) + shared.returned[0].reshape(x.shape)
    alike = all(each.shape == flat[2].shape and torch.equal(each, flat[2]) for each in flat)
    alike = alike and result.shape == without.shape == x.shape
    alone = experts.returned[1].reshape(x.shape)
    pairs = ((result, total), (without, alone))
    return alike and all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)


def _drawn(module: nn.Module, random: torch.Generator) -> nn.Module:
    """Return a copy of `module` in float32 on the CPU with random weights."""
    own = copy.deepcopy(module).to_empty(device="cpu").float()
    for tensor in (*own.parameters(), *own.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=random, device="cpu"))
    return own
