"""Operators of the graphs that vLLM compiles, which look up their context by the name of vLLM's tensor-parallel group.

    torch.ops.iris_vllm.matmul_all_reduce(A, weight, group) -> sum over ranks of A [M,K] @ weight [N,K].T
    torch.ops.iris_vllm.matmul_all_reduce_norm(A, weight, residual, norm_weight, group) -> (h, scaled, squares)
    torch.ops.iris_vllm.matmul_all_reduce_rms_norm(A, weight, residual, norm_weight, eps, group) -> (normed, h)
    torch.ops.iris_vllm.all_reduce(x, group) -> sum over ranks of x [M,N]
    torch.ops.iris_vllm.all_reduce_norm(x, residual, norm_weight, eps, group) -> (normed, h)

`h` is `residual` plus the sum, and `normed` its RMSNorm. `scaled` and `squares` are the first half of that norm, see
`iris_ops/kernels/rmsnorm_epilogue.py`. A group's name is the same in every process and in every run, so a graph that
vLLM compiled in an earlier run finds the context of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iris.ccl.norm import MAX_COLUMNS
from iris.errors import ClosedError
from iris_ops.kernels.rmsnorm_epilogue import spans
from iris_ops.local.norm import add_rms_norm
from iris_ops.operators import Operators
from iris_ops.planning.ways.sequential import SEQUENTIAL
from iris_ops.problem import ALL_REDUCE
import torch

if TYPE_CHECKING:
    from iris.context import Iris

_contexts: dict[str, Iris] = {}
_unfinished: dict[str, Callable[[], None]] = {}
_kernels: dict[str, Callable] = {}
_OPERATORS = Operators("iris_vllm")


def serve(group: str, ctx: Iris) -> None:
    """Let the operators of vLLM's group `group` run on `ctx`."""
    _contexts[group] = ctx


def before_first_call(group: str, finish: Callable[[], None]) -> None:
    """Call `finish` before the next operator of vLLM's group `group` runs."""
    _unfinished[group] = finish


def _context(group: str) -> Iris:
    if _unfinished and group in _unfinished:
        _unfinished.pop(group)()
    if group not in _contexts:
        raise ClosedError(f"group is {group!r}; expected a group with a context, one of {sorted(_contexts)}")
    return _contexts[group]


def matmul_all_reduce(ctx: Iris, A: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ops, B = ctx.ops, weight.t()
    out = ops.outputs.new(ALL_REDUCE, A, B, (A.shape[0], weight.shape[0]))
    ops.matmul_all_reduce(out, A, B)
    return out


def matmul_all_reduce_norm(
    ctx: Iris, A: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ops, B = ctx.ops, weight.t()
    h = ops.outputs.new(ALL_REDUCE, A, B, residual.shape)
    scaled, squares = _halves(residual)
    ops.matmul_all_reduce_norm(h, scaled, squares, A, B, residual.contiguous(), norm_weight)
    return h, scaled, squares


def matmul_all_reduce_rms_norm(
    ctx: Iris, A: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed, h). Where the plan is torch's product and then an all-reduce, the norm ends the all-reduce."""
    (M, K), N = A.shape, weight.shape[0]
    plan = ctx.ops.plan(ALL_REDUCE, M, N, K, A.dtype, explained=False)
    if plan.kernel == SEQUENTIAL and N <= MAX_COLUMNS:
        return all_reduce_norm(ctx, A @ weight.t(), residual, norm_weight, eps)
    h, normed = add_rms_norm(matmul_all_reduce(ctx, A, weight), residual, norm_weight, eps)
    return normed, h


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(spans(rows.shape[1]), rows.shape[0], dtype=torch.float32)


def all_reduce(ctx: Iris, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    ctx.ccl.all_reduce(out, x)
    return out


def all_reduce_norm(
    ctx: Iris, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, h = x.new_empty(x.shape), x.new_empty(x.shape)
    ctx.ccl.all_reduce_norm(out, residual.contiguous(), x, norm_weight, eps, total=h)
    return out, h


def define(name: str, schema: str, kernel: Callable, fake: Callable) -> None:
    """Register `kernel` as an operator, whose last argument is a group; the kernel takes its context first instead."""
    _kernels[name] = kernel
    _OPERATORS.add(name + schema, lambda *args: _kernels[name](_context(args[-1]), *args[:-1]), fake)


define(
    "matmul_all_reduce", "(Tensor A, Tensor weight, str group) -> Tensor", matmul_all_reduce,
    lambda A, weight, group: A.new_empty(A.shape[0], weight.shape[0]),
)  # fmt: skip
define(
    "matmul_all_reduce_norm",
    "(Tensor A, Tensor weight, Tensor residual, Tensor norm_weight, str group) -> (Tensor, Tensor, Tensor)",
    matmul_all_reduce_norm,
    lambda A, weight, residual, norm_weight, group: (residual.new_empty(residual.shape), *_halves(residual)),
)
define(
    "matmul_all_reduce_rms_norm",
    "(Tensor A, Tensor weight, Tensor residual, Tensor norm_weight, float eps, str group) -> (Tensor, Tensor)",
    matmul_all_reduce_rms_norm,
    lambda A, weight, residual, norm_weight, eps, group: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape),
    ),
)
define("all_reduce", "(Tensor x, str group) -> Tensor", all_reduce, lambda x, group: x.new_empty(x.shape))
define(
    "all_reduce_norm",
    "(Tensor x, Tensor residual, Tensor norm_weight, float eps, str group) -> (Tensor, Tensor)",
    all_reduce_norm,
    lambda x, residual, norm_weight, eps, group: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
