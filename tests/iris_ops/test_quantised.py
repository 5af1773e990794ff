"""Products with weights in fp8 blocks, int4 and MXFP4 compared with float64 of the decoded weights."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError, DtypeError, ShapeError
from iris_ops import FusedConfig
from iris_ops.kernels.rmsnorm_epilogue import second_half, spans
from iris_ops.local import skinny_matmul
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.weights import BY_NAME, GROUPED, format_of
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER
from iris_ops.quantised import restoring, scaled_matmul, weight_stream
from iris_ops.quantised.packing import PACKINGS
import pytest
import torch
from torch.nn import functional as F

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

BF16, ULP = torch.bfloat16, 2**-8
NAMES = [*GROUPED]
# rows, columns, depth of a rank, bias: from one row to more than the stream serves, K that fills no line or no group
CASES = [
    (1, 256, 512, False), (5, 200, 1440, True), (16, 1040, 736, True), (9, 56, 96, False), (3, 64, 720, True),
    (2, 50, 20, True), (17, 96, 256, True), (31, 201, 160, False), (33, 72, 1440, True), (64, 48, 736, False),
    (70, 208, 160, False), (129, 40, 96, True),
]  # fmt: skip
if ON_GPU:  # enough columns for tiles of each width, and for several a program
    CASES += [
        (48, 8192, 736, True), (300, 1040, 1440, True), (1, 8192, 4096, False), (8, 8256, 1440, True),
        (6, 4224, 736, False), (16, 20000, 1024, True),
    ]  # fmt: skip


def stored(name: str, N: int, K: int, seed: int, device: torch.device | str) -> tuple[tuple, torch.Tensor]:
    """Draw codes and scales of a format. Return (stored weight, scale), and the decoded numbers in float64."""
    form = BY_NAME[name]
    packing, group = PACKINGS[form.packing], form.group or None
    draw = torch.Generator().manual_seed(seed)
    scales = torch.rand(N, *(() if group is None else (-(-K // group),)), generator=draw) * 0.9 + 0.1
    if name.startswith("mxfp4"):
        scales = 2.0 ** torch.randint(-9, -1, scales.shape, generator=draw)
    else:
        scales = (scales * 2.0 ** torch.randint(-9, -5, scales.shape, generator=draw)).bfloat16().float()
    if form.packing == "fp8_block":
        codes = torch.randn(N, K, generator=draw).mul_(40).to(torch.float8_e4m3fn)
        numbers = codes.double()
    else:
        count = 256 if form.packing.startswith("int8") else 16
        codes = torch.randint(0, count, (N, K), generator=draw, dtype=torch.uint8)
        e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
        table = e2m1 if name.split("/")[0] in ("mxfp4", "nvfp4") else range(-count // 2, count // 2)
        numbers = torch.tensor(list(table), dtype=torch.float64)[codes.long()]
    by_entry = scales[:, None] if group is None else scales.repeat_interleave(group, 1)[:, :K]
    if form.zeros:
        half = count // 2
        zeros = torch.randint(-half, half + 1, scales.shape, generator=draw)  # GPTQ has one more than there are codes
        scales, numbers = torch.stack((scales, zeros), 2), numbers - zeros.repeat_interleave(group, 1)[:, :K]
    pair = tuple(t.to(device) for t in packing.pack(codes, scales, group))
    return pair, (numbers * by_entry.double()).to(device)


def operands(ctx: iris.Iris, name: str, M: int, N: int, K: int | tuple[int, ...], biased: bool):
    """Return this rank's A, (weight, scale), the bias, and the exact sum over all ranks. `K`: of all, or of each."""
    depths = K[: ctx.num_ranks] if isinstance(K, tuple) else (K,) * ctx.num_ranks
    draw = torch.Generator().manual_seed(M * N + sum(depths))
    A = [torch.randn(M, depth, generator=draw).to(BF16).to(ctx.device) for depth in depths]
    weights = [stored(name, N, depth, depth + rank, ctx.device) for rank, depth in enumerate(depths)]
    bias = torch.randn(N, generator=draw).to(BF16).to(ctx.device) if biased else None
    exact = sum(a.double() @ w.t() for a, (_, w) in zip(A, weights, strict=True))
    return A[ctx.cur_rank], weights[ctx.cur_rank][0], bias, exact if bias is None else exact + bias.double()


def room_of(name: str, rows: int, roundings: int) -> float:
    """Return the error allowed relative to the norm: more where a GPU rounds rows to fp8."""
    rounds_rows = ON_GPU and BY_NAME[name].scales_blocks and rows > BY_NAME[name].unrounded_rows
    return 0.045 if rounds_rows else roundings * ULP


def check(out: torch.Tensor, exact: torch.Tensor, room: float) -> None:
    error = out.double() - exact
    assert error.norm() <= room * exact.norm() and error.abs().max() <= 2 * room * exact.abs().max()


@torch.no_grad()
def numbers_body(ctx: iris.Iris, name: str, M: int, N: int, K: int, biased: bool) -> torch.Tensor:
    A, (weight, scale), bias, exact = operands(ctx, name, M, N, K, biased)
    out, first = torch.empty(M, N, dtype=BF16, device=ctx.device), None
    assert format_of(weight.t(), scale) is BY_NAME[name]
    for call in range(4):  # both parities; then as repeated, and at other addresses
        if call == 3:
            out, A, weight, scale = torch.empty_like(out), A.clone(), weight.clone(), scale.clone()
        ctx.ops.matmul_all_reduce(poison(out), A, weight.t(), bias, scale=scale)
        check(out, exact, room_of(name, M, ctx.num_ranks + 1))
        assert first is None or torch.equal(first, out), "the same bits in each call"
        first = out.clone()
    if scale.ndim == 2 and N > 1:  # an index of a scale that is off by one is seen
        ctx.ops.matmul_all_reduce(out, A, weight.t(), bias, scale=scale.roll(1, 0))
        assert (out.double() - exact).norm() > 0.05 * exact.norm()
    return first.cpu()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2, 3])
@pytest.mark.some(24, on_gpus=64)
def test_numbers(world_size: int, name: str, case: tuple) -> None:
    first, *others = run_ranks(world_size, numbers_body, name, *case)
    assert all(torch.equal(first, other) for other in others), "the same bits on all ranks"


@torch.no_grad()
def unequal_body(ctx: iris.Iris, name: str, M: int, N: int) -> torch.Tensor:
    depths = (160, 0, 32, 96)
    A, (weight, scale), bias, exact = operands(ctx, name, M, N, depths, True)
    out, k_per_rank = torch.empty(M, N, dtype=BF16, device=ctx.device), depths[: ctx.num_ranks]
    for _ in range(2):
        ctx.ops.matmul_all_reduce(poison(out), A, weight.t(), bias, scale=scale, k_per_rank=k_per_rank)
        check(out, exact, room_of(name, M, ctx.num_ranks + 1))
    return out.cpu()


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w > 1])
@pytest.mark.some(9, on_gpus=27)
def test_ranks_may_have_unequal_parts_or_none(world_size: int, name: str, rows: int) -> None:
    first, *others = run_ranks(world_size, unequal_body, name, rows, 72)
    assert all(torch.equal(first, other) for other in others), "the same bits on all ranks"


@torch.no_grad()
def norm_body(ctx: iris.Iris, name: str, M: int, N: int, K: int) -> None:
    A, (B, scale), bias, exact = operands(ctx, name, M, N, K, True)
    residual, weight = (torch.randn(*size, dtype=BF16, device=ctx.device) for size in ((M, N), (N,)))
    ctx.ccl.all_reduce(residual, residual)
    exact = exact + residual.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    squares = residual.new_empty(spans(N), M, dtype=torch.float32)
    for each in (out, scaled, squares):
        poison(each)
    ctx.ops.matmul_all_reduce_norm(out, scaled, squares, A, B.t(), residual, weight, bias, scale=scale)
    check(out, exact, room_of(name, M, ctx.num_ranks + 2))
    check(second_half(scaled, squares, 1e-5), norm, room_of(name, M, 2 * (ctx.num_ranks + 2)))


@pytest.mark.parametrize("name", ["fp8_block", "int4", "int4/128", "mxfp4"])
@pytest.mark.parametrize("rows, columns, depth", [(1, 256, 128), (7, 1000, 288), (40, 208, 160)])
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
@pytest.mark.some(6, on_gpus=12)
def test_with_a_norm(world_size: int, name: str, rows: int, columns: int, depth: int) -> None:
    run_ranks(world_size, norm_body, name, rows, columns, depth)


@torch.no_grad()
def split_body(ctx: iris.Iris, name: str, invariant: str, rows: list[int]) -> list[torch.Tensor]:
    """Rows of one product whose K the ranks divide by whole groups and leaves: out of each number of rows."""
    N, K, w = 48, 768 if invariant == "ranks" else 1536, ctx.num_ranks  # 1536: of four ranks each has whole groups
    form = BY_NAME[name]
    packing, group = PACKINGS[form.packing], form.group or None
    draw = torch.Generator().manual_seed(7)
    A = torch.randn(max(rows), K, generator=draw).to(BF16).to(ctx.device)
    codes, scales = packing.quantise(torch.randn(N, K, generator=draw), group)
    own = slice(ctx.cur_rank * K // w, (ctx.cur_rank + 1) * K // w)
    groups = slice(own.start // group, own.stop // group)
    weight, scale = (t.to(ctx.device) for t in packing.pack(codes[:, own], scales[:, groups], group))
    whole = packing.unpack(*packing.pack(codes, scales, group), K, torch.float64).to(ctx.device)
    ctx.invariant = invariant
    outs = []
    for M in rows:
        out = torch.empty(M, N, dtype=BF16, device=ctx.device)
        ctx.ops.matmul_all_reduce(poison(out), A[:M, own].contiguous(), weight.t(), scale=scale)
        check(out, A[:M].double() @ whole.t(), (w + 1) * ULP)
        outs.append(out.cpu())
    return outs


@pytest.mark.parametrize("name", ["fp8_block", "int4/64", "mxfp4"])
def test_a_row_has_the_same_bits_among_any_others(name: str) -> None:
    world_size = WORLDS[-1] if ON_GPU else 2
    few, one, many = run_ranks(world_size, split_body, name, "batch", [9, 1, 33])[0]
    assert torch.equal(one, many[:1]) and torch.equal(few, many[:9])


@pytest.mark.skipif(ON_GPU, reason="compares several numbers of ranks")
@pytest.mark.parametrize("name", ["fp8_block", "int4/64", "mxfp4"])
def test_a_row_has_the_same_bits_on_any_number_of_ranks(name: str) -> None:
    (alone,) = run_ranks(1, split_body, name, "ranks", [5])[0]
    for world_size in (2, 3):
        assert torch.equal(run_ranks(world_size, split_body, name, "ranks", [5])[0][0], alone)


@torch.no_grad()
def rounded_body(ctx: iris.Iris, M: int, N: int, K: int, config: FusedConfig) -> torch.Tensor:
    """Rows that are rounded, by blocks whose scales differ by powers of two: also with another block's scales."""
    A, (weight, scale), bias, exact = operands(ctx, "fp8_block", M, N, K, True)
    out = torch.empty(M, N, dtype=BF16, device=ctx.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_matmul, "multiplies_in_fp8", lambda *_: True)
        ctx.ops.matmul_all_reduce(poison(out), A, weight.t(), bias, scale=scale, config=config)
        error = out.double() - exact
        assert (error.norm(dim=1) <= 0.045 * exact.norm(dim=1)).all()
        assert error.norm() > 0.005 * exact.norm(), "rows were rounded"
        wrong = torch.empty_like(out)
        ctx.ops.matmul_all_reduce(poison(wrong), A, weight.t(), bias, scale=scale.roll(1, 1), config=config)
        assert (wrong.double() - exact).norm() > 0.2 * exact.norm()
    return out.cpu()


@pytest.mark.skipif(ON_GPU, reason="there plans take the tiles of many rows")
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_scales_of_blocks_multiply_rounded_rows(world_size: int, algorithm: str) -> None:
    config = FusedConfig(32, 64, 64, num_warps=4, algorithm=algorithm)
    first, *others = run_ranks(world_size, rounded_body, 70, 96, 400, config)
    assert all(torch.equal(first, other) for other in others), "the same bits on all ranks"


@torch.no_grad()
def other_op_body(ctx: iris.Iris, name: str, op: str) -> None:
    """Check that ops that scatter or gather rows first decode the weight to A's dtype."""
    M, N, K, w = 24, 48, 160, ctx.num_ranks
    A, (weight, scale), _, exact = operands(ctx, name, M, N, K, False)
    if op == REDUCE_SCATTER:
        expected = exact.chunk(w)[ctx.cur_rank]
    else:
        gathered = ctx.broadcast(A, 0)
        A, numbers = gathered.chunk(w)[ctx.cur_rank], stored(name, N, K, K + ctx.cur_rank, ctx.device)[1]
        expected = gathered.double() @ numbers.t()
    out = ctx.zeros(*expected.shape, dtype=BF16)
    getattr(ctx.ops, op)(poison(out), A, weight.t(), scale=scale)
    check(out, expected, (w + 2) * ULP)


@pytest.mark.parametrize("op", [REDUCE_SCATTER, GATHER_MATMUL])
@pytest.mark.parametrize("name", ["fp8_block/32", "int4", "mxfp4"])
def test_ops_that_share_rows(name: str, op: str) -> None:
    run_ranks(WORLDS[-1] if ON_GPU else 2, other_op_body, name, op)


@torch.no_grad()
def local_body(ctx: iris.Iris, name: str, M: int, N: int, K: int, biased: bool) -> None:
    (weight, scale), exact = stored(name, N, K, 3, ctx.device)
    draw = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=draw).to(BF16).to(ctx.device)
    bias = torch.randn(N, generator=draw).to(BF16).to(ctx.device) if biased else None
    product = x.double() @ exact.t() + (0 if bias is None else bias.double())
    check(skinny_matmul.linear(x, weight, bias, scale), product, room_of(name, M, 2))
    if weight_stream.supports(x, weight.t(), scale) is None:
        check(skinny_matmul.skinny_matmul(x, weight, bias, scale), product, ULP)
        if M <= BY_NAME[name].joined_rows and N % 2 == 0:
            gate, up = product.to(BF16).double().chunk(2, 1)
            check(skinny_matmul.skinny_matmul(x, weight, bias, scale, GATE.name), F.silu(gate) * up, 4 * ULP)
    else:
        assert not ON_GPU or M > BY_NAME[name].streamed_rows or K % BY_NAME[name].granule


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(16, on_gpus=64)
def test_without_ranks(name: str, case: tuple) -> None:
    run_ranks(WORLDS[0], local_body, name, *case)


def plan_body(ctx: iris.Iris) -> list[str]:
    lines = []
    for name in BY_NAME:
        config = ctx.ops.plan(ALL_REDUCE, 3, 64, 256, BF16, weights=name)
        lines.append(config.explain())
    for wrong, message in (
        (dict(weights="int5"), "weights is 'int5'; expected None or one of fp8, fp8_block"),
        (dict(weights="int4", fp8=True), "fp8 is True and weights is 'int4'; expected one of them"),
        (dict(weights="mxfp4", op="matmul_all_gather"), "weights is 'mxfp4' for matmul_all_gather; expected None, or"),
    ):
        op = wrong.pop("op", ALL_REDUCE)
        with pytest.raises(ArgumentError, match=message):
            ctx.ops.plan(op, 3, 64, 256, BF16, **wrong)
    return lines


def test_plans_have_the_format() -> None:
    lines = run_ranks(WORLDS[0], plan_body)[0]
    for name, text in zip(BY_NAME, lines, strict=True):
        if not ON_GPU and name in GROUPED:
            assert (
                f"B is converted in each call, 0.0 us: torch.bfloat16 by weights {BY_NAME[name].name} is not multip"
                in text
            )
        if ON_GPU:
            assert "chosen quantised.lamport_stream" in text


def refused_body(ctx: iris.Iris) -> None:
    A, out = torch.zeros(3, 96, dtype=BF16, device=ctx.device), torch.zeros(3, 64, dtype=BF16, device=ctx.device)
    (weight, scale), _ = stored("int4", 64, 96, 1, ctx.device)
    (bytes_, exponents), _ = stored("mxfp4", 64, 96, 1, ctx.device)
    tries = [
        (weight, None, DtypeError, "B has dtype torch.int32; expected one of"),
        (weight, scale[:, :-1].contiguous(), ShapeError, r"scale is \(64, 15\); expected \(64, 16\), in int4, groups"),
        (
            weight,
            scale[1:].contiguous(),
            ShapeError,
            r"scale is \(63, 16\); expected .*\(64, 16\), in int4, groups of 32",
        ),
        (weight, exponents, DtypeError, "scale has dtype torch.uint8; expected torch.bfloat16 or torch.float16 or"),
        (weight, scale.t().contiguous().t(), ArgumentError, r"scale has strides \(1, 64\); expected a contiguous"),
        (bytes_, scale, DtypeError, "scale has dtype torch.bfloat16; expected torch.uint8"),
        (weight[:, :-1], scale, ShapeError, r"A is \(3, 96\), B is \(120, 64\), out is \(3, 64\)"),
    ]
    for stored_weight, given, error, message in tries:
        with pytest.raises(error, match=message):
            ctx.ops.matmul_all_reduce(out, A, stored_weight.t(), scale=given)
    with pytest.raises(ShapeError, match=r"A is \(3, 160\), B is \(128, 64\)"):  # which 96 entries and padding are
        ctx.ops.matmul_all_reduce(out, torch.zeros(3, 160, dtype=BF16, device=ctx.device), weight.t(), scale=scale)
    ctx.ops.matmul_all_reduce(poison(out), A, weight.t(), scale=scale)
    assert not out.any()


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_what_is_refused(world_size: int) -> None:
    run_ranks(world_size, refused_body)


@pytest.mark.parametrize("name", [*BY_NAME])
@pytest.mark.parametrize("N, K", [(3, 20), (17, 1440), (1, 128)])
def test_a_weight_is_restored_by_one_kernel(name: str, N: int, K: int) -> None:
    """To the same bits as by torch."""
    if name == "fp8":
        pair = PACKINGS["fp8"].quantise(torch.randn(N, K, generator=torch.Generator().manual_seed(N)))
        pair = tuple(t.to("cuda" if ON_GPU else "cpu") for t in pair)
    else:
        pair, _ = stored(name, N, K, N, "cuda" if ON_GPU else "cpu")
    for dtype in (BF16, torch.float16, torch.float32):
        exact = PACKINGS[BY_NAME[name].packing].unpack(*pair, K, dtype)
        assert torch.equal(restoring.restored_by_kernel(*pair, K, dtype), exact)
