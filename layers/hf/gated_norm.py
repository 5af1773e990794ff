"""The RMSNorm of Mamba-2: over the channels of a group of heads, with a gate before or after it.

    x * silu(gate) / sqrt(mean over the group of its square + eps) * weight

A rank has some of the heads. Where it has all of a group's, no rank exchanges anything; where ranks share a group, each
adds up the squares of its own channels, and the sum over the ranks is one number a token and group, in float32.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from iris_ops import torch_ops
import torch
from torch import nn
from torch.nn import functional as F

from ..shard import HeadSplit
from ..sharded import split_parameter

if TYPE_CHECKING:
    from iris.context import Iris


class GatedNorm(nn.Module):
    """A norm that replaces `norm`, with its weight, on the heads `held`; a group has `size` channels in all."""

    op = "gated RMSNorm of a rank's groups"

    def __init__(self, norm: Any, held: HeadSplit, size: int, ctx: Iris):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon
        self.gate_first = not getattr(norm, "norm_before_gate", False)
        self.ctx, self.size, self.groups, self._held = ctx, size, held.num_local_kv_heads, held
        width = size * held.num_kv_heads // held.num_heads
        split_parameter(self, "weight", held.q_shard(width))
        self.shared = held.num_kv_heads < len(held.counts)  # by some ranks; then all of them exchange
        if self.shared:
            self.op = "gated RMSNorm, sums of squares over ranks"
        self.train(norm.training)

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise `hidden_states`, gated by `gate`, both [..., channels of this rank]."""
        x = hidden_states.float()
        opened = None if gate is None else F.silu(gate.float())
        if opened is not None and self.gate_first:
            x = x * opened
        by_group = x.unflatten(-1, (self.groups, -1))
        squares = by_group.square().sum(-1, keepdim=True)
        if self.shared:
            squares = self._over_ranks(squares)
        x = (by_group * torch.rsqrt(squares / self.size + self.eps)).flatten(-2) * self.weight
        if opened is not None and not self.gate_first:
            x = x * opened
        return x.to(hidden_states.dtype)

    def _over_ranks(self, squares: torch.Tensor) -> torch.Tensor:
        """Return `squares` [..., 1, 1], of a part of one group, summed over the ranks that have the other parts."""
        if squares.is_meta:  # there are no ranks
            return squares
        held, counts = self._held, not self._held.idle
        own = F.pad(squares.flatten(-2) * counts, (held.kv[0], held.num_kv_heads - held.kv[1]))  # [..., all groups]
        whole = torch_ops.sum_over_ranks(self.ctx, own.reshape(1, -1)).view(own.shape)
        return whole[..., held.kv[0] : held.kv[1], None]

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, groups={self.groups} of {self.size}"


@torch.no_grad()
def computes_gated_norm(norm: Any, groups: int) -> bool:
    """Return whether `norm`, over `groups`, computes what `GatedNorm` does on one rank, by trying it."""
    parameters = dict(norm.named_parameters())
    if list(parameters) != ["weight"] or not isinstance(getattr(norm, "variance_epsilon", None), float):
        return False
    random = torch.Generator("cpu").manual_seed(0)
    here: dict[str, Any] = {"generator": random, "device": "cpu"}  # whatever torch's defaults
    size = norm.weight.shape[0]
    if size % groups:
        return False
    trial = copy.deepcopy(norm)
    trial.weight = nn.Parameter(torch.randn(size, **here))
    scale = torch.tensor([[[1e-3], [1.0], [1e3]]], device="cpu")  # eps counts in the first row
    x, gate = torch.randn(1, 3, size, **here) * scale, torch.randn(1, 3, size, **here)
    alone: Any = None
    whole = HeadSplit(groups, groups, (0, groups), (0, groups), counts=(groups,))
    try:
        expected = [trial(x), trial(x, gate)]
    except Exception:  # for other arguments it needs
        return False
    ours = GatedNorm(trial, whole, size // groups, alone)
    actual = [ours(x), ours(x, gate)]
    return all(
        torch.is_tensor(one) and torch.allclose(one, other, 1e-4, 1e-6)
        for one, other in zip(expected, actual, strict=True)
    )
