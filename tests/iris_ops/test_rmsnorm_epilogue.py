"""`matmul_all_reduce_norm` compared with float64: in the kernel of few rows, after any other kernel, and refusals."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from iris_ops import FusedConfig, torch_ops  # noqa: F401  (which registers operators)
from iris_ops.kernels.rmsnorm_epilogue import SPAN, second_half, spans
from iris_ops.planning import epilogues
from iris_ops.planning.plan import way_for
from iris_ops.problem import NORM, Request, requested_problem
import pytest
import torch

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.test_bad_input import freed, nested, traced

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
    (
        27,
        320,
        72,
        False,
        torch.bfloat16,
        FusedConfig(32, 64, 64, num_warps=4, num_stages=2, algorithm="one_shot"),
        True,
    ),
    (61, 200, 40, True, torch.bfloat16, FusedConfig(64, 64, 32, num_warps=8, num_stages=2, algorithm="two_shot"), True),
    (2, 512, 64, False, torch.bfloat16, None, None),
    (64, 256, 64, False, torch.bfloat16, None, None),
]


def ends_with_norm(problem, chosen) -> bool:
    return epilogues.NORM in way_for(problem, chosen).fuses(problem, chosen)


def operands(ctx: iris.Iris, M: int, N: int, K: int, bias: bool, dtype: torch.dtype):
    """Return (all ranks' A, all ranks' B, bias, residual, weight), the same on every rank."""
    draw = torch.Generator().manual_seed(M * N + K)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(dtype).to(ctx.device)

    A, B = normal(ctx.num_ranks, M, K), normal(ctx.num_ranks, K, N)
    return A, B, normal(N) if bias else None, normal(M, N), normal(N)


@torch.no_grad()
def numbers_body(ctx: iris.Iris, M, N, K, bias, dtype, config, inside) -> list[torch.Tensor]:
    A, B, bias, residual, weight = operands(ctx, M, N, K, bias, dtype)
    outputs = torch.empty(M, N, dtype=dtype, device=ctx.device), torch.empty(M, N, dtype=dtype, device=ctx.device)
    out, scaled, squares = *outputs, torch.empty(spans(N), M, dtype=torch.float32, device=ctx.device)
    exact = torch.einsum("rmk,rkn->mn", A.double(), B.double()) + residual.double()
    exact = exact if bias is None else exact + bias.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    problem, digest = requested_problem(Request(NORM, M, N, K, ctx.num_ranks, dtype)), None
    chosen = config or ctx.ops.plan(NORM, M, N, K, dtype)
    assert inside in (None, ends_with_norm(problem, chosen))
    mine = A[ctx.cur_rank], B[ctx.cur_rank].t().contiguous().t(), residual, weight, bias
    for call in range(5):  # both parities; from the third call on as repeated, and at other addresses
        if call > 2:
            out, scaled, squares = torch.empty_like(out), torch.empty_like(scaled), torch.empty_like(squares)
            mine = [None if t is None else t.clone() for t in mine]
        for each in (out, scaled, squares):
            poison(each)
        ctx.ops.matmul_all_reduce_norm(out, scaled, squares, *mine, config=config)
        # ranks' products are rounded to dtype on their way, and one outside the kernel once more
        room = (ctx.num_ranks + 2) * ULP[dtype] * float(exact.abs().max())
        assert (out.double() - exact).abs().max() <= room
        assert torch.equal(scaled, (out.float() * weight.float()).to(dtype))
        sums = torch.nn.functional.pad(out.double().square(), (0, -N % SPAN.value)).unflatten(1, (-1, SPAN.value))
        sums, found = sums.sum(-1).t(), squares.double()
        assert torch.allclose(found.sum(0), sums.sum(0), rtol=1e-5)
        # wider tiles have one sum
        if chosen.block_n == SPAN.value or not ends_with_norm(problem, chosen):
            assert torch.allclose(found, sums, rtol=1e-5)
        result = second_half(scaled, squares, EPS)
        assert (result.double() - norm).norm() <= (ctx.num_ranks + 2) * ULP[dtype] * norm.norm()
        found = [t.clone().cpu() for t in (out, scaled, squares)]
        assert digest is None or all(map(torch.equal, digest, found)), "the same bits in each call"
        digest = found
    return digest


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2, 3])
@pytest.mark.some(10, on_gpus=15)
def test_numbers(world_size: int, case: tuple) -> None:
    first, *others = run_ranks(world_size, numbers_body, *case)
    for other in others:
        assert all(map(torch.equal, first, other)), "the same bits on all ranks"


def with_grad(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


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
    "a config as dict": ("config", lambda t: {}, ArgumentError, "config is dict; expected an iris_ops.FusedConfig"),
    "A freed": ("A", freed, ArgumentError, "A has no memory; expected"),
    "a longer bias": ("bias", lambda t: t.new_empty(65), ShapeError, "bias has 65 elements; expected 64"),
    "residual nested": ("residual", nested, ArgumentError, "residual is a nested tensor; expected"),
    "weight sparse": ("weight", lambda t: t.to_sparse(), ArgumentError, "weight is torch.sparse_coo; expected"),
    "squares negated": ("squares", torch._neg_view, ArgumentError, "squares is a negated view; expected"),
    "residual freed": ("residual", freed, ArgumentError, "residual has no memory; expected"),
    "weight traced": ("weight", traced, ArgumentError, "weight has no memory; expected"),
    "squares freed": ("squares", freed, ArgumentError, "squares has no memory; expected"),
    "residual with grad": ("residual", with_grad, ArgumentError, "residual requires grad.*no_grad"),
    "weight with grad": ("weight", with_grad, ArgumentError, "weight requires grad.*no_grad"),
    "scaled with grad": ("scaled", with_grad, ArgumentError, "scaled requires grad.*no_grad"),
}


def refused_body(ctx: iris.Iris, name: str) -> None:
    A, B, _, residual, weight = operands(ctx, 4, 64, 64, False, torch.bfloat16)
    like = dict(dtype=torch.bfloat16, device=ctx.device)
    args = dict(out=torch.empty(4, 64, **like), scaled=torch.empty(4, 64, **like),
                squares=torch.empty(1, 4, dtype=torch.float32, device=ctx.device), A=A[ctx.cur_rank],
                B=B[ctx.cur_rank], residual=residual, weight=weight, bias=weight.clone(), config=None)  # fmt: skip
    if name in WRONG:
        key, change, error, message = WRONG[name]
        wrong = args | {key: change(args[key])}
    else:
        first, second = name.split()
        wrong, error = args | {first: args[second]}, ArgumentError
        message = f"({first} overlaps {second}|{second} overlaps {first}) in memory; expected separate tensors"
    for written in ("out", "scaled", "squares"):
        poison(args[written])
    with pytest.raises(error, match=f"^matmul_all_reduce_norm: .*(?:{message})"):
        ctx.ops.matmul_all_reduce_norm(**wrong)
    assert all(args[written].isnan().all() for written in ("out", "scaled", "squares")), "nothing is launched"
    ctx.ops.matmul_all_reduce_norm(**args)
    assert not any(args[written].isnan().any() for written in ("out", "scaled", "squares"))


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
@pytest.mark.parametrize("name", [*WRONG, "scaled residual", "residual out", "scaled out", "scaled A"])
def test_what_is_refused(world_size: int, name: str) -> None:
    run_ranks(world_size, refused_body, name)


@torch.no_grad()
def empty_body(ctx: iris.Iris) -> None:
    """No rows, no columns or no depth. What is empty may lie in the midst of others."""
    memory = torch.randn(64, dtype=torch.bfloat16, device=ctx.device)

    def drawn(*size: int) -> torch.Tensor:
        return memory[8:8].view(size) if 0 in size else memory.new_empty(size).normal_()

    for M, N, K in ((0, 64, 32), (4, 0, 32), (0, 0, 0), (4, 64, 0)):
        out, scaled, residual = drawn(M, N), drawn(M, N), drawn(M, N)
        squares = torch.empty(spans(N), M, dtype=torch.float32, device=ctx.device)
        weight = memory[:N]
        ctx.ops.matmul_all_reduce_norm(out, scaled, squares, drawn(M, K), drawn(K, N), residual, weight)
        assert torch.equal(out, residual) and torch.equal(scaled, out * weight)
        torch.testing.assert_close(squares.sum(0), out.float().square().sum(1))


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2])
def test_empty_sizes(world_size: int) -> None:
    run_ranks(world_size, empty_body)


@torch.no_grad()
def uneven_body(ctx: iris.Iris, off_heap: bool) -> list[torch.Tensor]:
    """Ranks whose depth differs, one of them without any, as layers call it; `out` anywhere, with any strides."""
    M, N, k_per_rank = 3, 200, (40, 0, 7, 16, 24, 1, 8, 33)[: ctx.num_ranks]
    draw = torch.Generator().manual_seed(1)
    A, B, residual, weight = (
        torch.randn(*size, generator=draw).bfloat16().to(ctx.device)
        for size in ((M, sum(k_per_rank)), (sum(k_per_rank), N), (M, N), (N,))
    )
    first = sum(k_per_rank[: ctx.cur_rank])
    mine = slice(first, first + k_per_rank[ctx.cur_rank])
    exact = A.double() @ B.double() + residual.double()
    op = torch.ops.iris_ops.matmul_all_reduce_norm
    results = op(A[:, mine], B[mine], None, residual, weight, ctx.group_name, -(-sum(k_per_rank) // ctx.num_ranks))
    assert (results[0].double() - exact).abs().max() <= (ctx.num_ranks + 2) * 2**-8 * exact.abs().max()
    for algorithm in ("one_shot", "overlapped"):
        config = FusedConfig(16, 64, 64, num_warps=4, num_stages=2, algorithm=algorithm)
        wide = poison((torch if off_heap else ctx).empty(M, N + 8, dtype=torch.bfloat16, device=ctx.device))
        out, scaled, squares = wide[:, :N], torch.empty_like(residual), torch.empty_like(results[2])
        ctx.ops.matmul_all_reduce_norm(out, scaled, squares, A[:, mine], B[mine], residual, weight, config=config)
        assert (out.double() - exact).abs().max() <= (ctx.num_ranks + 2) * 2**-8 * exact.abs().max()
        assert torch.equal(scaled, out * weight) and wide[:, N:].isnan().all()
    return [t.cpu() for t in results]


@pytest.mark.parametrize("off_heap", [False, True], ids=["on heap", "off heap"])
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 2, 3, 4])
def test_uneven_k_per_rank(world_size: int, off_heap: bool) -> None:
    first, *others = run_ranks(world_size, uneven_body, off_heap)
    for other in others:
        assert all(map(torch.equal, first, other)), "the same bits on all ranks"


def compilers_body(ctx: iris.Iris) -> None:
    A, B, bias, residual, weight = operands(ctx, 4, 64, 32, True, torch.bfloat16)
    op = torch.ops.iris_ops.matmul_all_reduce_norm
    mine = A[ctx.cur_rank], B[ctx.cur_rank], bias, residual, weight, ctx.group_name
    torch.library.opcheck(op, mine)
    first = op(*mine)
    assert all(map(torch.equal, first, op(*mine, 32))), "planned by another depth, the same sums"
    for wrong in (residual[0], residual[:, 1:]):
        with pytest.raises(ShapeError, match=r"residual is \([0-9, ]+\); expected \(4, 64\)"):
            op(*mine[:3], wrong, *mine[4:])


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
def test_compilers_know_its_shapes(world_size: int) -> None:
    run_ranks(world_size, compilers_body)
