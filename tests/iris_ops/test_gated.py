"""Gated products compared with float64: gathered or not, gated in the kernel or after it, and refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import iris
from iris import platform
from iris.errors import ArgumentError, DtypeError, ShapeError
from iris.launch import relaunch
from iris_ops import FusedConfig, steps, torch_ops  # noqa: F401
from iris_ops.kernels.hopper import gather_matmul  # noqa: F401
from iris_ops.local import gated_matmul  # noqa: F401
from iris_ops.planning.operations import GATED
from iris_ops.problem import part_of
import pytest
import torch
import triton

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
SPECIALISED = FusedConfig(128, 256, 64, num_stages=3, warp_specialised=True, algorithm="copy_gather")
SMALL = replace(SPECIALISED, block_n=128, group_m=2, num_programs=3)
OTHERS = [None, FusedConfig(algorithm="copy_gather"), FusedConfig(64, 64, 32, num_warps=4, comm_programs=2)]
# rows, columns of both halves, depth, bias, dtype
CASES = [
    (300, 512, 192, True, torch.bfloat16),
    (257, 400, 72, False, torch.float16),
    (2, 16, 8, True, torch.bfloat16),
    (1030, 2080, 520, False, torch.bfloat16),
    (40, 22, 9, True, torch.bfloat16),  # rows begin between vectors: torch multiplies
    (33, 48, 40, True, torch.float32),
] if ON_GPU else [
    (24, 48, 40, True, torch.bfloat16),
    (19, 22, 9, False, torch.float16),
    (2, 16, 8, True, torch.float32),
]  # fmt: skip


def operands(ctx: iris.Iris, M: int, N: int, K: int, bias: bool, dtype: torch.dtype, seed: int = 0):
    """(all rows of A, this rank's, B, bias) and the exact result; B and bias are this rank's own."""
    whole, own = (torch.Generator().manual_seed(1000 * seed + r) for r in (99, ctx.cur_rank))
    A = torch.randn(M, K, generator=whole).to(dtype).to(ctx.device)
    W = (torch.randn(N, K, generator=own) * K**-0.5).to(dtype).to(ctx.device)
    b = torch.randn(N, generator=own).to(dtype).to(ctx.device) if bias else None
    first = min(M, ctx.cur_rank * -(-M // ctx.num_ranks))
    mine = A[first : first + part_of(M, ctx.num_ranks, ctx.cur_rank)].clone()
    product = A.double() @ W.double().t() + (0 if b is None else b.double())
    return A, mine, W.t(), b, torch.nn.functional.silu(product[:, : N // 2]) * product[:, N // 2 :]


def check(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Each half is rounded, and what is gated once more."""
    room = 4 * ULP[result.dtype] * (exact.abs() + exact.abs().mean() + 1e-3)
    assert torch.isfinite(result).all(), result
    worst = ((result.double() - exact).abs() / room).max() if room.numel() else 0
    assert worst <= 1, worst


@torch.no_grad()
def gathered_body(ctx: iris.Iris, cases: list[tuple], configs: list[FusedConfig | None]) -> None:
    for M, N, K, bias, dtype in cases:
        for turn, config in enumerate(configs):
            for call in range(4):  # from the third on as repeated; the last at other addresses
                _, mine, B, b, exact = operands(ctx, M, N, K, bias, dtype, turn + (call == 3))
                if call in (0, 3):
                    held = mine, B, b, torch.empty(M, N // 2, dtype=dtype, device=ctx.device)
                else:
                    held[0].copy_(mine)
                poison(held[3])
                ctx.device_barrier()
                ctx.ops.all_gather_matmul_gated(held[3], *held[:3], config=config)
                check(held[3], exact)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.some(2)
def test_gathered(world_size: int) -> None:
    run_ranks(world_size, gathered_body, CASES, [*OTHERS, SPECIALISED, SMALL])


@torch.no_grad()
def strided_body(ctx: iris.Iris) -> None:
    """Results in rows and columns that stand apart; B by columns; ranks of which one has no columns, or no rows."""
    for config in (SPECIALISED, FusedConfig(algorithm="copy_gather")):
        for M, N in ((130, 256), (ctx.num_ranks - 1 or 1, 256), (64, 0 if ctx.cur_rank == 0 else 64)):
            _, mine, B, b, exact = operands(ctx, M, N, 64, True, torch.bfloat16, M)
            wide, apart = torch.zeros(M, N // 2 + 8).bfloat16().to(ctx.device), torch.zeros(M, N + 2).bfloat16()
            for out in (wide[:, : N // 2], apart.to(ctx.device)[:, : N // 2 * 2 : 2]):
                for each in (B, B.contiguous()):
                    poison(out)
                    ctx.device_barrier()
                    ctx.ops.all_gather_matmul_gated(out, mine, each, b, config=config)
                    check(out, exact)
            assert not wide[:, N // 2 :].any()


@pytest.mark.parametrize("world_size", WORLDS)
def test_gathered_as_it_lies(world_size: int) -> None:
    run_ranks(world_size, strided_body)


@torch.no_grad()
def alone_body(ctx: iris.Iris, chosen: FusedConfig | None) -> list[bool]:
    served = []
    product = gather_matmul.product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_matmul, "chosen", lambda *_: chosen)
        patch.setattr(gather_matmul, "product", lambda *args: served.append(True) or product(*args))
        for M, N, K, bias, dtype in [*CASES, (0, 32, 16, False, torch.bfloat16), (5, 0, 16, False, torch.bfloat16)]:
            A, _, B, b, exact = operands(ctx, M, N, K, bias, dtype)
            for B_ in (B, B.contiguous()):
                check(gated_matmul.matmul_gated(ctx, A, B_, b), exact)
    return served


@torch.no_grad()
def biases_body(ctx: iris.Iris) -> None:
    """Repeat products that differ only in their bias. On CPUs a fake replaces launches and relaunches."""
    launched = []

    def launch(*args, **options) -> relaunch.Launch:
        launched.append(args[4])  # of kernels, device, kernel, grid, the arguments by name
        bias = args[4]["epilogue"].bias
        assert bias is None or bias.is_contiguous()
        return relaunch.Launch(lambda: True, lambda addresses: lambda: True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_matmul, "chosen", lambda *_: SPECIALISED)
        if not ON_GPU:
            patch.setattr(platform, "has_warp_specialisation", lambda device: True)
            patch.setattr(gather_matmul, "relaunch", SimpleNamespace(**vars(relaunch) | {"launch": launch}))
        for seed in range(4):
            A, _, B, b, exact = operands(ctx, 300, 64, 64, seed % 2 == 0, torch.bfloat16, seed)
            apart = None if b is None else b.repeat_interleave(2)[::2]
            for bias in (apart, b):
                result = gated_matmul.matmul_gated(ctx, A, B, bias)
                if ON_GPU:
                    check(result, exact)
    if not ON_GPU:
        assert [args["epilogue"].bias is not None for args in launched] == [True, False], "others are launched again"


def test_a_product_with_a_bias_is_another_one() -> None:
    run_ranks(1, biases_body)


@pytest.mark.parametrize("chosen", [None, SPECIALISED, SMALL], ids=["torch", "specialised", "small"])
def test_alone(chosen: FusedConfig | None) -> None:
    """One kernel gates if warps are specialised, B is a weight's transpose, and rows begin at whole vectors."""
    for served in run_ranks(2, alone_body, chosen):
        specialised = ON_GPU and chosen is not None and platform.has_warp_specialisation(torch.device("cuda", 0))
        assert len(served) == (4 if specialised else 0)


def gradient_body(ctx: iris.Iris) -> None:
    A, _, B, b, _ = operands(ctx, 8, 16, 8, True, torch.bfloat16)
    for name in ("A", "B", "bias"):
        given = dict(A=A, B=B, bias=b)
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ArgumentError, match=f"matmul_gated: {name} requires grad, and this op has no backward"):
            gated_matmul.matmul_gated(ctx, **given)
        with torch.no_grad():
            assert not gated_matmul.matmul_gated(ctx, **given).requires_grad


def test_gradients_are_refused() -> None:
    run_ranks(1, gradient_body)


@torch.no_grad()
def refused_body(ctx: iris.Iris) -> None:
    w, like = ctx.num_ranks, dict(dtype=torch.bfloat16, device=ctx.device)
    A, B, out = torch.ones(4, 16, **like), torch.ones(16, 12, **like), torch.ones(4 * w, 6, **like)
    for wrong, error, message in (
        (dict(out=out[:, :5]), ShapeError, r"all_gather_matmul_gated: A is \(4, 16\), B is \(16, 12\), out is .*, 5\)"),
        (dict(B=B[:, :11]), ShapeError, r"B is \(16, 11\).*expected A \(M/w,K\), B \(K,N\), out \(M,N/2\)"),
        (dict(A=A.float()), DtypeError, "has dtype"),
        (dict(bias=B[0, :6]), ShapeError, "bias has 6 elements; expected 12, the columns of B"),
        (dict(config=3), ArgumentError, "config is int; expected an iris_ops.FusedConfig"),
    ):
        with pytest.raises(error, match=message):
            ctx.ops.all_gather_matmul_gated(**{**dict(out=out, A=A, B=B), **wrong})

    def too_large(*_: object, **__: object) -> None:
        raise triton.OutOfResources(393_216, 232_448, "shared memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "relaunch", SimpleNamespace(launch=too_large))
        with pytest.raises(ArgumentError, match="all_gather_matmul_gated: config has blocks of 256 x 256 x 128"):
            ctx.ops.all_gather_matmul_gated(out, A, B, config=FusedConfig(256, 256, 128, num_stages=4))
    with pytest.raises(ArgumentError, match="form is 'k' for all_gather_matmul_gated; expected none"):
        ctx.ops.plan(GATED, 64, 64, 64, torch.bfloat16, "k")
    assert ctx.ops.plan(GATED, 64, 64, 64, torch.bfloat16).reasons[0].startswith(f"{GATED} rows M=64")


def test_what_is_refused() -> None:
    run_ranks(2, refused_body)
