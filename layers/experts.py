"""Experts of a mixture, each split over the ranks by its intermediate size.

    parameter              unsplit                                 this rank's
    gate_up_proj           [E, 2I, H], or [E, H, 2I]               I/w of the gate, and of the up rows
    up_proj                [E, I, H], experts without a gate       I/w
    down_proj              [E, H, I], or [E, I, H]                 I/w
    gate_up_proj_bias      [E, 2I]                                 I/w of each
    down_proj_bias         [E, H]                                  all of it

Each rank computes its slice of every expert that a token goes to, and the sum over a token's experts and over the ranks
is one op. The router is replicated, so all ranks know where each token goes, and no token travels. A split by experts
would give the ranks uneven work, for routers' loads are uneven.

`I` need not divide by the ranks. Where it is a multiple of 8, so is every part, for kernels load 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import inspect
from typing import TYPE_CHECKING, Any

from iris_ops import torch_ops
from iris_ops.activation import Activation
from iris_ops.moe.router_ops import Choice
from iris_ops.moe.torch_ops import MixtureCall, mixture
import torch
from torch import nn

from .expert_storage import CodedWeight, Cut, form_for
from .formats.weight_format import Coding
from .shard import Shard, balanced, even_unit, in_units
from .sharded import part_of, split_parameter, unit_of

if TYPE_CHECKING:
    from iris.context import Iris

_UNIT = 8  # entries of an intermediate size that stay together: 16 bytes of bf16


@dataclass(frozen=True)
class Form:
    """How a module stores its experts, and what they compute."""

    first: str  # the name of the weight before the activation
    second: str
    intermediate: int
    activation: Activation | None  # None: what the module's own forward computes, by elements
    transposed: bool = False  # [E, H, I], as gpt-oss has it, in place of [E, I, H]
    interleaved: bool = False  # gate and up rows alternate; else all gate rows come first
    gated: bool = True

    def parts(self, module: nn.Module, world: int, rank: int) -> dict[str, tuple[Shard, int]]:
        """Return this rank's shard and the split dimension of each parameter by name."""
        start, stop = part_of_experts(self.intermediate, world, rank, unit_of(module, self.second))
        one = Shard(self.intermediate, ((start, stop),))
        both = one
        if self.gated and self.interleaved:
            both = Shard(2 * self.intermediate, ((2 * start, 2 * stop),))
        elif self.gated:
            after = self.intermediate
            both = Shard(2 * self.intermediate, ((start, stop), (start + after, stop + after)))
        parts = {self.first: (both, 2 if self.transposed else 1), self.second: (one, 1 if self.transposed else 2)}
        if getattr(module, f"{self.first}_bias", None) is not None:
            parts[f"{self.first}_bias"] = both, 1
        return parts


def part_of_experts(intermediate: int, world: int, rank: int, group: int = 1) -> tuple[int, int]:
    """Return `[start, stop)` of an intermediate size: sizes differ by one unit at most.

    `group` entries share a scale in the files; shards end between groups where that keeps them about even.
    """
    if group > 1:
        return in_units(intermediate, world, rank, even_unit(intermediate, world, group)).ranges[0]
    unit = _UNIT if intermediate % _UNIT == 0 and intermediate >= _UNIT * world else 1
    start, stop = balanced(intermediate // unit, world, rank)
    return start * unit, stop * unit


class SplitExperts(nn.Module):
    """A module that replaces `module`, with its attributes, by `moe_gate_up` followed by `moe_down_all_reduce`.

    `coded`: by name the weights that are stored as codes with scales (`store`); `reasons`: why others are not.
    """

    op = "moe_gate_up, moe_down_all_reduce"
    shared: tuple[nn.Module, ...] = ()  # a shared expert, whose partial result joins the sum over ranks
    choice: Choice | None = None
    """The experts that the block's router has chosen for the next forward, in order (`hf/routers.py`)."""

    def __init__(self, module: nn.Module, form: Form, ctx: Iris):
        super().__init__()
        vars(self).update(vars(module))
        self._form, self.ctx = form, ctx
        self._names = list(inspect.signature(type(module).forward).parameters)[1:4]
        self.coded: dict[str, CodedWeight] = {}
        self.reasons: dict[str, str] = {}
        for key, (part, dim) in form.parts(module, ctx.num_ranks, ctx.cur_rank).items():
            split_parameter(self, key, part, dim)
        self._width: int = self._shard(form.second).size

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map hidden states [..., H], experts and weights [tokens, k], by position or name, to outputs [tokens, H]."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, experts, weights = (given[name] for name in self._names)
        x, form = hidden.reshape(-1, hidden.shape[-1]), self._form
        shared = self.shared[0](x) if self.shared else None
        (up, up_scale), (down, down_scale) = self._operands(form.first), self._operands(form.second)
        bias, last = (getattr(self, f"{key}_bias", None) for key in (form.first, form.second))
        assert form.activation is not None
        choice, self.choice = self.choice, None
        if choice is not None and choice.experts is not experts:  # the block has changed them
            choice = None
        rows, offsets = (None, None) if choice is None else (choice.rows, choice.offsets)
        call = MixtureCall(x, up, down, experts, weights, bias, last, shared, form.activation, form.interleaved)
        call = call._replace(gate_up_scale=up_scale, down_scale=down_scale, width=self._width)
        return mixture(self.ctx, call._replace(rows=rows, offsets=offsets))

    def _operands(self, key: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a weight [E, K, N] and its scales, if it has some."""
        if (coded := self.coded.get(key)) is not None:
            return coded.operands
        weight = getattr(self, key)
        return (weight if self._form.transposed else weight.transpose(1, 2)), None

    @property
    def hidden(self) -> int:
        """Return the size of hidden states."""
        weight = getattr(self, self._form.second)
        return weight.shape[2 if self._form.transposed and self._form.second not in self.coded else 1]

    @property
    def served_by(self) -> str:
        """Return the ops of forward, and how experts are stored, for reports."""
        kinds = list(dict.fromkeys(each.form.name for each in self.coded.values()))
        return f"{self.op} (experts in {', '.join(kinds)})" if kinds else self.op

    @torch.no_grad()
    def store(self, codings: Mapping[str, Coding | str], weights: str | None) -> None:
        """Store both weights as `weights=` and the files' `codings`, by name, decide; an empty one is filled later."""
        form = self._form
        for key in (form.first, form.second):
            chosen = form_for(codings.get(key, ""), self._cut(key), weights)
            if isinstance(chosen, str):
                self.reasons[key] = chosen
            else:
                self.coded[key] = CodedWeight(self, key, chosen, self._cut(key), form.transposed)

    def _shard(self, key: str) -> Shard:
        """Return this rank's part of the split dimension of a weight."""
        split_by = part_of(self, key)
        assert split_by is not None, key
        return split_by[0]

    def _cut(self, key: str) -> Cut:
        """Return how the ranks divide the numbers [E, N, K] of a weight."""
        shard, world = self._shard(key), self.ctx.num_ranks
        if key == self._form.first:
            hidden = getattr(self, key).shape[1 if self._form.transposed else 2]
            return Cut(shard, Shard(hidden, ((0, hidden),)), (0,))
        rows = getattr(self, key).shape[2 if self._form.transposed else 1]
        unit = unit_of(self, key)
        starts = tuple(part_of_experts(self._form.intermediate, world, rank, unit)[0] for rank in range(world))
        return Cut(Shard(rows, ((0, rows),)), shard, starts)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SplitExperts:
        """Apply `fn` as torch does; a change of dtype leaves codes and scales unchanged."""
        kept = [parameter for each in self.coded.values() for parameter in each.parameters]
        for each in self.coded.values():
            each.exact_dtype = fn(torch.empty(0, dtype=each.exact_dtype, device=each.parameters[0].device)).dtype

        def applied(t: torch.Tensor) -> torch.Tensor:
            return fn(t.view(torch.uint8)).view(t.dtype) if any(t is each for each in kept) else fn(t)

        return super()._apply(applied, recurse)


class SumOverRanks:
    """The forward hook of a module that computes with this rank's slices: its output becomes the sum over ranks."""

    op = "the module's own, then all_reduce"

    def __init__(self, ctx: Iris):
        self.ctx = ctx

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output if output.is_meta else torch_ops.sum_over_ranks(self.ctx, output)


class OnFirstRank(nn.Module):
    """A module that returns its input on rank 0, else zeros: for a residual inside a module whose output is summed over
    ranks."""

    def __init__(self, ctx: Iris):
        super().__init__()
        self._passes = ctx.cur_rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._passes else torch.zeros_like(x)
