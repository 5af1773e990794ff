"""The fused ops as torch operators, so that torch.compile sees one opaque node where eager code sees a call.

    torch.ops.iris_ops.<op>(A, B, bias, size, group, mean_part=None, scale=None, k_per_rank=None) -> Tensor
    torch.ops.iris_ops.matmul_all_reduce_norm(A, B, bias, residual, weight, group, mean_part=None, scale=None,
                                              k_per_rank=None) -> (...)
    torch.ops.iris_ops.gather_rows(rows, group) -> Tensor
    torch.ops.iris_ops.sum_over_ranks(part, group) -> Tensor

All ops of `operations.TABLE` have the same schema, except the one that returns (out, scaled, squares), see
`rmsnorm_epilogue.py`. The last two operators have no product: they are `ctx.ccl.all_gather` and `ctx.ccl.all_reduce`.
Products without an exchange are registered in `local/`. An operator is functional: its result is a new tensor, and
nothing that the caller sees is mutated. Its arguments, besides those of the op:

    size          the shape of this rank's result
    group         the name of the context (`ctx.group_name`)
    mean_part     for ranks whose parts differ in size: all plan by this size in place of K (in `all_gather_matmul` and
                  its epilogues in place of N, the columns of B). Ranks that planned by different sizes could choose
                  different tiles, and wait for signals that are never sent
    scale         the scales of a quantised B, which all ops but `matmul_all_gather` take
    k_per_rank    each rank's K, for sums by `sum_tree.py`; `mean_part` then has no effect

Every rank must run the same operators in the same order, which the ranks' compilers do for the same model.

`product` is what layers call, compiled or not. Eager code goes straight to `ctx.ops`. That costs the host 0.6 us
more than a call of `ctx.ops` in the layer; through torch's dispatcher it would cost 3 us, by `torch.library.custom_op`
33 us. No operator has a gradient; requesting one raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from iris import registry
from iris.ccl.collectives import Collectives
from iris.errors import ArgumentError
import torch

from .checks import check_gradients
from .kernels import rmsnorm_epilogue
from .operators import OPERATORS
from .ops import Ops
from .planning.operations import BY_NAME, TABLE
from .planning.weights import format_of
from .problem import ALL_REDUCE, MATMUL_GATHER, SCALED
from .recording import is_recording

if TYPE_CHECKING:
    from .config import FusedConfig


class Context(Protocol):
    """The interface of a context that operators find by its name: `iris.Iris`, or a replacement in tests and
    benchmarks."""

    cur_rank: int
    num_ranks: int
    group_name: str

    @property
    def ops(self) -> Ops: ...

    @property
    def ccl(self) -> Collectives: ...


_SCHEMA = (
    "(Tensor A, Tensor B, Tensor? bias, SymInt[] size, str group, int? mean_part=None, Tensor? scale=None, "
    "int[]? k_per_rank=None) -> Tensor"
)
_NORM_SCHEMA = (
    "(Tensor A, Tensor B, Tensor? bias, Tensor residual, Tensor weight, str group, int? mean_part=None, "
    "Tensor? scale=None, int[]? k_per_rank=None) -> (Tensor, Tensor, Tensor)"
)
_ROWS = -1  # as many rows as A has


class Parts(NamedTuple):
    """The differences between ranks' parts. `mean`: the size by which all plan. `k_per_rank`: each rank's K, of ordered
    sums."""

    mean: int | None = None
    k_per_rank: tuple[int, ...] | None = None


ALIKE = Parts()


class _Product(NamedTuple):
    """The arguments of an operator of `_SCHEMA`."""

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    size: Sequence[int]
    group: str
    mean_part: int | None = None
    scale: torch.Tensor | None = None
    k_per_rank: Sequence[int] | None = None


class _NormedProduct(NamedTuple):
    """The arguments of the operator of `_NORM_SCHEMA`."""

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor
    weight: torch.Tensor
    group: str
    mean_part: int | None = None
    scale: torch.Tensor | None = None
    k_per_rank: Sequence[int] | None = None


def product(
    op: str, ctx: Context, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, size: tuple[int, ...],
    parts: Parts = ALIKE, scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of `op`, one of `operations.TABLE`: this rank's part, a new tensor of shape `size`."""
    if is_recording():
        call, more = getattr(torch.ops.iris_ops, op), (ctx.group_name, parts.mean, scale, parts.k_per_rank)
        if not torch.jit.is_tracing():
            return call(A, B, bias, size, *more)
        # Of an operator's sizes a traced graph keeps the numbers; those of a view it computes anew.
        if op not in (ALL_REDUCE, MATMUL_GATHER):
            raise ArgumentError(
                f"{op} is called in torch.jit.trace, which would keep the number of tokens of this call: expected "
                "layers whose ranks hold all tokens (sequence_parallel=False), or torch.export"
            )
        return call(A, B, bias, [_ROWS, int(size[1])], *more).view(size)
    return _run(op, ctx, A, B, bias, size, parts, scale)


def _run(
    op: str, ctx: Context, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int],
    parts: Parts, scale: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if scale is not None and not BY_NAME[op].scaled:
        raise ArgumentError(f"{op}: scale is given; expected None, because only {', '.join(SCALED)} take one")
    if size[0] == _ROWS:
        size = A.shape[0], *size[1:]
    (mean, k_per_rank), config = parts, None
    more: dict[str, Any] = {} if scale is None else {"scale": scale}
    if k_per_rank:
        out, more["k_per_rank"] = A.new_empty(size), k_per_rank  # peers write no such result
    else:
        config = None if mean is None else _config(op, ctx, A, B, size, mean, scale)
        out = ctx.ops.outputs.new(op, A, B, size, config, scale)
    getattr(ctx.ops, op)(out, A, B, bias, config=config, **more)
    return out


def _config(
    op: str, ctx: Context, A: torch.Tensor, B: torch.Tensor, size: Sequence[int], mean_part: int,
    scale: torch.Tensor | None,
) -> FusedConfig | None:  # fmt: skip
    """Return what all ranks take though their parts differ in size; None: each finds it by its own."""
    operation = BY_NAME[op]
    if not operation.sums and operation.shared != "K":
        return None
    weights = format_of(B, scale)
    sizes = A.shape[0], B.shape[1], mean_part
    if operation.shared == "K":
        sizes = size[0], operation.columns(mean_part), weights.depth(B.shape[0], A.shape[1])
    calls = ctx.ops._calls
    return calls.plan(calls.requested(op, *sizes, A.dtype, weights=weights))


def _fake_product(op: str, given: _Product) -> torch.Tensor:
    check_gradients(op, A=given.A, B=given.B, bias=given.bias, scale=given.scale)
    return given.A.new_empty(given.size)


def _run_product(op: str, given: _Product) -> torch.Tensor:
    A, B, bias, size, group, mean_part, scale, k_per_rank = given
    return _run(op, registry.find(group), A, B, bias, size, _parts(mean_part, k_per_rank), scale)


def _parts(mean_part: int | None, k_per_rank: Sequence[int] | None) -> Parts:
    return Parts(mean_part, tuple(k_per_rank) if k_per_rank else None)


def _register(op: str) -> None:
    OPERATORS.add(
        op + _SCHEMA,
        lambda *given, **named: _run_product(op, _Product(*given, **named)),
        lambda *given, **named: _fake_product(op, _Product(*given, **named)),
    )


for _operation in TABLE:
    if _operation.name != rmsnorm_epilogue.OP:  # whose schema is another
        _register(_operation.name)


def _reduce_norm(given: _NormedProduct) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    A, B, bias, residual, weight, group, mean_part, scale, k_per_rank = given
    ctx, M, N = registry.find(group), A.shape[0], B.shape[1]
    config = None if k_per_rank or mean_part is None else _config(ALL_REDUCE, ctx, A, B, (M, N), mean_part, scale)
    out = A.new_empty(M, N) if k_per_rank else ctx.ops.outputs.new(ALL_REDUCE, A, B, (M, N), config, scale)
    scaled = A.new_empty(M, N)
    squares = A.new_empty(rmsnorm_epilogue.spans(N), M, dtype=torch.float32)
    epilogue = residual.contiguous(), weight.contiguous()
    more = {"scale": scale, "k_per_rank": tuple(k_per_rank) if k_per_rank else None}
    ctx.ops.matmul_all_reduce_norm(out, scaled, squares, A, B, *epilogue, bias, config, **more)
    return out, scaled, squares


def _fake_reduce_norm(given: _NormedProduct) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    A, residual = given.A, given.residual
    tensors = dict(A=A, B=given.B, bias=given.bias, residual=residual, weight=given.weight, scale=given.scale)
    check_gradients(rmsnorm_epilogue.OP, **tensors)
    squares = A.new_empty(rmsnorm_epilogue.spans(residual.shape[1]), residual.shape[0], dtype=torch.float32)
    return A.new_empty(residual.shape), A.new_empty(residual.shape), squares


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
    check_gradients("sum_over_ranks", part=part)
    return part.new_empty(part.shape)


def _fake_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    check_gradients("gather_rows", rows=rows)
    return rows.new_empty(registry.find(group).num_ranks * rows.shape[0], rows.shape[1])


OPERATORS.add(
    rmsnorm_epilogue.OP + _NORM_SCHEMA,
    lambda *given, **named: _reduce_norm(_NormedProduct(*given, **named)),
    lambda *given, **named: _fake_reduce_norm(_NormedProduct(*given, **named)),
)
OPERATORS.add(
    "gather_rows(Tensor rows, str group) -> Tensor",
    lambda rows, group: gather_rows(registry.find(group), rows),
    _fake_rows,
    exact_strides=False,
)
OPERATORS.add(
    "sum_over_ranks(Tensor part, str group) -> Tensor",
    lambda part, group: sum_over_ranks(registry.find(group), part),
    _fake_sum,
    exact_strides=False,
)
