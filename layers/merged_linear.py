"""Column-parallel layers of several outputs that share one weight: gate and up, or query, key and value.

They are Columns that only choose `parts`: a rank has a part of each output, cut by itself (see `shard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iris.errors import ArgumentError, ShapeError
import torch
from torch import nn

from .linear import ColumnParallelLinear
from .shard import merged, split_heads
from .sharded import check_linears, positive, ranks_of

if TYPE_CHECKING:
    from iris.context import Iris


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Split several outputs that share one weight, such as gate and up. Each is split by itself, so a rank has a part
    of each.

    Args:
        in_features: the inputs of the unsplit layer.
        out_features: the size of each output.
        bias: whether the layer has a bias.
        gather_output: whether every rank gets all outputs; otherwise each keeps its own.
        sequence_parallel: whether each rank passes its chunk of the tokens, which the layer gathers.
        ctx: the context.
        dtype: bfloat16, float16 or float32; by default torch's.
        device: by default the context's device; "meta" allocates nothing.

    Raises:
        ArgumentError: for bad arguments.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if not isinstance(out_features, Sequence) or not out_features:
            raise ArgumentError(f"out_features is {out_features!r}: expected a list with the size of each output")
        ctx = ranks_of(ctx)
        positive(**{f"out_features[{i}]": size for i, size in enumerate(out_features)})
        parts = merged(out_features, ctx.num_ranks, ctx.cur_rank, gather_output, ctx.level)
        super().__init__(in_features, sum(out_features), bias, gather_output, sequence_parallel,
                         ctx=ctx, dtype=dtype, device=device, parts=parts)  # fmt: skip

    @classmethod
    def from_linear(  # type: ignore[override]  # from other arguments
        cls,
        linear: nn.Linear | Sequence[nn.Linear],
        out_features: Sequence[int] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
    ) -> MergedColumnParallelLinear:
        """Build the layer from one fused Linear and the sizes of its outputs, or from a Linear for each output.

        Args:
            linear: one fused layer, or a list with a layer for each output.
            out_features: the sizes of a fused layer's outputs.
            gather_output: as in the constructor.
            sequence_parallel: as in the constructor.
            ctx: the context.

        Returns:
            The layer.

        Raises:
            ArgumentError: for bad arguments.
        """
        linears = _as_list(linear)
        sizes = [each.out_features for each in linears] if out_features is None else out_features
        return cls(linears[0].in_features, sizes, linears[0].bias is not None, gather_output, sequence_parallel,
                   ctx=ctx, dtype=linears[0].weight.dtype, device="meta").load_linears(linears)  # fmt: skip


class QKVParallelLinear(ColumnParallelLinear):
    """Split query, key and value, which share one weight, by whole heads.

    `heads` describes this rank's heads, and `split(y)` returns the three results.

    Args:
        hidden_size: the inputs.
        head_dim: the size of a head.
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads.
        bias: whether the layer has a bias.
        gather_output: whether every rank gets all outputs; otherwise each keeps its own.
        sequence_parallel: whether each rank passes its chunk of the tokens, which the layer gathers.
        ctx: the context.
        dtype: bfloat16, float16 or float32; by default torch's.
        device: by default the context's device; "meta" allocates nothing.

    Raises:
        ArgumentError: for bad arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        ctx = ranks_of(ctx)
        positive(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        heads = split_heads(num_heads, num_kv_heads, ctx.num_ranks, ctx.cur_rank)
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        parts = (heads.q_shard(head_dim), heads.kv_shard(head_dim), heads.kv_shard(head_dim))
        if gather_output:
            parts = merged(sizes, ctx.num_ranks, ctx.cur_rank, gathered=True)
        super().__init__(hidden_size, sum(sizes), bias, gather_output, sequence_parallel,
                         ctx=ctx, dtype=dtype, device=device, parts=parts)  # fmt: skip
        self.head_dim, self.heads = head_dim, heads
        self._sizes = sizes if gather_output else [part.size for part in parts]

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the query, key and value columns of a result of this layer, as views.

        Args:
            y: [..., outputs], a result of this layer.

        Raises:
            ShapeError: for another number of columns.
        """
        if y.shape[-1:] != (sum(self._sizes),):
            raise ShapeError(
                f"y has shape {tuple(y.shape)}: expected [..., {sum(self._sizes)}], a result of this layer"
            )
        return y.split(self._sizes, dim=-1)

    @classmethod
    def from_linear(  # type: ignore[override]  # from other arguments
        cls,
        linear: nn.Linear | Sequence[nn.Linear],
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        ctx: Iris,
    ) -> QKVParallelLinear:
        """Build the layer from one fused Linear, or from the list [q, k, v].

        Args:
            linear: one fused layer, or the list [q, k, v].
            head_dim: as in the constructor.
            num_heads: as in the constructor.
            num_kv_heads: as in the constructor.
            gather_output: as in the constructor.
            sequence_parallel: as in the constructor.
            ctx: the context.

        Returns:
            The layer.

        Raises:
            ArgumentError: for bad arguments.
        """
        linears = _as_list(linear)
        sizes = (linears[0].in_features, head_dim, num_heads, num_kv_heads)
        return cls(*sizes, linears[0].bias is not None, gather_output, sequence_parallel,
                   ctx=ctx, dtype=linears[0].weight.dtype, device="meta").load_linears(linears)  # fmt: skip


def _as_list(linear: nn.Linear | Sequence[nn.Linear]) -> list[nn.Linear]:
    linears = list(linear) if isinstance(linear, Sequence | nn.ModuleList) else [linear]
    if not linears:
        raise ArgumentError("linear is an empty list: expected one Linear for each output")
    check_linears(linears)
    return linears
