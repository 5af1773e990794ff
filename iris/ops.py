"""The fused ops as functions of a context, as code written for ROCm/iris imports them; `ctx.ops` is the same.

from iris import ops
ops.matmul_all_reduce(ctx, out, A, B)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from iris_ops.config import FusedConfig
    from iris_ops.ops import Ops as OpsNamespace
    from iris_ops.workspace import Workspace as FusedWorkspace

    from .context import Iris

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


def matmul_all_reduce(ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, **options: Any) -> FusedWorkspace:
    """`ctx.ops.matmul_all_reduce(out, A, B, **options)`."""
    return ctx.ops.matmul_all_reduce(out, A, B, **options)


def all_gather_matmul(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> FusedWorkspace:
    """`ctx.ops.all_gather_matmul(out, A, B, bias, **options)`."""
    return ctx.ops.all_gather_matmul(out, A, B, bias, **options)


def matmul_all_gather(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> FusedWorkspace:
    """`ctx.ops.matmul_all_gather(out, A, B, bias, **options)`."""
    return ctx.ops.matmul_all_gather(out, A, B, bias, **options)


def matmul_reduce_scatter(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> FusedWorkspace:
    """`ctx.ops.matmul_reduce_scatter(out, A, B, bias, **options)`."""
    return ctx.ops.matmul_reduce_scatter(out, A, B, bias, **options)


def matmul_all_reduce_preamble(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None
) -> FusedWorkspace:
    """`ctx.ops.preamble("matmul_all_reduce", out, A, B, config)`."""
    return ctx.ops.preamble("matmul_all_reduce", out, A, B, config)


def all_gather_matmul_preamble(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None
) -> FusedWorkspace:
    """`ctx.ops.preamble("all_gather_matmul", out, A, B, config)`."""
    return ctx.ops.preamble("all_gather_matmul", out, A, B, config)


def matmul_reduce_scatter_preamble(
    ctx: Iris, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None
) -> FusedWorkspace:
    """`ctx.ops.preamble("matmul_reduce_scatter", out, A, B, config)`."""
    return ctx.ops.preamble("matmul_reduce_scatter", out, A, B, config)


def __getattr__(name: str) -> Any:
    """What stands in `iris_ops`, which imports this package, is looked up there when it is asked for."""
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
