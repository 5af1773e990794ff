"""Store the weight of a split linear: in the dtype of its product, or in fp8 with a scale for each output channel.

A layer calls its storage where storages differ, so each is an object here and not a condition in the layer. The
tensors are the layer's own: `weight`, and `weight_scale` where the storage has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iris.errors import ArgumentError
from iris.invariance import RANKS
from iris_ops.local import skinny_matmul
from iris_ops.planning.weights.fp8 import FP8
from iris_ops.quantised import linear as fp8
from iris_ops.quantised import weight_stream
from iris_ops.quantised.scaled_matmul import multiplies_in_fp8, quantised, restored
import torch
from torch import nn
from torch.nn import functional as F

from .formats.fp8 import by_rows
from .shard import Shard

Layer = Any  # a `ShardedLinear`, whose module imports this one

LOCAL = "matmul (local)"
REDUCED, SCATTERED, GATHERED = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
# Suffixes of an op in reports once the weight is stored in fp8: multiplied so, or converted.
WITH_FP8 = {
    LOCAL: ("fp8 matmul (local)", "matmul (local, weight converted from fp8)"),
    **{op: (f"fp8 {op}", f"{op} (weight converted from fp8)") for op in (REDUCED, SCATTERED, GATHERED)},
}


class InDtype:
    """The weight in the dtype of inputs and outputs."""

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype of inputs and outputs."""
        return weight.dtype

    def op(self, layer: Layer) -> str:
        """Return the op of forward."""
        return layer.op

    def named(self, op: str) -> str:
        """Return an op and how it reads the weight, for reports."""
        return op

    def few_rows(self, layer: Layer, gated: bool) -> int:
        """Return up to how many rows `skinny_matmul` computes a product without an exchange in compiled code."""
        return skinny_matmul.most_rows(len(layer.weight) // (1 + gated), gated, True, layer.weight.device)

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight for a product in `dtype`, under torch.autocast."""
        return weight.to(dtype)

    def linear(self, layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        """Return `x` times the weight by torch, plus `bias`."""
        return F.linear(x, weight, bias)

    def fill(self, layer: Layer, weight: nn.Parameter, before: int, shard: Shard, source: Any) -> None:
        """Fill the part of `weight` from entry `before` on with `shard` of `source`."""
        shard.fill(weight.narrow(layer.dim, before, shard.size), source, layer.dim)

    def exact(self, layer: Layer) -> torch.Tensor:
        """Return the numbers of the weight in the layer's dtype."""
        return layer.weight.detach()

    def apply(self, layer: Layer, fn: Callable, apply: Callable[[Callable], Any]) -> Any:
        """Run `apply(fn)`, by which torch moves and converts the layer's tensors."""
        return apply(fn)


class InFp8(InDtype):
    """The weight in e4m3 with a float32 scale for each output channel; `exact_dtype` is the dtype of outputs."""

    def __init__(self, layer: Layer) -> None:
        if layer.ctx.invariant == RANKS:
            raise ArgumentError(
                "weights in fp8 have scales that go by the rank: with invariant='ranks' expected 16 bits or float32"
            )
        if layer.op not in WITH_FP8 or (layer.dim == 1 and len(layer.parts) > 1):
            raise ArgumentError(
                f"the layer is served by {layer.op}, with {len(layer.parts)} parts: expected {', '.join(WITH_FP8)}, and"
                " one part where inputs are split, for fp8 weights"
            )
        self.exact_dtype, self._op = layer.weight.dtype, layer.op
        if layer.weight.is_meta:
            weight, scale = layer.weight.to(FP8), layer.weight.new_empty(layer.weight.shape[0], dtype=torch.float32)
        else:
            weight, scale = quantised(layer.weight)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        self._choose(layer)

    def _choose(self, layer: Layer) -> None:
        shape, device = layer.weight.shape, layer.ctx.device
        streamed = self.exact_dtype == torch.bfloat16 and skinny_matmul.streams(shape, device)
        self._converts = not (streamed or multiplies_in_fp8(shape, device, self.exact_dtype))
        layer.op = self.named(self._op)
        # what is summed over ranks has no steps of its own, and its depth may differ between them
        alone = streamed or self._op == REDUCED
        layer.own_steps = type(layer).own_steps and not layer.ctx.invariant and alone

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        return self.exact_dtype

    def op(self, layer: Layer) -> str:
        return self._op

    def named(self, op: str) -> str:
        return WITH_FP8[op][self._converts]

    def few_rows(self, layer: Layer, gated: bool) -> int:
        return weight_stream.MOST_ROWS

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight

    def linear(self, layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        assert layer.weight_scale is not None
        return fp8.linear(x, weight, layer.weight_scale, bias)

    def fill(self, layer: Layer, weight: nn.Parameter, before: int, shard: Shard, source: Any) -> None:
        """Copy e4m3 and scales from files that have one for each channel, or one in all; round other weights."""
        scales = layer._allocated("weight_scale")
        own = scales.narrow(0, before, shard.size) if layer.dim == 0 else scales
        local = weight.narrow(layer.dim, before, shard.size)
        if (stored := by_rows(source)) is not None:
            codes, scale = stored
            shard.fill(local, codes, layer.dim)
            if layer.dim == 0:
                shard.fill(own, scale, 0)
            else:
                scale.copy_to(own, (slice(None),))
            return
        exact = torch.empty(local.shape, dtype=self.exact_dtype, device=local.device)
        shard.fill(exact, source, layer.dim)
        rounded, scale = quantised(exact)
        local.copy_(rounded)
        own.copy_(scale)

    def exact(self, layer: Layer) -> torch.Tensor:
        return restored(layer.weight.detach(), layer.weight_scale, self.exact_dtype)

    def apply(self, layer: Layer, fn: Callable, apply: Callable[[Callable], Any]) -> Any:
        """Apply `fn`; a change of dtype changes `exact_dtype` only, not e4m3 and its scales."""
        self.exact_dtype = fn(torch.empty(0, dtype=self.exact_dtype, device=layer.weight.device)).dtype
        kept = layer.weight, layer.weight_scale
        result = apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype) if any(t is each for each in kept) else fn(t))
        self._choose(layer)
        return result


IN_DTYPE = InDtype()
