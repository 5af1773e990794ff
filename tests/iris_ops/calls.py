"""One call of an op as a test makes it: operands laid out, `out` poisoned between guard bands, the result checked."""

from __future__ import annotations

from functools import partial
import hashlib
from types import SimpleNamespace

import iris
from iris_ops.workspace import Workspace
import torch

from tests.checks import Guarded, assert_close_to_reference, poison
from tests.reference import Case, Inputs


def strided(t: torch.Tensor, pad: int) -> torch.Tensor:
    """A copy of `t` [rows, cols] whose rows stand `pad` elements apart, NaN between them."""
    wide = poison(t.new_empty(t.shape[0], t.shape[1] + pad))
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


class Call:
    """The tensors of one rank for a case."""

    def __init__(self, ctx: iris.Iris, case: Case) -> None:
        self.ctx, self.case = ctx, case
        self.inputs = Inputs.random(case, ctx.num_ranks, ctx.device)
        a, b, c = (tensors[ctx.cur_rank] for tensors in (self.inputs.A, self.inputs.B, self.inputs.bias))
        self.A = strided(a, case.pad)
        self.B = strided(b.t(), case.pad).t() if case.transposed else strided(b, case.pad)
        self.bias = c if case.bias else None
        ordinary = SimpleNamespace(empty=partial(torch.empty, device=ctx.device), device=ctx.device)
        # every rank takes as much from the heap, though the last parts may be shorter
        self.guarded = Guarded(
            ctx if case.on_heap else ordinary, case.largest_out(ctx.num_ranks), case.dtype, row_pad=case.pad
        )
        rows, cols = case.shapes(ctx.num_ranks, ctx.cur_rank)[2]
        self.out = self.guarded.tensor[:rows, :cols]

    def run(self, workspace: Workspace | None = None, async_op: bool = False) -> Workspace:
        op = getattr(self.ctx.ops, self.case.op)
        return op(self.out, self.A, self.B, self.bias, async_op, self.case.config, workspace)

    def check(self) -> torch.Tensor:
        """A copy of `out`, once it is found right and its surroundings untouched."""
        self.guarded.check()
        unwritten = self.guarded.tensor.isnan().sum() - self.out.isnan().sum()
        assert int(unwritten) == self.guarded.tensor.numel() - self.out.numel(), "written beyond this rank's part"
        rank = self.ctx.cur_rank
        exact, torchs = (self.inputs.result(self.case, rank, exact) for exact in (True, False))
        assert_close_to_reference(self.out, exact, torchs, self.inputs.magnitude(self.case, rank))
        return self.out.clone()


def check_case(ctx: iris.Iris, case: Case, runs: int = 2) -> str:
    """Calls, again with the first call's workspace, and looks for the same bits; returns a digest of them."""
    try:
        call, workspace, digest = Call(ctx, case), None, None
        for _ in range(runs):
            poison(call.guarded.tensor)
            workspace = call.run(workspace)
            again = bits(call.check())
            assert digest in (None, again), "a second run gives other bits"
            digest = again
        return digest
    except Exception as error:
        raise AssertionError(f"rank {ctx.cur_rank} of {ctx.num_ranks}, {case}: {error!r}") from error


def check_cases(ctx: iris.Iris, cases: list[Case], runs: int = 2) -> list[str]:
    return [check_case(ctx, case, runs) for case in cases]


def bits(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def assert_same_bits(cases: list[Case], digests: list[list[str]]) -> None:
    """`digests`: [rank][case]. Ops whose result is one for all ranks must give the same bits on all of them."""
    for case, of_ranks in zip(cases, zip(*digests, strict=True), strict=True):
        if case.op in ("matmul_all_reduce", "matmul_all_gather"):
            assert len(set(of_ranks)) == 1, f"ranks hold different bits: {case}"
