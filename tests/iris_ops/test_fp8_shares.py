"""Ops of sequence parallelism with B in fp8, against float64: gathers, gated or not, and reduce-scatters."""

from __future__ import annotations

import iris
from iris_ops import FusedConfig
from iris_ops.planning.operations import GATED
from iris_ops.problem import GATHER_MATMUL, REDUCE_SCATTER, part_of, part_size
from iris_ops.quantised import scaled_matmul
import pytest
import torch

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

BF16 = torch.bfloat16
OPS = [
    (REDUCE_SCATTER, "rows"),
    (REDUCE_SCATTER, "cols"),
    (GATHER_MATMUL, "rows"),
    (GATHER_MATMUL, "k"),
    (GATED, "rows"),
]
# rows, columns, depth, bias, dtype, configuration (None: the plan's); sizes that ranks divide, and that they do not
CASES = [
    (3, 64, 96, True, BF16, None),
    (16, 96, 256, False, BF16, None),
    (40, 128, 272, True, BF16, None),
    (77, 96, 144, False, BF16, None),
    (24, 50, 20, True, torch.float32, None),
    (48, 96, 128, True, BF16, FusedConfig(32, 64, 64, num_warps=4, algorithm="one_shot")),
    (50, 96, 128, False, BF16, FusedConfig(32, 64, 64, num_warps=4, num_stages=2)),
]
MANY = [
    (600, 1536, 144, True, BF16, None),
    (2000, 2048, 1040, True, BF16, None),
    (300, 528, 272, True, BF16, FusedConfig(128, 256, 64, splits=4, warp_specialised=True)),
]
WITH_TORCH_ALONE = {REDUCE_SCATTER: ("sequential",), GATHER_MATMUL: ("sequential", "copy_gather")}
WITH_TORCH_ALONE[GATED] = WITH_TORCH_ALONE[GATHER_MATMUL]


class Numbers:
    """All ranks' operands, the same on every rank, and what this rank's result is."""

    def __init__(self, ctx: iris.Iris, op: str, form: str, M: int, N: int, K: int, bias: bool, dtype: torch.dtype):
        draw = torch.Generator().manual_seed(M * N + K)
        w, rank, scatters = ctx.num_ranks, ctx.cur_rank, op == REDUCE_SCATTER
        A = [torch.randn(M, K, generator=draw).to(dtype).to(ctx.device) for _ in range(w if scatters else 1)]
        weights = torch.randn(w, N, K, generator=draw)
        weights[:, ::2] *= torch.rand(weights[:, ::2].shape, generator=draw) ** 9
        rounded = [scaled_matmul.quantised(weight.to(ctx.device)) for weight in weights]
        biases = torch.randn(w, N, generator=draw).to(dtype).to(ctx.device)
        self.B, self.scale = rounded[rank][0].t(), rounded[rank][1]
        exact = [
            a.double() @ (b.t().double() * s.double()) for a, (b, s) in zip(A * (w // len(A)), rounded, strict=True)
        ]
        exact = sum(exact) if scatters else exact[rank]
        self.bias = (biases[0] if scatters else biases[rank]) if bias else None
        if bias:
            exact = exact + self.bias.double()
        if op == GATED:
            first, second = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(first) * second
        dim = 0 if form == "rows" else 1
        if scatters:
            self.A, exact = A[rank], _part(exact, dim, w, rank)
        else:
            self.A = _part(A[0], dim, w, rank)
        self.exact = exact


def _part(whole: torch.Tensor, dim: int, world_size: int, rank: int) -> torch.Tensor:
    size = whole.shape[dim]
    start = min(size, rank * part_size(size, world_size))
    return whole.narrow(dim, start, part_of(size, world_size, rank)).contiguous()


def room(dtype: torch.dtype, rounds: bool, ranks: int) -> float:
    """Of a row's norm, how far a result may be off: rounded rows, or none."""
    if rounds:
        return 0.06
    return (ranks + 1) * (2**-8 if dtype == BF16 else 2**-21)


@torch.no_grad()
def numbers_body(ctx: iris.Iris, op: str, form: str, M, N, K, bias, dtype, config, rounds: bool | None = None) -> None:
    given = Numbers(ctx, op, form, M, N, K, bias, dtype)
    if rounds is None:
        rounds = ON_GPU and dtype == BF16 and N % 16 == K % 16 == 0
    allowed = given.exact.norm() * room(dtype, rounds, ctx.num_ranks)
    call, scale, digest = getattr(ctx.ops, op), given.scale, None
    out = torch.empty(given.exact.shape, dtype=dtype, device=ctx.device)
    for again in range(4):  # from the third call on as repeated, at last at other addresses
        if again == 3:
            out, scale = torch.empty_like(out), scale.clone()
        call(poison(out), given.A, given.B, given.bias, config=config, scale=scale)
        assert (out.double() - given.exact).norm() <= allowed, (again, (out.double() - given.exact).norm() / allowed)
        assert digest is None or torch.equal(digest, out), "the same bits in each call"
        digest = out.clone()
    call(out, given.A, given.B, given.bias, config=config, scale=scale.roll(1))
    assert (out.double() - given.exact).norm() > 0.05 * given.exact.norm() or out.numel() == 0, "scales count"


@pytest.mark.parametrize("case", CASES + MANY if ON_GPU else CASES, ids=lambda case: "x".join(map(str, case[:3])))
@pytest.mark.parametrize("op, form", OPS)
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [1, 3])
@pytest.mark.some(14, on_gpus=24)
def test_numbers(world_size: int, op: str, form: str, case: tuple) -> None:
    if case[-1] is not None and op != REDUCE_SCATTER and case[-1].warp_specialised:
        pytest.skip("no program warp-specialised pushes these")
    run_ranks(world_size, numbers_body, op, form, *case)


@pytest.mark.parametrize("op, algorithm", [(op, each) for op in WITH_TORCH_ALONE for each in WITH_TORCH_ALONE[op]])
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2])
def test_products_that_are_torchs(world_size: int, op: str, algorithm: str) -> None:
    case = 96 * world_size, 64, 256, op != GATED, BF16, FusedConfig(algorithm=algorithm)
    run_ranks(world_size, numbers_body, op, "rows", *case)


@torch.no_grad()
def rounded_body(ctx: iris.Iris, *case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_matmul, "multiplies_in_fp8", lambda *_: True)
        numbers_body(ctx, *case, rounds=True)


@pytest.mark.skipif(ON_GPU, reason="there the numbers above are those")
@pytest.mark.parametrize("form", ["rows", "cols"])
def test_rounded_rows_in_the_interpreter(form: str) -> None:
    config = FusedConfig(32, 64, 64, num_warps=4, algorithm="one_shot")
    run_ranks(2, rounded_body, REDUCE_SCATTER, form, 70, 96, 144, True, BF16, config)
