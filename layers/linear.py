"""Linear layers split over ranks: y = x @ W.T + b, with W [N, K] stored as torch.nn.Linear stores it.

    layer                      local W       input                output               served by
    Column                     [N/w, K]      [M, K]               [M, N/w]             a product, nothing to exchange
    Column, gather_output      [N/w, K]      [M, K]               [M, N]               matmul_all_gather by columns
    Column, sequence_parallel  [N/w, K]      [M/w, K]             [M, N/w]             all_gather_matmul by rows
    Row                        [N, K/w]      [M, K/w]             [M, N]               matmul_all_reduce
    Row, sequence_parallel     [N, K/w]      [M, K/w]             [M/w, N]             matmul_reduce_scatter by rows
    Row, reduce_results=False  [N, K/w]      [M, K/w]             [M, N], partial      a product; the ranks' sum is y

Columns of several outputs in one W are in `merged_linear`. Sizes need not divide by the ranks (see `shard`). Any
leading dimensions are rows.

A Column that gathers nothing and a Row are cut by the shares of the context's level (`iris_ops/planning/sums.py`), if
it has some, so that their results have the same bits on any number of ranks.

Sequence parallel: rank r holds chunk r of the tokens, as [tokens, features] or [1, tokens, features]. Where the ranks
do not divide the tokens, a Column takes their total number: `layer(x, tokens=13)`.

A product is torch's or, of a step's few rows, that of `skinny_matmul`; `gated` ones `iris_ops.matmul_gated`'s. Outputs
are ordinary tensors, new in each call, so no later call overwrites what a model still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.errors import ArgumentError, ShapeError
from iris_ops.local import gated_matmul
import torch
from torch import nn
from torch.nn import functional as F

from .shard import Shard, chunk
from .sharded import ShardedLinear, check_linears, flags, parts_or_plain, positive, ranks_of
from .weight_storage import LOCAL

if TYPE_CHECKING:
    from iris.context import Iris


class ColumnParallelLinear(ShardedLinear):
    """Split the outputs of a linear layer: each rank computes its columns of y = x W^T + b.

    With `gather_output` every rank gets all columns.

    Args:
        in_features: the inputs of the unsplit layer.
        out_features: the outputs of the unsplit layer.
        bias: whether the layer has a bias.
        gather_output: whether every rank gets all outputs; otherwise each keeps its own.
        sequence_parallel: whether each rank passes its chunk of the tokens, which the layer gathers.
        ctx: the context.
        dtype: bfloat16, float16 or float32; by default torch's.
        device: by default the context's device; "meta" allocates nothing.
        parts: this rank's part of each output, as `layers.shard` computes it; by default even chunks.

    Raises:
        ArgumentError: for bad arguments.
    """

    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        parts: tuple[Shard, ...] | None = None,
    ):
        flags(bias=bias, gather_output=gather_output, sequence_parallel=sequence_parallel)
        if gather_output and sequence_parallel:
            raise ArgumentError("gather_output and sequence_parallel are both set: expected at most one of them")
        ctx = ranks_of(ctx)
        positive(out_features=out_features)
        parts = parts_or_plain(parts, out_features, ctx, gather_output)
        super().__init__(in_features, out_features, bias, parts, ctx, dtype, device)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.op = "matmul_all_gather" if gather_output else "all_gather_matmul" if sequence_parallel else LOCAL

    def forward(self, input: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """Multiply `input` by this rank's part of the weight.

        Args:
            input: [..., in_features], the same on every rank; with `sequence_parallel` this rank's chunk of the tokens.
            tokens: the number of tokens of all ranks, with `sequence_parallel`; by default every rank has equally many.

        Returns:
            [..., this rank's outputs], or [..., out_features] with `gather_output`; with `sequence_parallel` for the
                tokens of all ranks.

        Raises:
            ShapeError, DtypeError, DeviceError: if `input` does not fit.
            ArgumentError: if `tokens` is not a number of tokens.
        """
        if tokens is not None:
            self._check_tokens(tokens)
        if not (self.gather_output or self.sequence_parallel):  # takes any leading dimensions: nothing to reshape
            return self.local_product(self.check(input, self.in_features))
        x = self.rows(input, self.in_features)
        if self.gather_output:
            out = self.product(x, x.shape[0], self.out_features)
            return out.view(*input.shape[:-1], self.out_features)
        out = self.product(x, self._all_tokens(x.shape[0], tokens), self.local_shape[0])
        return out if input.dim() == 2 else out.unsqueeze(0)

    def gated(self, input: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half of this rank's outputs times the second half; nothing is exchanged.

        Args:
            input: [..., in_features].

        Returns:
            [..., half of this rank's outputs].

        Raises:
            ArgumentError: for a layer that gathers its output or its tokens.
        """
        if self.gather_output or self.sequence_parallel:
            raise ArgumentError(
                "gated is for layers that do not gather: expected neither gather_output nor sequence_parallel"
            )
        x = self.rows(input, self.in_features)
        weight, scale, bias = self.terms(x.dtype)
        weight = weight if scale is None else self.numbers(0, self.local_shape[0], x.dtype)
        out = gated_matmul.gated(self.ctx, x, weight.t(), bias)
        return out.view(*input.shape[:-1], out.shape[-1])

    def _check_tokens(self, tokens: int) -> None:
        if not self.sequence_parallel:
            raise ArgumentError(f"tokens is {tokens!r}: expected None, because the layer is not sequence_parallel")
        if isinstance(tokens, bool) or not isinstance(tokens, (int, torch.SymInt)) or tokens < 0:
            raise ArgumentError(f"tokens is {tokens!r}: expected None or an integer from 0 on")

    def _all_tokens(self, local: int, tokens: int | None) -> int:
        total = local * self.ctx.num_ranks if tokens is None else tokens
        start, stop = chunk(total, self.ctx.num_ranks, self.ctx.cur_rank)
        if stop - start != local:
            raise ShapeError(
                f"input has {local} tokens: expected {stop - start}, rank {self.ctx.cur_rank}'s of {total}"
            )
        return total

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        parts: tuple[Shard, ...] | None = None,
    ) -> ColumnParallelLinear:
        """Build the layer from this rank's part of `linear`, on the context's device (empty if that is on meta).

        Args:
            linear: the unsplit layer, the same on every rank.
            gather_output: as in the constructor.
            sequence_parallel: as in the constructor.
            ctx: the context.
            parts: as in the constructor.

        Returns:
            The layer.

        Raises:
            ArgumentError: for bad arguments.
        """
        check_linears([linear])
        sizes = (linear.in_features, linear.out_features)
        return cls(*sizes, linear.bias is not None, gather_output, sequence_parallel, parts=parts,
                   ctx=ctx, dtype=linear.weight.dtype, device="meta").load_linears([linear])  # fmt: skip


class RowParallelLinear(ShardedLinear):
    """Split the inputs of a linear layer: each rank multiplies its columns of x, the products are summed, and the bias
    is added once.

    Args:
        in_features: the inputs of the unsplit layer.
        out_features: the outputs of the unsplit layer.
        bias: whether the layer has a bias.
        input_is_parallel: whether `forward` gets this rank's inputs only; otherwise it gets all and selects them.
        reduce_results: whether the ranks' results are summed; otherwise each rank returns its part of the sum.
        sequence_parallel: whether each rank gets the sum of its chunk of the tokens only.
        ctx: the context.
        dtype: bfloat16, float16 or float32; by default torch's.
        device: by default the context's device; "meta" allocates nothing.
        parts: this rank's part of the inputs, as `layers.shard` computes it; by default an even chunk.

    Raises:
        ArgumentError: for bad arguments.
    """

    dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        parts: tuple[Shard, ...] | None = None,
    ):
        flags(bias=bias, input_is_parallel=input_is_parallel, reduce_results=reduce_results,
              sequence_parallel=sequence_parallel)  # fmt: skip
        if sequence_parallel and not reduce_results:
            raise ArgumentError("reduce_results is False: expected True with sequence_parallel, which scatters the sum")
        ctx = ranks_of(ctx)
        if not reduce_results and (level := ctx.level.unrounded_parts):
            raise ArgumentError(
                f"reduce_results is False: expected True with {level}, because rounded parts depend on the ranks"
            )
        positive(in_features=in_features)
        parts = parts_or_plain(parts, in_features, ctx)
        if not input_is_parallel and not parts[0].is_contiguous:
            raise ArgumentError(
                "input_is_parallel is False, so the layer slices the full input: expected parts that are one range of "
                "inputs"
            )
        super().__init__(in_features, out_features, bias, parts, ctx, dtype, device)
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.sequence_parallel = sequence_parallel
        reducing = "matmul_reduce_scatter" if sequence_parallel else "matmul_all_reduce"
        self.op = reducing if reduce_results else LOCAL

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply `input` by this rank's part of the weight and sum over the ranks.

        Args:
            input: [..., this rank's inputs]; without `input_is_parallel` [..., in_features].

        Returns:
            [..., out_features], the sum over ranks. Without `reduce_results`, this rank's part of that sum; with
                `sequence_parallel`, the sum for this rank's chunk of the tokens.

        Raises:
            ShapeError, DtypeError, DeviceError: if `input` does not fit.
        """
        x = self.rows(input, self.local_shape[1] if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = self.parts[0].view(x, dim=1)
        elif self.parts[-1].pad:  # heads that are another rank's: their columns count for nothing, whatever they hold
            x = F.pad(x[:, : -self.parts[-1].pad], (0, self.parts[-1].pad))
        if not self.reduce_results:
            out = self.local_product(x, biased=self.ctx.cur_rank == 0)  # once in the ranks' sum
        elif self.sequence_parallel:
            start, stop = chunk(x.shape[0], self.ctx.num_ranks, self.ctx.cur_rank)
            out = self.product(x, stop - start, self.out_features)
            return out if input.dim() == 2 else out.unsqueeze(0)
        else:
            out = self.product(x, x.shape[0], self.out_features)
        return out.view(*input.shape[:-1], self.out_features)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        parts: tuple[Shard, ...] | None = None,
    ) -> RowParallelLinear:
        """Build the layer from this rank's part of `linear`, on the context's device (empty if that is on meta).

        Args:
            linear: the unsplit layer, the same on every rank.
            input_is_parallel: as in the constructor.
            reduce_results: as in the constructor.
            sequence_parallel: as in the constructor.
            ctx: the context.
            parts: as in the constructor.

        Returns:
            The layer.

        Raises:
            ArgumentError: for bad arguments.
        """
        check_linears([linear])
        sizes = (linear.in_features, linear.out_features)
        return cls(*sizes, linear.bias is not None, input_is_parallel, reduce_results, sequence_parallel, parts=parts,
                   ctx=ctx, dtype=linear.weight.dtype, device="meta").load_linears([linear])  # fmt: skip
