"""The fused ops as torch operators, so that torch.compile sees one opaque node where eager code sees a call.

    torch.ops.iris_ops.<op>(A, B, bias, size, group, mean_part=None, scale=None, depths=None) -> Tensor
    torch.ops.iris_ops.matmul_gated(A, B, bias, group) -> Tensor
    torch.ops.iris_ops.matmul_all_reduce_norm(A, B, bias, residual, weight, group, mean_part=None, scale=None,
                                              depths=None) -> (...)
    torch.ops.iris_ops.gather_rows(rows, group) -> Tensor
    torch.ops.iris_ops.sum_over_ranks(part, group) -> Tensor

The same schema for all four and `all_gather_matmul_gated`; one without an exchange (`gated_matmul.py`); one that
returns (out, scaled, squares), see `rmsnorm_epilogue.py`; and two without a product, `ctx.ccl.all_gather` and
`ctx.ccl.all_reduce`. `size` is the shape of this rank's result, `group` the name of the context (`ctx.group_name`). An
operator is functional: its result is a new tensor, and nothing that the caller sees is mutated. `mean_part` is for
ranks whose parts differ in size. An op plans by the sizes that it sees; ranks that saw different ones could choose
different tiles and wait for signals that are never sent. So they all plan by this size in place of K (in
`all_gather_matmul`, gated or not, of N, the columns of B). `scale`: of a B in another format, which all take but
`matmul_all_gather`. `depths`: of sums with `invariant="ranks"`, each rank's K; then no `mean_part` is looked at.

Every rank must run the same operators in the same order, which the ranks' compilers do for the same model.

`product` is what layers call, compiled or not. Eager code goes straight to `ctx.ops`, which costs the host 0.6 us more
than calling that from the layer; through torch's dispatcher it would be 3 us, by `torch.library.custom_op` 33 us. No
operator has a gradient, and one that is asked for is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from iris import registry
from iris.ccl.collectives import Collectives
from iris.errors import ArgumentError
import torch

from .checks import check_gradient
from .kernels import rmsnorm_epilogue
from .local.gated_matmul import check as check_gated
from .local.gated_matmul import matmul_gated
from .ops import Ops
from .planning.requests import requested
from .planning.weights import format_of
from .problem import ALL_REDUCE, GATED, GATHER_MATMUL, MATMUL_GATHER, OPS, SCALED
from .recording import is_recording

if TYPE_CHECKING:
    from iris.rank import Rank

    from .config import FusedConfig


class Context(Protocol):
    """What operators ask of the context that they find by its name: `iris.Iris`, or what stands in for one."""

    cur_rank: int
    num_ranks: int
    group_name: str
    invariant: str | None

    @property
    def ops(self) -> Ops: ...

    @property
    def ccl(self) -> Collectives: ...


_SCHEMA = (
    "(Tensor A, Tensor B, Tensor? bias, SymInt[] size, str group, int? mean_part=None, Tensor? scale=None, "
    "int[]? depths=None) -> Tensor"
)
_ROWS = -1  # as many rows as A has
_library = torch.library.Library("iris_ops", "FRAGMENT")  # registrations last as long as this object


def product(
    op: str,
    ctx: Context,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    size: tuple[int, ...],
    mean_part: int | None = None,
    scale: torch.Tensor | None = None,
    k_per_rank: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return the result of `op`, one of `problem.OPS` or `GATED`: this rank's part, a new tensor of shape `size`."""
    if is_recording():
        call, more = getattr(torch.ops.iris_ops, op), (ctx.group_name, mean_part, scale, k_per_rank)
        if not torch.jit.is_tracing():
            return call(A, B, bias, size, *more)
        # Of an operator's sizes a traced graph keeps the numbers; those of a view it computes anew.
        if op not in (ALL_REDUCE, MATMUL_GATHER):
            raise ArgumentError(
                f"{op} is called in torch.jit.trace: expected layers whose ranks hold all tokens; a trace would keep"
                " the number of tokens of the call that it records. Use torch.export"
            )
        return call(A, B, bias, [_ROWS, int(size[1])], *more).view(size)
    return _run(op, ctx, A, B, bias, size, mean_part, scale, k_per_rank)


def _run(
    op: str, ctx: Context, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int],
    mean_part: int | None, scale: torch.Tensor | None, k_per_rank: Sequence[int] | None,
) -> torch.Tensor:  # fmt: skip
    if scale is not None and op not in SCALED:
        raise ArgumentError(f"{op}: scale is given; expected None, for of all ops {', '.join(SCALED)} take one")
    if size[0] == _ROWS:
        size = A.shape[0], *size[1:]
    config = None if k_per_rank else _config(op, ctx, A, B, size, mean_part, scale)
    out = A.new_empty(size) if k_per_rank else ctx.ops.outputs.new(op, A, B, size, config, scale)  # peers write none
    more: dict[str, Any] = {} if scale is None else {"scale": scale}
    if k_per_rank:
        more["k_per_rank"] = tuple(k_per_rank)
    getattr(ctx.ops, op)(out, A, B, bias, config=config, **more)
    return out


def _config(
    op: str,
    ctx: Context,
    A: torch.Tensor,
    B: torch.Tensor,
    size: Sequence[int],
    mean_part: int | None,
    scale: torch.Tensor | None = None,
) -> FusedConfig | None:
    """Return what all ranks take though their parts differ in size; None: each finds it by its own."""
    if mean_part is None or op == MATMUL_GATHER:
        return None
    weights = format_of(B, scale)
    sizes = A.shape[0], B.shape[1], mean_part
    if op in (GATHER_MATMUL, GATED):
        columns = mean_part + mean_part % 2 if op == GATED else mean_part  # of gate and up together: an even number
        sizes = size[0], columns, weights.depth(B.shape[0], A.shape[1])
    ranks, level = ctx.num_ranks, ctx.invariant
    return ctx.ops._calls.plan(requested(op, *sizes, ranks, A.dtype, weights=weights, invariant=level))


def _check_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            check_gradient(op, name, t)


def _register(op: str) -> None:
    # B comes as a transposed weight: a compiler that laid it out anew would copy every weight in every step
    _library.define(op + _SCHEMA, tags=(torch.Tag.needs_exact_strides,))

    def kernel(
        A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int], group: str,
        mean_part: int | None = None, scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return _run(op, registry.find(group), A, B, bias, size, mean_part, scale, depths)

    def fake(
        A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int], group: str,
        mean_part: int | None = None, scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        _check_gradients(op, A=A, B=B, bias=bias, scale=scale)
        return A.new_empty(size)

    _library.impl(op, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"iris_ops::{op}", fake, lib=_library)


for _op in (*OPS, GATED):
    _register(_op)


def _reduce_norm(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
    group: str, mean_part: int | None = None, scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    ctx, M, N = registry.find(group), A.shape[0], B.shape[1]
    config = None if depths else _config(ALL_REDUCE, ctx, A, B, (M, N), mean_part, scale)
    out = A.new_empty(M, N) if depths else ctx.ops.outputs.new(ALL_REDUCE, A, B, (M, N), config, scale)
    scaled = A.new_empty(M, N)
    squares = A.new_empty(rmsnorm_epilogue.spans(N), M, dtype=torch.float32)
    residual, weight = residual.contiguous(), weight.contiguous()
    ctx.ops.matmul_all_reduce_norm(
        out,
        scaled,
        squares,
        A,
        B,
        residual,
        weight,
        bias,
        config,
        scale=scale,
        k_per_rank=tuple(depths) if depths else None,
    )
    return out, scaled, squares


def _fake_reduce_norm(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
    group: str, mean_part: int | None = None, scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_gradients(rmsnorm_epilogue.OP, A=A, B=B, bias=bias, residual=residual, weight=weight, scale=scale)
    squares = A.new_empty(rmsnorm_epilogue.spans(residual.shape[1]), residual.shape[0], dtype=torch.float32)
    return A.new_empty(residual.shape), A.new_empty(residual.shape), squares


def gated(ctx: Rank, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`matmul_gated.matmul_gated`, compiled or not."""
    if is_recording():
        return torch.ops.iris_ops.matmul_gated(A, B, bias, ctx.group_name)
    return matmul_gated(ctx, A, B, bias)


def gather_rows(ctx: Context, rows: torch.Tensor) -> torch.Tensor:
    """Return all ranks' `rows` [m, n], as many of each, in a new tensor [ranks * m, n], compiled or not."""
    if is_recording():
        return torch.ops.iris_ops.gather_rows(rows, ctx.group_name)
    whole = rows.new_empty(ctx.num_ranks * rows.shape[0], rows.shape[1])
    ctx.ccl.all_gather(whole, rows)
    return whole


def sum_over_ranks(ctx: Context, part: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' `part`, of one shape, in a new tensor: the same bits on all ranks."""
    if is_recording():
        return torch.ops.iris_ops.sum_over_ranks(part, ctx.group_name)
    rows = part.contiguous().view(-1, part.shape[-1])
    whole = torch.empty_like(rows)
    ctx.ccl.all_reduce(whole, rows)
    return whole.view(part.shape)


def _fake_sum(part: torch.Tensor, group: str) -> torch.Tensor:
    _check_gradients("sum_over_ranks", part=part)
    return part.new_empty(part.shape)


def _fake_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    _check_gradients("gather_rows", rows=rows)
    return rows.new_empty(registry.find(group).num_ranks * rows.shape[0], rows.shape[1])


def _fake_gated(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    check_gated(A, B, bias)
    return A.new_empty(A.shape[0], B.shape[1] // 2)


_library.define(
    "matmul_gated(Tensor A, Tensor B, Tensor? bias, str group) -> Tensor", tags=(torch.Tag.needs_exact_strides,)
)
_library.impl(
    "matmul_gated",
    lambda A, B, bias, group: matmul_gated(registry.find(group), A, B, bias),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("iris_ops::matmul_gated", _fake_gated, lib=_library)
_library.define(
    rmsnorm_epilogue.OP + "(Tensor A, Tensor B, Tensor? bias, Tensor residual, Tensor weight, str group, "
    "int? mean_part=None, Tensor? scale=None, int[]? depths=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.impl(rmsnorm_epilogue.OP, _reduce_norm, "CompositeExplicitAutograd")
torch.library.register_fake(f"iris_ops::{rmsnorm_epilogue.OP}", _fake_reduce_norm, lib=_library)
_library.define("gather_rows(Tensor rows, str group) -> Tensor")
_library.impl("gather_rows", lambda rows, group: gather_rows(registry.find(group), rows), "CompositeExplicitAutograd")
torch.library.register_fake("iris_ops::gather_rows", _fake_rows, lib=_library)
_library.define("sum_over_ranks(Tensor part, str group) -> Tensor")
_library.impl(
    "sum_over_ranks", lambda part, group: sum_over_ranks(registry.find(group), part), "CompositeExplicitAutograd"
)
torch.library.register_fake("iris_ops::sum_over_ranks", _fake_sum, lib=_library)
