"""The fused ops as functions of a context, with the parameters that ROCm/iris gives them; `ctx.ops` has the same ops.

from iris import ops
ops.matmul_all_reduce(ctx, out, A, B)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import aliases

if TYPE_CHECKING:
    from iris_ops.config import FusedConfig
    from iris_ops.ops import Ops as OpsNamespace
    from iris_ops.workspace import Workspace as FusedWorkspace

    from ..context import Iris

__all__ = [
    "FusedConfig",
    "FusedWorkspace",
    "OpsNamespace",
    "all_gather_matmul",
    "all_gather_matmul_preamble",
    "matmul_all_gather",
    "matmul_all_reduce",
    "matmul_all_reduce_preamble",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_preamble",
]


_KEYWORDS = aliases.keywords(output_tensor="out", C="out", A_sharded="A")


@_KEYWORDS
def matmul_all_reduce(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, async_op: bool = False,
    config: FusedConfig | None = None, workspace: FusedWorkspace | None = None, **options: Any,
) -> FusedWorkspace:  # fmt: skip
    """Call `ctx.ops.matmul_all_reduce(out, A, B)`, with `bias` by keyword."""
    return ctx.ops.matmul_all_reduce(out, A, B, async_op=async_op, config=config, workspace=workspace, **options)


@_KEYWORDS
def all_gather_matmul(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *bias_and_more: Any, **options: Any
) -> FusedWorkspace:
    """Call `ctx.ops.all_gather_matmul(out, A, B, bias, async_op, config, workspace)`."""
    return ctx.ops.all_gather_matmul(out, A, B, *bias_and_more, **options)


@_KEYWORDS
def matmul_all_gather(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *bias_and_more: Any, **options: Any
) -> FusedWorkspace:
    """Call `ctx.ops.matmul_all_gather(out, A, B, bias, async_op, config, workspace)`."""
    return ctx.ops.matmul_all_gather(out, A, B, *bias_and_more, **options)


@_KEYWORDS
def matmul_reduce_scatter(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *bias_and_more: Any, **options: Any
) -> FusedWorkspace:
    """Call `ctx.ops.matmul_reduce_scatter(out, A, B, bias, async_op, config, workspace)`."""
    return ctx.ops.matmul_reduce_scatter(out, A, B, *bias_and_more, **options)


@_KEYWORDS
def matmul_all_reduce_preamble(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:  # fmt: skip
    """Call `ctx.ops.preamble("matmul_all_reduce", out, A, B, config, workspace)`."""
    return ctx.ops.preamble("matmul_all_reduce", out, A, B, config, workspace)


@_KEYWORDS
def all_gather_matmul_preamble(
    ctx: Iris, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:  # fmt: skip
    """Call `ctx.ops.preamble("all_gather_matmul", out, A, B, config, workspace)` for A [M,K/w]."""
    out = A.new_empty(A.shape[0], B.shape[1])
    return ctx.ops.preamble("all_gather_matmul", out, A, B, config, workspace)


@_KEYWORDS
def matmul_reduce_scatter_preamble(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
) -> FusedWorkspace:  # fmt: skip
    """Call `ctx.ops.preamble("matmul_reduce_scatter", out, A, B, config, workspace)`."""
    return ctx.ops.preamble("matmul_reduce_scatter", out, A, B, config, workspace)


def __getattr__(name: str) -> Any:
    """Look up `name` in `iris_ops` on first use, because `iris_ops` imports this package."""
    if name == "FusedConfig":
        from iris_ops.config import FusedConfig

        return FusedConfig
    if name == "FusedWorkspace":
        from iris_ops.workspace import Workspace

        return Workspace
    if name == "OpsNamespace":
        from iris_ops.ops import Ops

        return Ops
    raise AttributeError(f"module 'iris.ops' has no attribute {name!r}")
