"""Check the tensors of a mixture's ops, and describe them as a `Problem`. Each error names the argument."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from iris import platform
from iris.errors import ArgumentError, DtypeError, ExpertError, ShapeError
from iris.heap import check_written
import torch

from ..activation import activation_of
from ..checks import check_kind, scaled_format, stored_formats
from ..planning.epilogues import NO_EPILOGUE, Epilogue
from ..planning.experts import MOST_CHOSEN, MOST_EXPERTS, Experts
from ..planning.needs import PLAIN, WeightFormat
from ..planning.operations import BY_NAME, DOWN_REDUCE_SCATTER, ROUTE
from ..planning.weights import dtypes as quantised_dtypes
from ..problem import DTYPES, Problem, part_of
from ..quantised.packing import PACKINGS
from .operands import Down, GateUp, parts_of
from .routing import Routing
from .weights import is_transposed

if TYPE_CHECKING:
    from iris.rank import Rank

_DIMENSIONS = {"B": 3, "weights": 2, "bias": 2, "shared": 2, "A": 2, "out": 2, "experts": 2}


def check_experts(op: str, chosen: torch.Tensor, device: torch.device) -> None:
    """Raise a typed error unless `chosen` is [T,k] of integers, as routers give it."""
    check_kind(op, "experts", chosen, device)
    if chosen.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{op}: experts has dtype {chosen.dtype}; expected torch.int32 or torch.int64")
    if chosen.ndim != 2 or not 1 <= chosen.shape[1] <= MOST_CHOSEN:
        raise ShapeError(
            f"{op}: experts is {tuple(chosen.shape)}; expected (T,k), k from 1 to {MOST_CHOSEN}, or a Routing"
        )
    if not chosen.is_contiguous():
        raise ArgumentError(f"{op}: experts has strides {chosen.stride()}; expected a contiguous tensor")


def check_route(rank: Rank, chosen: torch.Tensor, experts: int) -> None:
    """Raise a typed error for arguments that `ctx.ops.moe_route` does not take."""
    check_experts(ROUTE, chosen, rank.device)
    check_count(ROUTE, experts)
    if rank.agreement is not None:
        check_range(ROUTE, chosen, experts)


def check_count(op: str, experts: object) -> None:
    if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
        raise ArgumentError(f"{op}: num_experts is {experts!r}; expected an integer from 1 to {MOST_EXPERTS}")


def check_range(op: str, chosen: torch.Tensor, experts: int) -> None:
    """Raise `ExpertError` for an index out of range, except while a CUDA graph is captured.

    Reading the indices waits for the device, so this runs only with IRIS_DEBUG=1.
    """
    if platform.is_capturing(chosen.device):
        return
    wrong = chosen[(chosen < 0) | (chosen >= experts)]
    if wrong.numel():
        raise ExpertError(f"{op}: experts has {int(wrong[0])}; expected indices from 0 below {experts}")


def _tensors(op: str, device: torch.device, A: torch.Tensor, given: dict[str, Any], scaled: bool) -> None:
    for name, t in given.items():
        if t is None and name in ("bias", "shared"):
            continue
        check_kind(op, name, t, device)
        if t.ndim != _DIMENSIONS[name]:
            raise ShapeError(f"{op}: {name} has {t.ndim} dimensions {tuple(t.shape)}; expected {_DIMENSIONS[name]}")
        coded = name == "B" and scaled  # whose dtype is checked with its scale's
        dtypes = (*DTYPES, torch.float32) if name == "weights" else DTYPES
        if not coded and t.dtype not in dtypes:
            scales = f", or {quantised_dtypes()} with a scale" if name == "B" else ""
            raise DtypeError(f"{op}: {name} has dtype {t.dtype}; expected one of {', '.join(map(str, DTYPES))}{scales}")
        if not coded and t.dtype != A.dtype and not (name == "weights" and t.dtype == torch.float32):
            alternative = ", or torch.float32" if name == "weights" else ""
            raise DtypeError(f"{op}: {name} has dtype {t.dtype} and A has {A.dtype}; expected the same{alternative}")
        if any(size >= 1 << 31 for size in t.shape) or t.shape[0] * math.prod(t.shape[1:2]) >= 1 << 31:
            raise ShapeError(
                f"{op}: {name} is {tuple(t.shape)}; expected each size below 2**31, and in three dimensions "
                f"the product of the first two as well"
            )


def _expect(op: str, name: str, t: torch.Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(t.shape) != shape:
        raise ShapeError(f"{op}: {name} is {tuple(t.shape)}; expected {shape}, {letters}")


def _check_routing(op: str, experts: torch.Tensor | Routing, count: int, device: torch.device) -> torch.Tensor:
    chosen = experts.chosen if isinstance(experts, Routing) else experts
    check_experts(op, chosen, device)
    if isinstance(experts, Routing) and experts.experts != count:
        raise ArgumentError(f"{op}: experts is a Routing among {experts.experts}; expected {count}, as many as B has")
    return chosen


def _weight(op: str, B: torch.Tensor, scale: torch.Tensor | None, K: int, device: torch.device) -> WeightFormat:
    """Return the format of B, of which dimensions are checked. Raises a typed error where `scale` or K does not fit."""
    if scale is None:
        return PLAIN
    check_kind(op, "scale", scale, device)
    stored_formats(op, B)
    if B.stride(1) != 1 and B.shape[1] > 1:
        raise ArgumentError(
            f"{op}: B has strides {B.stride()} and a scale; expected the transpose of a contiguous "
            f"[E,N,K] whose last dimension is packed"
        )
    format = scaled_format(op, B, scale)
    if scale.ndim > 2 and not scale[0, :1].is_contiguous():
        raise ArgumentError(f"{op}: scale has strides {scale.stride()}; expected contiguous rows")
    packing = PACKINGS[format.packing]
    if B.shape[1] * packing.per_element != (padded := packing.padded(K, format.group or None)):
        raise ShapeError(
            f"{op}: B is {tuple(B.shape)} for K = {K}; expected {padded // packing.per_element} rows, "
            f"which hold {padded} packed numbers"
        )
    return format


def described(rank: Rank, call: Any) -> Problem:
    """Return the problem of a call of a mixture's op. Raises a typed error where its arguments do not fit."""
    describe = _describe_gate_up if isinstance(call.tensors, GateUp) else _describe_down
    check_written(call.op, "out", call.tensors.out)
    return describe(call.op, rank, call.tensors)


def check_values(rank: Rank, call: Any, problem: Problem) -> None:
    """Raise `ExpertError` for an expert out of range."""
    check_range(call.op, parts_of(call.tensors.where)[0], problem.experts.count)


def _describe_gate_up(op: str, ctx: Rank, tensors: GateUp) -> Problem:
    device, (out, A, B, experts, bias, activation, interleaved, scale) = ctx.device, tensors
    _tensors(op, device, A, {"A": A, "B": B, "bias": bias, "out": out}, scale is not None)
    format = _weight(op, B, scale, A.shape[1], device)
    count, H, columns = B.shape
    if format is not PLAIN:
        H = A.shape[1]
    check_count(op, count)
    chosen = _check_routing(op, experts, count, device)
    tokens, k = chosen.shape
    _expect(op, "A", A, (tokens, H), "(T,H), T as experts (T,k) has, H as B (E,H,2I)")
    joins = columns == BY_NAME[op].epilogue.matrices * out.shape[1]
    epilogue = BY_NAME[op].epilogue if joins else NO_EPILOGUE
    if columns != epilogue.matrices * out.shape[1]:
        raise ShapeError(f"{op}: B is {tuple(B.shape)}, out is {tuple(out.shape)}; expected B (E,H,2I), out (T*k,I)")
    _expect(op, "out", out, (tokens * k, columns // epilogue.matrices), "(T*k,I)")
    if bias is not None:
        _expect(op, "bias", bias, (count, columns), "(E,2I), as B's columns")
    activation_of(activation)
    if type(interleaved) is not bool or interleaved and not joins and columns:
        raise ArgumentError(f"{op}: interleaved is {interleaved!r}; expected a bool, False where B is (E,H,I)")
    return _problem(ctx, op, (tokens, columns, H), k, tensors, format, epilogue)


def _describe_down(op: str, ctx: Rank, tensors: Down) -> Problem:
    device, (out, A, B, experts, weights, bias, shared, scale) = ctx.device, tensors
    given = {"A": A, "B": B, "weights": weights, "bias": bias, "shared": shared, "out": out}
    _tensors(op, device, A, given, scale is not None)
    format = _weight(op, B, scale, A.shape[1], device)
    count, width, H = B.shape
    if format is not PLAIN:
        width = A.shape[1]
    check_count(op, count)
    chosen = _check_routing(op, experts, count, device)
    tokens, k = chosen.shape
    _expect(op, "A", A, (tokens * k, width), "(T*k,I), T and k as experts (T,k) has, I as B (E,I,H)")
    _expect(op, "weights", weights, (tokens, k), "(T,k), as experts")
    rows, letters = tokens, "(T,H)"
    if op == DOWN_REDUCE_SCATTER:
        rows, letters = part_of(tokens, ctx.num_ranks, ctx.cur_rank), "(T/w,H), rows as torch.chunk splits them"
    _expect(op, "out", out, (rows, H), letters)
    if bias is not None:
        _expect(op, "bias", bias, (count, H), "(E,H)")
    if shared is not None:
        _expect(op, "shared", shared, (tokens, H), "(T,H)")
    return _problem(ctx, op, (tokens, H, width), k, tensors, format)


def _problem(
    ctx: Rank, op: str, sizes: tuple[int, int, int], top_k: int, tensors: GateUp | Down, format: WeightFormat,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Problem:  # fmt: skip
    """Return the problem of checked tensors."""
    operation, B = BY_NAME[op], tensors.B
    problem = Problem(
        op, operation.forms[0], *sizes, ctx.num_ranks, tensors.A.dtype, format,
        epilogue, experts=Experts(len(B), top_k, format is PLAIN and not is_transposed(B)),
    )  # fmt: skip
    return ctx.level.promise(problem)
