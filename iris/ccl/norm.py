"""All-reduce, residual sum and RMSNorm in one kernel: what follows a product or a mixture of experts in a transformer.

    total = residual + sum over ranks of inp                         rounded to the tensors' dtype
    out   = total / sqrt(mean(total ** 2) + eps) * weight            of each row, in fp32, rounded once

A program handles whole rows, so it knows a row's mean when the row's last value has arrived. Partial sums travel as
Lamport values (`iris/device/lamport.py`): one hop, without fence or flag.

    one-shot   every rank sends its rows to every peer, and each rank sums all rows itself.
    two-shot   row r belongs to rank r % world. The owner sums it, adds the residual and sends the rounded sum to every
               peer. Each rank normalises all rows, so that only one tensor travels in the second hop. Ranks hold the
               same residual, so both forms give the same bits.

No wait is circular: a program sends all of its rows before it takes any, and the sums of the second hop before the
first of its waits for one. Two halves of the staging memory are enough, as `lamport.py` shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import arch
from ..device.context import DeviceContext
from ..device.function import device_function
from ..device.lamport import load_bases, put, take, without_sentinel
from ..device.sync import advance, next_epoch
from ..device.waits import waiter_number
from ..errors import ArgumentError, DtypeError, ShapeError
from ..heap import check_memory, check_tensor, check_written, span
from ..transforms import check_undifferentiated
from .arguments import NormForm
from .config import Config
from .plan import plan
from .problem import ALL_REDUCE, Problem

if TYPE_CHECKING:
    from ..machines import LinkRates
    from .workspace import Area

OP = "all_reduce_norm"
AREA = "norm"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
MAX_COLUMNS = 1 << 15  # of a row, which one program keeps in registers
_MAX_STAGED = 1 << 25  # bytes of staging memory; a call with more rows takes several launches
_FP8_MAX = tl.constexpr(448.0)
_CARRIERS = {2: torch.int16, 4: torch.int32}


@device_function
def _row(tensor, row, stride, c, inside, M):
    """Load row `row` of a tensor; zeros for a row that does not exist."""
    return tl.load(tensor + tl.cast(row, tl.int64) * stride + c, mask=inside & (row < M), other=0.0)


@device_function
def _finish(h, out, weight, scale, c, inside, eps, N, HAS_SCALE: tl.constexpr):
    """Store the RMSNorm of the row `h`, in fp32 and already rounded to the residual's dtype, to the row `out`."""
    h = tl.where(inside, h, 0.0)
    y = h * tl.rsqrt(tl.sum(h * h) / N + eps) * weight.to(tl.float32)
    if HAS_SCALE:
        y = tl.minimum(tl.maximum(y / tl.load(scale), -_FP8_MAX), _FP8_MAX)
        tl.store(out + c, y.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + c, arch.round_to(y, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def all_reduce_norm_kernel(
    inp, residual, total, out, weight, scale, staging, sync, ctx_ptr, M, N, stride_im, stride_rm, stride_tm, stride_om,
    eps, half_elements, form: tl.constexpr, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr,
):  # fmt: skip
    # form: `NormForm`.
    # staging: two halves, by the epoch's parity, of Lamport values [source rank, row, N]; with TWO_SHOT a source sends
    # each owner that owner's rows only, and the sums follow as [row, N].
    BLOCK: tl.constexpr = form.BLOCK
    TWO_SHOT: tl.constexpr = form.TWO_SHOT
    HAS_SCALE: tl.constexpr = form.HAS_SCALE
    dtype: tl.constexpr = inp.dtype.element_ty
    first, step = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    inside = c < N
    own = _row(inp, first, stride_im, c, inside, M)
    before = _row(residual, first, stride_rm, c, inside, M)
    epoch = next_epoch(sync)
    bases = load_bases(ctx_ptr, WORLD_SIZE)
    ctx = DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    half = staging + tl.cast(epoch & 1, tl.int64) * half_elements
    area = tl.cast(M, tl.int64) * N  # of one source
    sums = half + WORLD_SIZE * area

    for row in range(first, M, step):
        part = own
        if row != first:
            part = _row(inp, row, stride_im, c, inside, M)
        values = without_sentinel(part.to(tl.float32), dtype)
        place = half + ctx.rank * area + tl.cast(row, tl.int64) * N + c
        if TWO_SHOT:
            if row % WORLD_SIZE != ctx.rank:
                put(ctx, place, values, inside, bases, row % WORLD_SIZE)
        else:
            for i in tl.static_range(1, WORLD_SIZE):
                put(ctx, place, values, inside, bases, (ctx.rank + i) % WORLD_SIZE)
    factors = tl.load(weight + c, mask=inside, other=0.0)
    advance(sync, epoch)  # while the values are under way

    for row in range(first, M, step):
        r = tl.cast(row, tl.int64)
        mine = True
        if TWO_SHOT:
            mine = row % WORLD_SIZE == ctx.rank
        if mine:
            summed, ok = take(
                ctx, half + r * N + c, area, inside, 0, epoch, WAITER, dtype, WORLD_SIZE, own.to(tl.float32)
            )
            h = arch.round_to(summed + before.to(tl.float32), dtype)
            if TWO_SHOT:
                if ok:
                    values = without_sentinel(h.to(tl.float32), dtype)
                    for i in tl.static_range(1, WORLD_SIZE):
                        put(ctx, sums + r * N + c, values, inside, bases, (ctx.rank + i) % WORLD_SIZE)
            tl.store(total + r * stride_tm + c, h, mask=inside)
            _finish(h.to(tl.float32), out + r * stride_om, factors, scale, c, inside, eps, N, HAS_SCALE)
        own = _row(inp, row + step, stride_im, c, inside, M)
        before = _row(residual, row + step, stride_rm, c, inside, M)
    if TWO_SHOT:
        for row in range(first, M, step):
            owner = row % WORLD_SIZE
            if owner != ctx.rank:
                r = tl.cast(row, tl.int64)
                h, _ = take(ctx, sums + r * N + c, 0, inside, owner, epoch, WAITER, dtype, 1, patience=2)
                tl.store(total + r * stride_tm + c, arch.round_to(h, dtype), mask=inside)
                _finish(h, out + r * stride_om, factors, scale, c, inside, eps, N, HAS_SCALE)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call: all [..., N] but weight [N] and scale [1]. `total` may be `residual` itself."""

    out: torch.Tensor
    residual: torch.Tensor
    inp: torch.Tensor
    weight: torch.Tensor
    total: torch.Tensor
    scale: torch.Tensor | None

    def named(self) -> dict[str, torch.Tensor]:
        """Return the distinct tensors that were given, by their argument's name."""
        tensors = {"out": self.out, "residual": self.residual, "inp": self.inp, "weight": self.weight}
        if self.total is not self.residual:
            tensors["total"] = self.total
        return tensors if self.scale is None else {**tensors, "scale": self.scale}

    def pieces(self, most: int) -> Iterator[Tensors]:
        """Yield the tensors as rows [M, N], at most `most` rows at a time."""
        rows = (t.view(-1, t.shape[-1]).split(most) for t in (self.out, self.residual, self.inp, self.total))
        for out, residual, inp, total in zip(*rows, strict=True):
            yield replace(self, out=out, residual=residual, inp=inp, total=total)


def check(device: torch.device, given: Tensors, eps: float) -> None:
    """Raise a typed error unless the arguments make a call of `all_reduce_norm`."""
    inp, scale, tensors = given.inp, given.scale, given.named()
    for name, t in tensors.items():
        check_tensor(OP, name, t, device)
        check_undifferentiated(OP, name, t)
    if inp.dtype not in DTYPES:
        raise DtypeError(f"{OP}: inp has dtype {inp.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    dtypes = {
        "out": inp.dtype if scale is None else FP8,
        "residual": inp.dtype,
        "total": inp.dtype,
        "weight": inp.dtype,
        "scale": torch.float32,
    }
    for name in tensors:
        if name in dtypes and tensors[name].dtype != dtypes[name]:
            reason = ", since scale is given" if name == "out" and scale is not None else ""
            raise DtypeError(f"{OP}: {name} has dtype {tensors[name].dtype}; expected {dtypes[name]}{reason}")
    if inp.ndim < 1 or not 0 < inp.shape[-1] <= MAX_COLUMNS:
        raise ShapeError(f"{OP}: inp is {tuple(inp.shape)}; expected [..., N] with N from 1 to {MAX_COLUMNS}")
    for name, t in tensors.items():
        shape = inp.shape[-1:] if name == "weight" else inp.shape
        if name != "scale" and t.shape != shape:
            raise ShapeError(f"{OP}: {name} is {tuple(t.shape)}; expected {tuple(shape)}, for inp {tuple(inp.shape)}")
    if scale is not None and scale.numel() != 1:
        raise ShapeError(f"{OP}: scale is {tuple(scale.shape)}; expected one element")
    for name, t in tensors.items():
        if t.numel() and (t.stride(-1) != 1 or (t.ndim > 2 and not t.is_contiguous())):
            raise ArgumentError(
                f"{OP}: {name} has strides {t.stride()}; expected a stride of 1 in the last dimension, and contiguous "
                f"memory if there are more than two dimensions"
            )
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < float("inf"):
        raise ArgumentError(f"{OP}: eps is {eps!r}; expected a finite number from 0")
    written = ["out", "total" if "total" in tensors else "residual"]
    for name in written:
        check_written(OP, name, tensors[name])
    _check_places(tensors, written)


def _check_places(tensors: dict[str, torch.Tensor], written: list[str]) -> None:
    """Raise where a tensor has no memory, and where one of those that are `written` shares memory with another."""
    names = list(tensors)
    places = {name: (t.data_ptr(), t.data_ptr() + span(t)) for name, t in tensors.items()}
    check_memory(OP, names, [places[name][0] for name in names], [span(tensors[name]) for name in names])
    for name in written:
        begin, end = places[name]
        for other, (first, last) in places.items():
            if other != name and begin < last and first < end:
                raise ArgumentError(f"{OP}: {name} overlaps {other} in memory; expected separate tensors")


def two_shot(rows: int, columns: int, dtype: torch.dtype, world_size: int, machine: LinkRates) -> bool:
    """Return whether two hops of fewer bytes are faster than one, by the plan of an all-reduce of this size."""
    problem = Problem(ALL_REDUCE, rows * columns, 0, 0, dtype, world_size)
    return world_size > 2 and plan(problem, Config(protocol="lamport"), machine).variant == "two_shot"


def staged_bytes(rows: int, columns: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of staging memory of one launch: two halves, each with every source's rows and the sums."""
    return 2 * (world_size + 1) * rows * columns * dtype.itemsize


def rows_at_once(rows: int, columns: int, dtype: torch.dtype, world_size: int) -> int:
    """Return how many rows one launch takes."""
    return max(1, min(rows, _MAX_STAGED // staged_bytes(1, columns, dtype, world_size)))


@cache
def _form(block: int, two_shot: bool, has_scale: bool) -> NormForm:
    """Return the same object each time, so that a later call builds none."""
    return NormForm(block, two_shot, has_scale)


def arguments(
    area: Area, context: torch.Tensor, world_size: int, machine: LinkRates, tensors: Tensors, eps: float
) -> dict:
    """Return the kernel's arguments by name. `tensors`: as rows [M, N]."""
    inp, scale = tensors.inp, tensors.scale
    M, N = inp.shape
    staging = area.staging.view(_CARRIERS[inp.dtype.itemsize])
    return dict(
        inp=inp,
        residual=tensors.residual,
        total=tensors.total,
        out=tensors.out,
        weight=tensors.weight,
        scale=tensors.weight if scale is None else scale,
        staging=staging,
        sync=area.sync,
        ctx_ptr=context,
        M=M,
        N=N,
        stride_im=inp.stride(0),
        stride_rm=tensors.residual.stride(0),
        stride_tm=tensors.total.stride(0),
        stride_om=tensors.out.stride(0),
        eps=float(eps),
        half_elements=staging.numel() // 2,
        form=_form(triton.next_power_of_2(N), two_shot(M, N, inp.dtype, world_size, machine), scale is not None),
        WORLD_SIZE=world_size,
        WAITER=waiter_number(OP),
    )


def num_warps(columns: int) -> int:
    """Return the warps of a program: 16 values of a row in each thread, up to the most threads."""
    return max(1, min(32, triton.next_power_of_2(columns) // 512))


def grid(rows: int, machine: LinkRates) -> tuple[int, int, int]:
    """Return the grid. A program waits only for the peers' programs of its own number, so any grid ends."""
    return min(rows, machine.resident * machine.num_programs), 1, 1
