"""`skinny_matmul` with quantised weights, by the stream of `weight_stream.py`, on NVIDIA Hopper."""

from iris import platform
from iris.device import arch
from iris_ops.kernels.activations import joined_tiles
from iris_ops.kernels.arguments import TileEpilogue
from iris_ops.planning.epilogues import NO_EPILOGUE, Epilogue
from iris_ops.quantised import weight_stream
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def skinny_stream_kernel(
    a, b, scales, epilogue, out, M, N, K, spans, eps, form: gl.constexpr, widen: gl.constexpr, activation: gl.constexpr
):
    """Multiply few rows by a streamed quantised weight, with the arguments of `skinny_matmul_kernel`.

    a, b, scales, epilogue.b_scales: as in `weight_stream.py`; with an activation, they have 2 N columns.
    """
    BLOCK_M: gl.constexpr = form.BLOCK_M
    squares = epilogue.squares
    dtype: gl.constexpr = out.dtype.element_ty
    arch.follow()
    stream, at = weight_stream.begin(a, b, scales, N, K, form)
    SUMS: gl.constexpr = weight_stream.layout_of_sums(
        stream.sums.shape[1] // form.MATRICES, stream.sums.shape[0], gl.num_warps()
    )
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUMS))
    r = gl.arange(0, BLOCK_M, layout=ROWS)
    factors = gl.full((BLOCK_M,), 1.0, gl.float32, layout=ROWS)
    if squares is not None:
        SQUARES: gl.constexpr = gl.BlockedLayout(
            [1, 1], [max(1, 32 // BLOCK_M), min(32, BLOCK_M)], [gl.num_warps(), 1], [1, 0]
        )
        s = gl.arange(0, form.SPANS, layout=gl.SliceLayout(1, SQUARES))[:, None]
        row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SQUARES))[None, :]
        sums = gl.load(squares + s * M + row, mask=(s < spans) & (row < M), other=0.0)
        factors = gl.convert_layout(1.0 / gl.sqrt(gl.sum(sums, 0) / K + eps), ROWS)
    groups = gl.cdiv(N, stream.WIDTH)
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        at = weight_stream.multiply(stream, at, widen, BLOCK_M)
        if group + gl.num_programs(0) >= groups:
            arch.lead()
        col, inside = weight_stream.columns_of(stream, group, N, SUMS)
        product = _finished(stream, epilogue, col, 0, factors, SUMS, dtype)
        if activation is not None:
            second = _finished(stream, epilogue, col, 1, factors, SUMS, dtype)
            product = joined_tiles(product, second, activation)
        target = out + (r * N)[None, :] + col[:, None]
        gl.store(target, product, mask=inside[:, None] & (r < M)[None, :])


@gluon.jit
def _finished(stream, epilogue, col, WHICH: gl.constexpr, factors, SUMS, dtype):
    """Return the product by matrix number `WHICH`, with its bias, rounded."""
    product = weight_stream.total(stream, epilogue.b_scales, WHICH * stream.N, col, WHICH, SUMS) * factors[None, :]
    if epilogue.bias is not None:
        values = gl.load(epilogue.bias + WHICH * stream.N + col, mask=col < stream.N, other=0.0)
        product += values.to(gl.float32)[:, None]
    return product.to(dtype)


def multiply(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epilogue: TileEpilogue,
    join: Epilogue = NO_EPILOGUE, eps: float = 0.0, launched: bool = True,
) -> None:  # fmt: skip
    """Compute out [M, N] = rows [M, K] @ weight [N, K].T, with the options of `skinny_matmul`.

    `epilogue` holds the bias and the squares; `join` says what follows a tile.
    """
    N = out.shape[-1]
    programs = platform.num_programs(rows.device)
    spans = 1 if epilogue.squares is None else epilogue.squares.shape[0]
    stream = weight_stream.prepared(
        rows, weight.t(), scale, programs, MATRICES=join.matrices, SPANS=triton.next_power_of_2(spans)
    )  # fmt: skip
    skinny_stream_kernel[(stream.grid if launched else 0,)](
        epilogue=epilogue._replace(b_scales=scale if scale.ndim == 1 else None), out=out,
        M=rows.shape[0], N=N, K=rows.shape[1], spans=spans, eps=eps, form=stream.form,
        activation=join.activation, **stream.operands,
        **stream.options(programs), **platform.launch_options(rows.device),
    )  # fmt: skip
