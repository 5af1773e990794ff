"""The product of a decode step's few rows with a linear's weight: a stream of weights, with many of them under way.

cuBLAS cuts such products along K, into parts that a second kernel adds up, and has fewer bytes under way. Here each
program streams the weights of some outputs once, as `iris_ops/kernels/lamport_matmul.py` does for products with an
exchange. It multiplies them as outputs x rows, so that the tensor cores' rows are full however few rows the input has.
Four fifths of a multiprocessor's shared memory are always on their way from memory.

Beyond 16 rows shared memory, at 128 bytes a cycle, limits the product more than memory does. Hence three choices:
  One warp group multiplies: two would both read the rows.
  Where outputs are too few for programs on all multiprocessors, the rows are divided into blocks. The weights are then
  read once more, from L2.
  Where each program would have 32 of 64 rows, it has half as many outputs instead, and the tensor cores multiply rows x
  outputs.

Quantised weights have a separate kernel (`skinny_stream.py`). A launch from Python keeps the host busy longer
than torch's product, so this serves only what is compiled or captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from iris import platform
from iris.device import arch
from iris.device.function import device_function
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
import triton
import triton.language as tl

from ..kernels.activations import joined_tiles
from ..kernels.arguments import Tile, TileEpilogue
from ..kernels.descriptors import in_whole_vectors, operand, rows_operand
from ..kernels.tiles import Matrix, add_bias, first_row, multiply_transposed, rows_from
from ..operators import OPERATORS
from ..planning.epilogues import EPILOGUES
from ..planning.weights import format_of
from ..quantised import linear as quantised
from ..quantised import skinny_stream
from ..recording import row_count

MOST_ROWS, _WIDE_ROWS, _FEW_ROWS, _LEAST_ROWS = 128, 64, 32, 16
_BLOCKS = 16, 32, 64  # of rows
BLOCK_N, NARROW_N = 64, 32
_WARPS = 4
# By rows and outputs of a block and matrices in B, the fastest on an H200: elements along K, stages of the ring.
RINGS = {
    (16, 64, 1): (256, 5), (32, 64, 1): (256, 4), (64, 64, 1): (128, 7), (64, 32, 1): (128, 8),
    (16, 64, 2): (128, 5), (32, 64, 2): (128, 5), (64, 64, 2): (128, 4),
}  # fmt: skip


@triton.jit
def skinny_matmul_kernel(
    a, b, epilogue, out, M, N, K, spans, eps, stride_am, stride_bn, tile: tl.constexpr, SPANS: tl.constexpr,
    activation: tl.constexpr = None,
):  # fmt: skip
    """Compute out [M, N] = a [M, K] @ b [N, K].T + bias [N]; a program computes BLOCK_M by BLOCK_N elements.

    With an `activation`, b and bias have N rows of each of two matrices, whose products it joins. With squares
    [spans, M], `a` comes from the first half of an RMSNorm, and the kernel scales its rows (`rmsnorm_epilogue.py`).
    """
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    bias, squares = epilogue.bias, epilogue.squares
    A = Matrix(a, M, K, stride_am, 1)
    B = Matrix(b, K, N if activation is None else 2 * N, 1, stride_bn, True)
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    first = first_row(row, M, BLOCK_M)
    r, own = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if squares is not None:  # they come while weights do
        s = tl.arange(0, SPANS)
        sums = tl.load(squares + s[:, None] * M + r[None, :], mask=(s < spans)[:, None] & (r < M)[None, :], other=0.0)
    if activation is not None:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = A.load(first, k, BLOCK_M, BLOCK_K).T
            acc = arch.dot(B.load(k, col, BLOCK_K, BLOCK_N).T, rows, acc)
            second = arch.dot(B.load(k, N + col, BLOCK_K, BLOCK_N).T, rows, second)
    else:
        acc = multiply_transposed(A, B, first, col, K, tile)
    if squares is not None:
        factors = 1.0 / tl.sqrt(tl.sum(sums, 0) / K + eps)[None, :]
        acc, second = acc * factors, second * factors
    dtype: tl.constexpr = out.dtype.element_ty
    product = _finished(acc, bias, col, N, BLOCK_N, dtype)
    if activation is not None:
        second = _finished(second, bias + N if bias is not None else bias, col, N, BLOCK_N, dtype)
        product = joined_tiles(product, second, activation)
    arch.lead()
    target, inside = Matrix(out, M, N, N, 1).places(r, col + tl.arange(0, BLOCK_N))
    tl.store(target, product, mask=inside & own[:, None])


@device_function
def _finished(acc, bias, col, N, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """Return the product [rows, BLOCK_N] of a transposed sum, with its bias, rounded."""
    product = acc.T
    if bias is not None:
        product = add_bias(product, bias, col, N, BLOCK_N)
    return arch.round_to(product, dtype)


def is_faster(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "",
) -> bool:
    """Return whether `skinny_matmul` is faster than torch for these arguments now.

    x is [..., K], the weight [N, K], and all rows of x count together. With `scale`, the weight is quantised, on a GPU
    that has its kernels. An eager call loads the kernel of its kind, because a driver may refuse that while a graph is
    captured.
    """
    if not _is_eligible(x, weight, scale, EPILOGUES[epilogue].matrices):
        return False
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return True
    kind = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        weight.shape,
        weight.stride(),
        bias is None,
        epilogue,
        scale is not None and scale.shape,
    )
    if kind not in _loaded:
        _loaded.add(kind)
        skinny_matmul(x, weight, bias, scale, epilogue, launch=_LOAD)
    return False


_loaded: set[tuple] = set()  # kinds of calls


def _is_eligible(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, matrices: int) -> bool:
    if torch.jit.is_tracing() or weight.shape[0] == 0:  # a trace's sizes are tensors, which open no branch
        return False
    if scale is not None:
        form = format_of(weight.t(), scale)
        few = is_eligible(x, form.few_rows(matrices)) and x.dtype == torch.bfloat16
        return few and form.streamable(1, x.shape[-1])
    rows = most_rows(weight.shape[0] // matrices, matrices, torch.compiler.is_compiling(), x.device)
    return x.dtype == weight.dtype and is_eligible(x, rows)


def most_rows(outputs: int, matrices: int, compiled: bool, device: torch.device) -> int:
    """Return the most rows of a product with `outputs` columns that `skinny_matmul` computes, with so many
    `matrices` of 16-bit weights.

    The limits were measured on an H200. They allow up to 64 rows. If each block of rows occupies at most half of the
    multiprocessors, the limit is two blocks' worth. Below a sixth, it is 32 in `compiled` code, which fuses norms with
    the product, and 16 elsewhere.
    """
    if device.type != "cuda":
        return 0
    programs, room = (outputs + BLOCK_N - 1) // BLOCK_N, _multiprocessors(device)
    if statically_known_true(2 * programs > room):
        rows = _WIDE_ROWS
    elif statically_known_true(6 * programs > room):
        rows = MOST_ROWS
    else:
        rows = _FEW_ROWS if compiled else _LEAST_ROWS
    return rows if _has_room(min(rows, _BLOCKS[-1]), matrices, device) else _LEAST_ROWS


def block_of(rows: int, programs: int, room: int, least: int = _LEAST_ROWS) -> int:
    """Return the rows of a block, if each block needs `programs` programs and `room` of them run at once."""
    single = min(max(least, triton.next_power_of_2(rows)), _BLOCKS[-1])
    blocks = (block for block in _BLOCKS if block >= least)
    return next(block for block in blocks if block == single or -(-rows // block) * programs <= room)


def tile_of(rows: int, outputs: int, matrices: int, room: int, least: int = _LEAST_ROWS) -> tuple[int, int]:
    """Return (rows, outputs) of a program's block, if `room` programs run at once; of no fewer rows than `least`."""
    block = block_of(rows, triton.cdiv(outputs, BLOCK_N), room, least)
    narrow = block == 32 and rows % 64 == 0 and matrices == 1  # as many programs, and each weight is read half as often
    return (64, NARROW_N) if narrow else (block, BLOCK_N)


@platform.constant
def _multiprocessors(device: torch.device) -> int:
    return platform.num_programs(device)


@platform.constant
def _has_room(rows: int, matrices: int, device: torch.device) -> bool:
    """Return whether the ring of blocks that was measured fits into shared memory."""
    return depth(platform.shared_bytes(device), matrices, rows) == RINGS[rows, BLOCK_N, matrices]


def is_eligible(x: torch.Tensor, rows: int) -> bool:
    """Return whether products of `x` may be served here, if those of up to `rows` rows are."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_few_rows(x, rows) and not x.requires_grad


def has_few_rows(x: torch.Tensor, most: int) -> bool:
    """Return whether x has 1 to `most` rows.

    Return False in a compiler that leaves the number of rows open, if a cache can hold more. A guard on that number
    would compile everything twice; with 8 rows a token, it would specialise one half for length 2.
    """
    rows = row_count(x)
    return not torch.jit.is_tracing() and statically_known_true(rows <= most) and rows > 0


@dataclass(frozen=True)
class Launch:
    """Options with which `skinny_matmul` launches its kernel.

    `runs`: whether it runs; else it is compiled and loaded only, and the result is not filled. `least_rows`: of a
    block, at least. `out`: contiguous; is filled and returned in place of a new tensor.
    """

    runs: bool = True
    least_rows: int = _LEAST_ROWS
    out: torch.Tensor | None = None


_RUN, _LOAD = Launch(), Launch(runs=False)


def skinny_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None,
    epilogue: str = "", squares: torch.Tensor | None = None, eps: float = 0.0, launch: Launch = _RUN,
) -> torch.Tensor:  # fmt: skip
    """Return x [..., K] @ weight [N, K].T + bias [N], summed in fp32, as a new tensor [..., N]; x has at most
    `MOST_ROWS` rows.

    With `scale`, the weight is quantised as `iris_ops/quantised/packing.py` stores it. x must then be bf16, and the
    format must be `streamable`. `epilogue`: the name of one that follows; one of two matrices joins their columns:
    [..., N/2]. With `squares` [spans, rows], scale rows by `1 / sqrt(squares.sum(0) / K + eps)` before the bias.
    """
    rows = x.reshape(row_count(x), x.shape[-1])
    (M, K), join = rows.shape, EPILOGUES[epilogue]
    N, matrices = weight.shape[0] // join.matrices, join.matrices
    out = x.new_empty(*x.shape[:-1], N) if launch.out is None else launch.out
    if scale is not None:
        rows, weight = map(in_whole_vectors, (rows, weight))
        skinny_stream.multiply(
            out.view(M, N), rows, weight, scale, TileEpilogue(bias, squares=squares), join, eps, launch.runs
        )  # fmt: skip
        return out
    rows, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (rows, weight))
    block_m, block_n = tile_of(M, N, matrices, platform.num_programs(x.device), launch.least_rows)
    block_k, stages = depth(platform.shared_bytes(x.device), matrices, block_m, block_n)
    # by TMA fewer rows take as long or longer
    a = rows_operand(rows, (block_m, block_k))[0] if block_m == _BLOCKS[-1] else rows
    b, _ = operand(weight, (block_n, block_k))
    # blocks that share weights follow each other
    grid = (triton.cdiv(M, block_m) if launch.runs else 0, triton.cdiv(N, block_n))
    spans = 1 if squares is None else squares.shape[0]
    skinny_matmul_kernel[grid](
        a, b, TileEpilogue(bias, squares=squares), out, M, N, K, spans, eps, rows.stride(0), weight.stride(0),
        tile=Tile(block_m, block_n, block_k, B_TRANSPOSED=True), SPANS=triton.next_power_of_2(spans),
        activation=join.activation, num_warps=_WARPS, num_stages=stages, **platform.launch_options(x.device),
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, by `skinny_matmul` where that is faster. With `scale`, the weight is
    quantised."""
    if is_faster(x, weight, bias, scale):
        return called(x, weight, bias, scale)
    return F.linear(x, weight, bias) if scale is None else quantised.linear(x, weight, scale, bias)


def called(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None, epilogue: str = ""
) -> torch.Tensor:
    """Compute `skinny_matmul`, by an operator that compilers can trace."""
    call = torch.ops.iris_ops.skinny_matmul if torch.compiler.is_compiling() else skinny_matmul
    return call(x, weight, bias, scale, epilogue)


@cache
def depth(shared_bytes: int, matrices: int, rows: int, outputs: int = BLOCK_N) -> tuple[int, int]:
    """Return (elements along K of a block, stages of the ring of blocks): as many as shared memory has room for."""
    block_k, stages = RINGS[rows, outputs, matrices]
    room, width = shared_bytes - 1024, matrices * outputs + rows  # some is for barriers
    while block_k > 32 and room < 2 * width * block_k * 2:
        block_k //= 2
    return block_k, max(2, min(stages, room // (width * block_k * 2)))


OPERATORS.add(
    "skinny_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, str epilogue, Tensor? squares=None,"
    " float eps=0) -> Tensor",
    skinny_matmul,
    lambda x, weight, _, __, epilogue, *___: x.new_empty(
        *x.shape[:-1], weight.shape[0] // EPILOGUES[epilogue].matrices
    ),
)
