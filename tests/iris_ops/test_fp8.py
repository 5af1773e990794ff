"""`matmul_all_reduce` with B in fp8, against float64: each way that serves it, and what it refuses."""

from __future__ import annotations

from itertools import product

import iris
from iris import platform
from iris_ops import FusedConfig
from iris_ops.kernels.arguments import TileEpilogue
from iris_ops.kernels.rmsnorm_epilogue import second_half, spans
from iris_ops.kernels.tiles import scale_transposed
from iris_ops.operands import Operands
from iris_ops.planning.ways.weight_stream import STREAM_CONFIG
from iris_ops.planning.weights.fp8 import FP8_FORMAT
from iris_ops.problem import ALL_REDUCE, Problem
from iris_ops.quantised import lamport_stream, scaled_matmul, skinny_stream, tile_matmul, weight_stream
import pytest
import torch
import triton
import triton.language as tl

from tests.checks import poison, scales_rows
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks

pytestmark = both

ULP = {torch.bfloat16: 2**-8, torch.float32: 2**-22}
BF16 = torch.bfloat16
# rows, columns, depth, bias, dtype, configuration (None: the plan's)
CASES = [
    (1, 256, 128, False, BF16, None),
    (5, 200, 256, True, BF16, None),
    (8, 1040, 1152, False, BF16, None),
    (9, 56, 2176, True, BF16, None),
    (16, 6144, 640, True, BF16, None),
    (3, 64, 96, True, BF16, None),
    (3, 48, 144, False, BF16, STREAM_CONFIG),
    (4, 80, 256, False, BF16, FusedConfig(16, 64, 64, num_stages=2, algorithm="one_shot")),
    (2, 50, 20, True, torch.float32, None),
    (40, 96, 256, True, BF16, None),
    (17, 1040, 256, False, BF16, None),
    (90, 200, 256, True, BF16, None),
    (33, 48, 272, False, BF16, FusedConfig(32, 64, 64, num_warps=4, algorithm="one_shot")),
    (130, 320, 128, True, BF16, FusedConfig(64, 64, 64, num_warps=4, algorithm="two_shot")),
    (70, 272, 144, True, BF16, FusedConfig(128, 128, 64, num_stages=2)),
]
# where warps can be specialised; elsewhere these are as those above
MANY = [
    (100, 2048, 1152, True, BF16, None),
    (600, 1536, 144, True, BF16, None),
    (2000, 2048, 1040, True, BF16, None),
    (300, 528, 272, True, BF16, FusedConfig(128, 256, 64, splits=4, warp_specialised=True)),
    (200, 400, 640, True, BF16, FusedConfig(64, 128, 64, num_stages=4, warp_specialised=True, algorithm="two_shot")),
    (200, 400, 640, True, BF16, FusedConfig(64, 128, 64, num_stages=4, warp_specialised=True, algorithm="one_shot")),
]


def operands(ctx: iris.Iris, M: int, N: int, K: int, bias: bool, dtype: torch.dtype):
    """Return (all ranks' A, all ranks' B8 by columns, scales, bias), the same on every rank.

    Half of the weights are small. Where rows are many, they are of several magnitudes.
    """
    draw = torch.Generator().manual_seed(M * N + K)
    A = torch.randn(ctx.num_ranks, M, K, generator=draw).to(dtype).to(ctx.device)
    if M > FP8_FORMAT.streamed_rows:
        A *= 2.0 ** torch.randint(-8, 8, (M, 1), generator=draw).to(A)
    weights = torch.randn(ctx.num_ranks, N, K, generator=draw)
    weights[:, ::2] *= torch.rand(weights[:, ::2].shape, generator=draw) ** 9
    rounded = [scaled_matmul.quantised(weight.to(ctx.device)) for weight in weights]
    added = torch.randn(N, generator=draw).to(dtype).to(ctx.device) if bias else None
    return A, [each.t() for each, _ in rounded], [scale for _, scale in rounded], added


def exact_sum(A, B, scales, bias) -> torch.Tensor:
    parts = [a.double() @ (b.double() * scale.double()) for a, b, scale in zip(A, B, scales, strict=True)]
    return sum(parts) + (0 if bias is None else bias.double())


def apart(B: torch.Tensor) -> torch.Tensor:
    """The same by columns that stand 8 bytes further apart: not as TMA reads them."""
    K, N = B.shape
    wide = torch.empty(N, K + 8, dtype=B.dtype, device=B.device)[:, :K]
    wide.copy_(B.t())
    return wide.t()


@torch.no_grad()
def numbers_body(ctx: iris.Iris, M, N, K, bias, dtype, config, mixed: bool) -> torch.Tensor:
    A, B, scales, bias = operands(ctx, M, N, K, bias, dtype)
    exact = exact_sum(A, B, scales, bias)
    a, b, scale = A[ctx.cur_rank], B[ctx.cur_rank], scales[ctx.cur_rank]
    if mixed and ctx.cur_rank == ctx.num_ranks - 1:
        b = apart(b)
    planned = config or ctx.ops.plan(ALL_REDUCE, M, N, K, dtype, fp8=True)
    if config is None:
        ours = FP8_FORMAT.streamable(M, K) if M <= FP8_FORMAT.streamed_rows else N % 16 == K % 16 == 0
        assert (planned.algorithm != "sequential") == (ON_GPU and ours and dtype == BF16)
    streams = FP8_FORMAT.streamable(M, K) and dtype == BF16 and b.stride(1) == K
    assert not ON_GPU or (weight_stream.supports(a, b, scale) is None) == streams
    rounds_rows = scaled_matmul.multiplies_in_fp8(b.shape, ctx.device, dtype)
    rounds_rows &= M > FP8_FORMAT.streamed_rows or planned.algorithm == "sequential"
    out, digest = torch.empty(M, N, dtype=dtype, device=ctx.device), None
    for call in range(5):  # both parities; from the third call on as repeated, and at other addresses
        if call > 2:
            out, a, scale = torch.empty_like(out), a.clone(), scale.clone()
            b = apart(b) if b.stride(1) != K else b.t().clone().t()
        ctx.ops.matmul_all_reduce(poison(out), a, b, bias, config=config, scale=scale)
        error = out.double() - exact
        if rounds_rows:
            assert (error.norm(dim=1) <= 0.045 * exact.norm(dim=1)).all()
        else:
            assert error.abs().max() <= (ctx.num_ranks + 1) * ULP[dtype] * exact.abs().max()
            assert error.norm() <= ctx.num_ranks * ULP[dtype] * exact.norm()
        assert digest is None or torch.equal(digest, out), "the same bits in each call"
        digest = out.clone()
    wrong = scales[ctx.cur_rank].roll(1)
    ctx.ops.matmul_all_reduce(out, a, b, bias, config=config, scale=wrong)
    assert (out.double() - exact).norm() > 0.05 * exact.norm() or torch.equal(wrong, scale)
    return digest.cpu()


@torch.no_grad()
def rounded_body(ctx: iris.Iris, *case) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_matmul, "multiplies_in_fp8", lambda *_: True)
        return numbers_body(ctx, *case, mixed=False)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
@pytest.mark.parametrize("largest", [448.0, 447.0, 500.0, 3.5, 7 * 2.0**-20, 1.0])
def test_a_column_s_largest_entry_uses_the_whole_range(largest: float) -> None:
    """Above half of e4m3's largest number: also where the entry is that number times a power of two."""
    rounded, scale = scaled_matmul.quantised(torch.tensor([[largest, -largest / 3, 0.0]]))
    assert 224 < rounded.float().abs().max() <= 448 and scale.log2().frac() == 0


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_a_row_of_zeros_stays_one() -> None:
    rounded, scale = scaled_matmul.round_rows(torch.zeros(2, 40, dtype=torch.bfloat16))
    assert (rounded.float() == 0).all() and (scale > 0).all()


@pytest.mark.skipif(ON_GPU, reason="there the numbers above are those")
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_rounded_rows_in_the_interpreter(world_size: int, algorithm: str) -> None:
    config = FusedConfig(32, 64, 64, num_warps=4, algorithm=algorithm)
    first, *others = run_ranks(world_size, rounded_body, 70, 96, 144, True, BF16, config)
    assert all(torch.equal(first, other) for other in others), "the same bits on all ranks"


@pytest.mark.skipif(ON_GPU and not platform.has_warp_specialisation(torch.device("cuda")), reason="for Hopper")
@pytest.mark.parametrize(
    "rows, columns, depth",
    [
        (17, 48, 144),
        (64, 528, 256),
        (100, 320, 272),
        (128, 17408, 128),
        (300, 528, 144),
    ],
)
def test_products_of_tens_of_rows(rows: int, columns: int, depth: int) -> None:
    """`fp8_tiles`, with and without a bias, into rows that stand apart."""
    device = "cuda" if ON_GPU else "cpu"
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=draw) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=draw)
    weight, scale = scaled_matmul.quantised(torch.randn(columns, depth, generator=draw).to(device))
    bias = torch.randn(columns, generator=draw).to(device, BF16)
    eight, x_scale = scaled_matmul.round_rows(x.to(device, BF16))
    exact = (eight.double() * x_scale.double()) @ (weight.double() * scale.double()[:, None]).t()
    wide = torch.empty(rows, columns + 8, dtype=BF16, device=device)
    for added in (None, bias):
        tile_matmul.multiply(poison(wide)[:, :columns], eight, x_scale, weight, scale, added)
        expected = exact if added is None else exact + added.double()
        error = (wide[:, :columns].double() - expected).norm(dim=1)
        assert (error <= 2**-7 * expected.norm(dim=1)).all()
        assert wide[:, columns:].isnan().all()


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "one apart"])
@pytest.mark.parametrize("case", CASES + MANY if ON_GPU else CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2, 3])
@pytest.mark.some(18, on_gpus=22)
def test_numbers(world_size: int, case: tuple, mixed: bool) -> None:
    first, *others = run_ranks(world_size, numbers_body, *case, mixed)
    assert all(torch.equal(first, other) for other in others), "the same bits on all ranks"


@torch.no_grad()
def norm_body(ctx: iris.Iris, M: int, N: int, K: int) -> None:
    A, B, scales, bias = operands(ctx, M, N, K, True, BF16)
    residual, weight = (torch.randn(*size, dtype=BF16, device=ctx.device) for size in ((M, N), (N,)))
    ctx.ccl.all_reduce(residual, residual)  # the same on all ranks
    out, scaled, squares = (
        torch.empty_like(residual),
        torch.empty_like(residual),
        residual.new_empty(spans(N), M).float(),
    )
    exact = exact_sum(A, B, scales, bias) + residual.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for each in (out, scaled, squares):
        poison(each)
    mine = A[ctx.cur_rank], B[ctx.cur_rank], residual, weight, bias
    ctx.ops.matmul_all_reduce_norm(out, scaled, squares, *mine, scale=scales[ctx.cur_rank])
    room = 0.04 if M > 16 and ON_GPU else (ctx.num_ranks + 2) * ULP[BF16]
    assert (out.double() - exact).norm() <= room * exact.norm()
    assert torch.equal(scaled, (out.float() * weight.float()).to(BF16))
    assert torch.allclose(squares.double().sum(0), out.double().square().sum(1), rtol=1e-5)
    assert (second_half(scaled, squares, 1e-5).double() - norm).norm() <= 2 * room * norm.norm()


@pytest.mark.parametrize(
    "rows, columns, depth", [(1, 256, 128), (7, 1000, 256), (16, 5120, 128), (20, 64, 64), (70, 208, 144)]
)
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
def test_the_first_half_of_a_norm_behind_it(world_size: int, rows: int, columns: int, depth: int) -> None:
    run_ranks(world_size, norm_body, rows, columns, depth)


@torch.no_grad()
def replayed_body(ctx: iris.Iris, calls: int) -> None:
    """Calls of several sizes after each other in one graph, on numbers that change between replays."""
    sizes = [(1, 512, 256), (16, 48, 128), (8, 2048, 512), (40, 1024, 256), (3, 4096, 128), (600, 512, 128)]
    held = [operands(ctx, *size, False, BF16) for size in sizes]
    rank = ctx.cur_rank
    outs = [torch.empty(M, N, dtype=BF16, device=ctx.device) for M, N, _ in sizes]

    def go() -> None:
        for (A, B, scales, _), out in zip(held, outs, strict=True):
            ctx.ops.matmul_all_reduce(out, A[rank], B[rank], scale=scales[rank])

    go()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        go()
    for call in range(calls):
        for A, *_ in held:
            A.mul_(-1 if call % 2 else 2 ** (call % 3 - 1))
        for out in outs:
            poison(out)
        torch.cuda.synchronize()
        graph.replay()
        for (A, B, scales, _), out in zip(held, outs, strict=True):
            exact = exact_sum(A, B, scales, None)
            room = ctx.num_ranks * ULP[BF16] if len(out) <= FP8_FORMAT.streamed_rows else 0.045
            assert (out.double() - exact).norm() <= room * exact.norm(), call


@pytest.mark.skipif(not ON_GPU, reason="needs GPUs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_in_a_graph(world_size: int) -> None:
    run_ranks(world_size, replayed_body, 40)


@torch.no_grad()
def lying_body(ctx: iris.Iris, rounded: bool) -> None:
    """Multiply operands that TMA cannot read, with NaN after each row, and an `out` at any address."""
    config, room = None, 0.045
    with pytest.MonkeyPatch.context() as patch:
        if rounded:
            patch.setattr(scaled_matmul, "multiplies_in_fp8", lambda shape, *_: all(size % 16 == 0 for size in shape))
            config, room = FusedConfig(64, 64, 64, num_warps=4, algorithm="one_shot"), 0.12
        lie(ctx, config, room)


def lie(ctx: iris.Iris, config: FusedConfig | None, room: float) -> None:
    for M, N, K in ((2, 64, 128), (40, 96, 128), (40, 96, 100)):
        A, B, scales, _ = operands(ctx, M, N, K, False, BF16)
        exact = exact_sum(A, B, scales, None)
        rank, buffer = ctx.cur_rank, torch.empty(M * N + 8, dtype=BF16, device=ctx.device)
        padded = torch.full((M, K + 28), float("nan"), dtype=BF16, device=ctx.device)
        padded[:, :K] = A[rank]
        off = torch.empty(M * K + 1, dtype=BF16, device=ctx.device)[1:].view(M, K).copy_(A[rank])
        rows = padded[:, :K], off, A[rank].t().contiguous().t()
        outs = buffer[1 : 1 + M * N].view(M, N), buffer[8:].view(N, M).t()
        for a, out, b in product(rows, outs, (B[rank], B[rank].contiguous(), apart(B[rank]))):
            for _ in range(3 if ON_GPU else 1):  # the third would be a repeated one
                ctx.ops.matmul_all_reduce(poison(out), a, b, scale=scales[rank], config=config)
                assert (out.double() - exact).norm() <= room * exact.norm()
    A, B, scales, _ = operands(ctx, 1, 64, 128, False, BF16)
    row, column = A[ctx.cur_rank].expand(3, 128), B[ctx.cur_rank][:, :1].expand(128, 64)
    out = torch.empty(3, 64, dtype=BF16, device=ctx.device)
    ctx.ops.matmul_all_reduce(poison(out), row, column, scale=scales[ctx.cur_rank])
    columns = [b[:, :1].expand(128, 64) for b in B]
    assert (out.double() - exact_sum(A.expand(-1, 3, -1), columns, scales, None)).norm() <= 0.04 * out.double().norm()


@pytest.mark.parametrize("rounded", [False] if ON_GPU or not scales_rows() else [False, True])
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_operands_may_lie_anyhow(world_size: int, rounded: bool) -> None:
    run_ranks(world_size, lying_body, rounded)


@torch.no_grad()
def deep_body(ctx: iris.Iris, M: int, N: int, K: int) -> None:
    """Long sums of numbers that have a mean, of which tensor cores cut more than of others."""
    draw = torch.Generator(ctx.device).manual_seed(K)
    A = torch.randn(ctx.num_ranks, M, K, generator=draw, device=ctx.device).add_(0.3).to(BF16)
    weights = torch.randn(ctx.num_ranks, N, K, generator=draw, device=ctx.device).add_(0.3)
    rounded = [scaled_matmul.quantised(weight) for weight in weights]
    exact = sum(a.double() @ (w.double() * s.double()[:, None]).t() for a, (w, s) in zip(A, rounded, strict=True))
    weight, scale = rounded[ctx.cur_rank]
    out = torch.empty(M, N, dtype=BF16, device=ctx.device)
    ctx.ops.matmul_all_reduce(poison(out), A[ctx.cur_rank], weight.t(), scale=scale)
    assert (out.double() - exact).norm() <= 0.025 * exact.norm()


@pytest.mark.skipif(not ON_GPU, reason="needs tensor cores")
@pytest.mark.parametrize("rows", [64, 600])
@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_of_what_has_a_mean(world_size: int, rows: int) -> None:
    run_ranks(world_size, deep_body, rows, 256, 14336)


def arguments_body(ctx: iris.Iris) -> None:
    """What the kernels of Hopper are given, whatever runs here: each of their parameters, and descriptors of lines."""
    given = []

    class Kernel:
        def __getitem__(self, grid: tuple):
            return lambda **args: given.append((grid, args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "num_programs", lambda device: 132)
        patch.setattr(platform, "launch_options", lambda device: {"launch_pdl": True})
        patch.setattr(skinny_stream, "skinny_stream_kernel", Kernel())
        for (M, N, K), tiles, grid, stages in PLACED:
            A, B, scales, bias = operands(ctx, M, N, K, True, BF16)
            out, workspace = torch.empty(M, N, dtype=BF16, device=ctx.device), ctx.ops._calls.own_workspace()
            problem = Problem(ALL_REDUCE, "", M, N, K, ctx.num_ranks, BF16, weights=FP8_FORMAT)
            tensors = out, A[0], B[0], bias, scales[0]
            kernel, where, args = lamport_stream.launcher(ctx, workspace, problem, STREAM_CONFIG, Operands(*tensors))
            assert {*args} == {*kernel.arg_names} and where == (grid, 1, 1)
            skinny_stream.multiply(out, A[0], B[0].t(), scales[0], TileEpilogue(bias))
            step_grid, step_args = given.pop()
            assert {*step_args} - {"num_warps", "launch_pdl"} == STEP and step_grid == (grid,)
            for each in (args, step_args):
                form = each["form"]
                assert (form.T, form.STAGES, each["M"], each["N"], each["K"]) == (tiles, stages, M, N, K)
                assert each["a"].shape == [K // 128, M, 32] and each["b"].shape == [K // 128, N, 32]
                assert each["a"].block_shape == [4, 8 if M <= 8 else 16, 32] and each["b"].block_shape == [4, 16, 32]


# sizes: tiles at once, programs, stages
PLACED = (((3, 5120, 384), 3, 107, 6), ((9, 8192, 128), 2, 256, 2), ((1, 16384, 128), 2, 264, 4))
STEP = {*skinny_stream.skinny_stream_kernel.arg_names}


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_kernels_are_given_all_that_they_ask_for(world_size: int) -> None:
    run_ranks(world_size, arguments_body)


@triton.jit
def scaled_kernel(acc, a_scales, b_scales, out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    r = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + r[None, :]
    tl.store(out + at, scale_transposed(tl.load(acc + at), a_scales, b_scales, r, 0, M, N))


@pytest.mark.skipif(ON_GPU, reason="the order of two products in Triton, which the specialised kernels are held to")
def test_scales_of_rows_are_multiplied_first():
    """As in `hopper/pipeline.py`, for scales need not be powers of two, and few rows have the bits of many."""
    draw = torch.Generator().manual_seed(0)
    acc = torch.randn(64, 32, generator=draw)
    rows, columns = torch.rand(32, generator=draw), torch.rand(64, generator=draw)
    out = torch.empty_like(acc)
    scaled_kernel[(1,)](acc, rows, columns, out, 32, 64, 32, 64)
    assert torch.equal(out, acc * rows * columns[:, None])
    assert not torch.equal(out, acc * columns[:, None] * rows), "the other order is told from it"
