"""Turn tensors into a `Problem`: what is moved where, and how it is cut. All arguments are checked here; no triton.

Shapes, w the number of ranks; a tensor may have any number of dimensions, its last one being the columns:

    all_reduce      inp and out of one shape
    all_gather      inp (M, N), out (w * M, N)
    all_to_all      inp and out (M, N * w): columns from j * N on go to rank j, those from i * N on come from rank i
    reduce_scatter  inp (M, N), out (M/w, N): this rank's rows, parts as torch.chunk splits them; or out (M, N), of
                    which this rank's tiles are written; of a single row all are rank 0's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ArgumentError, DtypeError, ShapeError
from ..heap import check_tensor, check_written, extent
from ..transforms import check_undifferentiated

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
OPS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)

SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Signed types of 1 to 8 bytes: what is only copied travels as these, and unsigned sums are the signed ones' bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of a tensor in one call; offsets fit into 32 bits, with room for the last units.
MAX_ELEMENTS = 2**31 - 2**20


@dataclass(frozen=True)
class Rows:
    """A tensor's elements in memory: `rows` of `cols` elements, and the strides."""

    rows: int
    cols: int
    stride_row: int
    stride_col: int

    @property
    def flat(self) -> bool:
        return self.rows == 1 and self.stride_col == 1


@dataclass(frozen=True)
class Problem:
    """One collective. `n`: elements that a rank puts in. `part`: elements of the largest part that a rank is given or
    gives, where the shapes say so; else 0. `cols`: columns of the tiles of a reduce-scatter into tiles; else 0.
    """

    op: str
    n: int
    part: int
    cols: int
    dtype: torch.dtype
    world_size: int

    @property
    def reduces(self) -> bool:
        return self.op in (ALL_REDUCE, REDUCE_SCATTER)

    @property
    def text(self) -> str:
        """Return the problem as the first line of a plan shows it."""
        return f"{self.op} of {self.n} elements of {self.dtype} on each of {self.world_size} ranks"

    @property
    def nbytes(self) -> int:
        """Return the bytes of a rank's input."""
        return self.n * self.dtype.itemsize


def bits(t: torch.Tensor, summed: bool) -> torch.Tensor:
    """Return `t` as a view in the dtype that the kernels read."""
    if summed and t.dtype != torch.uint8:
        return t
    return t.view(_BITS[t.dtype.itemsize])


def rows_of(op: str, name: str, t: torch.Tensor, columns: bool = False) -> Rows:
    """Return how `t` lies in memory: as one row if it is contiguous, unless `columns` asks for its own rows."""
    if t.is_contiguous() and not columns:
        return Rows(1, t.numel(), t.numel(), 1)
    if t.ndim == 1:
        return Rows(1, t.numel(), t.numel(), t.stride(0))
    try:
        m = t.view(-1, t.shape[-1])
    except RuntimeError:
        raise ArgumentError(
            f"{op}: {name} {tuple(t.shape)} has strides {t.stride()}; expected rows at one stride. Pass "
            f"{name}.contiguous()"
        ) from None
    return Rows(m.shape[0], m.shape[1], m.stride(0), m.stride(1))


def describe(op: str, out: torch.Tensor, inp: torch.Tensor, rank: int, world_size: int) -> Problem:
    """Return the problem that the shapes describe. Raises `ShapeError` if they fit none."""
    w, part, cols = world_size, 0, 0
    inp_shape, out_shape = tuple(inp.shape), tuple(out.shape)
    if op == ALL_REDUCE:
        matches, expected = inp_shape == out_shape, "one shape"
    elif op == ALL_GATHER:
        matches = inp.ndim > 0 and out_shape == (inp_shape[0] * w, *inp_shape[1:])
        part, expected = inp.numel(), "inp (M, N) and out (w * M, N)"
    elif op == ALL_TO_ALL:
        matches = inp.ndim > 0 and inp_shape == out_shape and inp_shape[-1] % w == 0
        part, expected = inp.numel() // w, "inp and out (M, N * w)"
    else:
        share = -(-inp_shape[0] // w) if inp.ndim else 0
        own = max(0, min(share, inp_shape[0] - rank * share)) if inp.ndim else 0
        own_shape = own, *inp_shape[1:]
        matches = inp.ndim > 0 and out_shape in (own_shape, inp_shape)
        if matches and out_shape != own_shape and inp_shape[0] > 1:  # both forms have the shape of a single row
            cols = inp_shape[-1]
        part = 0 if cols or not matches else share * (inp.numel() // max(1, inp_shape[0]))
        expected = f"inp (M, N) and out (M/w, N), here {own_shape}, or (M, N)"
    if not matches:
        raise ShapeError(f"{op}: inp is {inp_shape}, out is {out_shape} on rank {rank} of w = {w}; expected {expected}")
    for name, t in (("inp", inp), ("out", out)):
        if t.numel() > MAX_ELEMENTS:
            raise ShapeError(f"{op}: {name} has {t.numel()} elements; expected at most {MAX_ELEMENTS}, in a call")
    summed = op in (ALL_REDUCE, REDUCE_SCATTER)
    dtype = inp.dtype if summed and inp.dtype != torch.uint8 else _BITS[inp.dtype.itemsize]
    return Problem(op, inp.numel(), part, cols, dtype, w)


def check_tensors(op: str, out: torch.Tensor, inp: torch.Tensor, device: torch.device) -> None:
    """Raise a typed error for a tensor of the wrong kind, dtype or device."""
    for name, t in (("inp", inp), ("out", out)):
        check_tensor(op, name, t, device)
        if op in (ALL_REDUCE, REDUCE_SCATTER) and t.dtype not in SUMMED:
            raise DtypeError(f"{op}: {name} has dtype {t.dtype}; expected one of {', '.join(map(str, SUMMED))}")
        if t.dtype.itemsize not in _BITS or t.is_conj() or t.is_neg():
            raise DtypeError(f"{op}: {name} has dtype {t.dtype}; expected elements of at most 8 bytes, not conjugated")
        check_undifferentiated(op, name, t)
    if out.dtype != inp.dtype:
        raise DtypeError(f"{op}: out has dtype {out.dtype} and inp has {inp.dtype}; expected the same")
    check_written(op, "out", out)


def check_overlap(op: str, out: torch.Tensor, inp: torch.Tensor, rank: int) -> None:
    """Raise `ArgumentError` where `out` and `inp` overlap.

    Two cases are allowed in place: all_reduce into its input, and all_gather from this rank's part of `out`.
    """
    if not out.numel() or not inp.numel():
        return
    (a0, a1), (b0, b1) = extent(out), extent(inp)
    if a0 >= b1 or b0 >= a1:
        return
    own = out
    if op == ALL_GATHER:
        own = out[rank * inp.shape[0] : (rank + 1) * inp.shape[0]]
    same = (own.data_ptr(), own.shape, own.stride()) == (inp.data_ptr(), inp.shape, inp.stride())
    if op not in (ALL_REDUCE, ALL_GATHER) or not same:
        raise ArgumentError(
            f"{op}: out overlaps inp in memory; expected separate tensors, or for all_reduce the same one, for "
            f"all_gather this rank's part of out"
        )
