"""`matmul_all_reduce_norm` against float64: in the kernel of few rows and behind any other, and what it refuses."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from iris_ops import FusedConfig, launch, library  # noqa: F401  (which registers operators)
from iris_ops.norm_ahead import SPAN, second_half, spans
from iris_ops.problem import ALL_REDUCE, problem_asked
import pytest
import torch

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

EPS = 1e-5
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
# rows, columns, depth, bias, dtype, configuration (None: the plan's), whether the kernel ends so
CASES = [
    (1, 256, 64, False, torch.bfloat16, FusedConfig(16, 64, 64, num_warps=4, num_stages=2, algorithm="one_shot"), True),
    (5, 200, 40, True, torch.bfloat16, FusedConfig(16, 64, 64, num_warps=4, num_stages=2, algorithm="one_shot"), True),
    (9, 320, 48, True, torch.float16, FusedConfig(16, 128, 32, num_warps=4, num_stages=2, algorithm="two_shot"), True),
    (20, 130, 32, False, torch.float32, FusedConfig(16, 64, 32, num_warps=4, num_stages=2, algorithm="one_shot"), True),
    (3, 96, 32, True, torch.bfloat16, FusedConfig(16, 32, 64, num_warps=4, num_stages=2, algorithm="one_shot"), False),
    (40, 192, 64, True, torch.bfloat16, FusedConfig(64, 64, 32, num_warps=4, num_stages=2), False),
    (2, 512, 64, False, torch.bfloat16, None, None),
]


def operands(ctx: iris.Iris, M: int, N: int, K: int, bias: bool, dtype: torch.dtype):
    """(all ranks' A, all ranks' B, bias, residual, weight), the same on every rank."""
    draw = torch.Generator().manual_seed(M * N + K)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(dtype).to(ctx.device)

    A, B = normal(ctx.num_ranks, M, K), normal(ctx.num_ranks, K, N)
    return A, B, normal(N) if bias else None, normal(M, N), normal(N)


@torch.no_grad()
def numbers_body(ctx: iris.Iris, M, N, K, bias, dtype, config, inside) -> list[torch.Tensor]:
    A, B, bias, residual, weight = operands(ctx, M, N, K, bias, dtype)
    made = torch.empty(M, N, dtype=dtype, device=ctx.device), torch.empty(M, N, dtype=dtype, device=ctx.device)
    out, scaled, squares = *made, torch.empty(spans(N), M, dtype=torch.float32, device=ctx.device)
    exact = torch.einsum("rmk,rkn->mn", A.double(), B.double()) + residual.double()
    exact = exact if bias is None else exact + bias.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    problem, digest = problem_asked(ALL_REDUCE, M, N, K, ctx.num_ranks, dtype), None
    chosen = config or ctx.ops.plan(ALL_REDUCE, M, N, K, dtype)
    assert inside in (None, launch.ends_ahead(problem, chosen))
    for _ in range(3):  # both slots, and the first once more
        for each in (out, scaled, squares):
            poison(each)
        mine = A[ctx.cur_rank], B[ctx.cur_rank].t().contiguous().t(), residual, weight, bias
        ctx.ops.matmul_all_reduce_norm(out, scaled, squares, *mine, config=config)
        # ranks' products are rounded to dtype on their way, and one outside the kernel once more
        room = (ctx.num_ranks + 2) * ULP[dtype] * float(exact.abs().max())
        assert (out.double() - exact).abs().max() <= room
        assert torch.equal(scaled, (out.float() * weight.float()).to(dtype))
        sums = torch.nn.functional.pad(out.double().square(), (0, -N % SPAN.value)).unflatten(1, (-1, SPAN.value))
        sums, found = sums.sum(-1).t(), squares.double()
        assert torch.allclose(found.sum(0), sums.sum(0), rtol=1e-5)
        if chosen.block_n == SPAN.value or not launch.ends_ahead(problem, chosen):  # wider tiles have one sum
            assert torch.allclose(found, sums, rtol=1e-5)
        result = second_half(scaled, squares, EPS)
        assert (result.double() - norm).norm() <= (ctx.num_ranks + 2) * ULP[dtype] * norm.norm()
        found = [t.clone().cpu() for t in (out, scaled, squares)]
        assert digest is None or all(map(torch.equal, digest, found)), "the same bits in each call"
        digest = found
    return digest


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2, 3])
def test_numbers(world_size: int, case: tuple) -> None:
    first, *others = run_ranks(world_size, numbers_body, *case)
    for other in others:
        assert all(map(torch.equal, first, other)), "the same bits on all ranks"


# what is exchanged for another argument, the error, and what its message says
WRONG = {
    "a shorter residual": ("residual", lambda t: t[1:], ShapeError, r"residual is \(3, 64\); expected \(4, 64\)"),
    "no residual": ("residual", lambda t: None, ArgumentError, "residual is NoneType; expected a torch.Tensor"),
    "a longer weight": ("weight", lambda t: t.new_empty(65), ShapeError, r"weight is \(65,\); expected \(64,\)"),
    "an fp32 weight": ("weight", lambda t: t.float(), DtypeError, "weight has dtype torch.float32; expected torch.bf"),
    "bf16 squares": ("squares", lambda t: t.bfloat16(), DtypeError, "squares has dtype torch.bf.*; expected torch.fl"),
    "more squares": ("squares", lambda t: t.new_empty(2, 4), ShapeError, r"squares is \(2, 4\); expected \(1, 4\)"),
    "scaled elsewhere": ("scaled", lambda t: t.to("meta"), DeviceError, "scaled is on meta; expected"),
    "scaled by columns": ("scaled", lambda t: t.t().contiguous().t(), ArgumentError, r"scaled has strides \(1, 4\)"),
}


def refused_body(ctx: iris.Iris, name: str) -> None:
    A, B, _, residual, weight = operands(ctx, 4, 64, 32, False, torch.bfloat16)
    like = dict(dtype=torch.bfloat16, device=ctx.device)
    args = dict(out=torch.empty(4, 64, **like), scaled=torch.empty(4, 64, **like),
                squares=torch.empty(1, 4, dtype=torch.float32, device=ctx.device), A=A[ctx.cur_rank],
                B=B[ctx.cur_rank], residual=residual, weight=weight)  # fmt: skip
    if name in WRONG:
        key, change, error, message = WRONG[name]
        wrong = args | {key: change(args[key])}
    else:
        first, second = name.split()
        wrong, error = args | {first: args[second]}, ArgumentError
        message = "(out|scaled|squares) overlaps another argument in memory; expected separate tensors"
    with pytest.raises(error, match=message):
        ctx.ops.matmul_all_reduce_norm(**wrong)
    ctx.ops.matmul_all_reduce_norm(**args)


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
@pytest.mark.parametrize("name", [*WRONG, "scaled residual", "residual out", "scaled out"])
def test_what_is_refused(world_size: int, name: str) -> None:
    run_ranks(world_size, refused_body, name)


def compilers_body(ctx: iris.Iris) -> None:
    A, B, bias, residual, weight = operands(ctx, 4, 64, 32, True, torch.bfloat16)
    op = torch.ops.iris_ops.matmul_all_reduce_norm
    mine = A[ctx.cur_rank], B[ctx.cur_rank], bias, residual, weight, ctx.group_name
    torch.library.opcheck(op, mine)
    first = op(*mine)
    assert all(map(torch.equal, first, op(*mine, 32))), "planned by another depth, the same sums"


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
def test_compilers_know_its_shapes(world_size: int) -> None:
    run_ranks(world_size, compilers_body)
