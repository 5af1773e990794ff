"""An op that is added by one object and one line of the table is planned, checked, run and registered with torch."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris.errors import ShapeError
from iris.machines import machine_named
from iris_ops import FusedConfig, calls, launch, torch_ops
from iris_ops.kernels import lamport_matmul
from iris_ops.planning import operations
from iris_ops.planning import plan as engine
from iris_ops.planning.operations import ALL_REDUCE, AllReduce, Shapes
from iris_ops.planning.ways import WAYS
from iris_ops.planning.ways.lamport import Lamport
from iris_ops.problem import Request, requested_problem
import pytest
import torch

from tests.harness import run_ranks

H200 = machine_named("NVIDIA H200", 132)


class Transposed(AllReduce):
    """`out [M,N] = sum over ranks of the transpose of A [K,M], times B [K,N]`."""

    name = "transposed_matmul_all_reduce"
    scaled = False
    expected = "A (K,M), B (K,N), out (M,N)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        (k, m), (kb, n), out, _ = shapes
        return (m, n, k) if kb == k and out == (m, n) else None


class TransposedWay(Lamport):
    kernel = "transposed_lamport"
    launcher = "tests.iris_ops.test_new_op:launcher"
    ops = frozenset((Transposed.name,))
    algorithms: tuple[str, ...] = ("one_shot",)

    def tiles(self, problem, machine):
        return [FusedConfig(16, 32, 32, num_warps=4, num_stages=1, algorithm="one_shot", kernel=self.kernel)]

    def together(self, problem, config, machine, gemm):
        return 1.0, gemm + 1.0

    def fuses(self, problem, config):
        return ()


def launcher(rank, workspace, problem, config, tensors):
    known = replace(problem, op=ALL_REDUCE)
    return lamport_matmul.launcher(rank, workspace, known, config, tensors._replace(A=tensors.A.t()))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch)


def add(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(operations.BY_NAME, Transposed.name, Transposed())
    ways = (*WAYS, TransposedWay())
    patch.setattr(calls.Calls, "plan", lambda self, problem: engine.choose(ways, problem, H200))
    for module in (calls, launch):
        patch.setattr(module, "way_for", lambda problem, config: engine.way_for(problem, config, ways))


def test_a_new_op_is_planned(added: None) -> None:
    problem = requested_problem(Request(Transposed.name, 24, 48, 64, 2, torch.bfloat16))
    chosen = engine.choose((*WAYS, TransposedWay()), problem, H200)
    assert chosen.kernel == "transposed_lamport" and Transposed.name in chosen.reasons[0]
    assert (problem.form, problem.link_bytes) == ("", 24 * 48 * 2)


def run_transposed(ctx: iris.Iris) -> tuple[float, str]:
    with pytest.MonkeyPatch.context() as patch:
        add(patch)
        torch.manual_seed(ctx.cur_rank)
        for _ in range(3):  # the third at known addresses
            A, B = (torch.randn(64, size, dtype=torch.bfloat16, device=ctx.device) for size in (24, 48))
            out, bias = A.new_full((24, 48), torch.nan), torch.ones(48, dtype=A.dtype, device=ctx.device)
            for _ in range(2):
                getattr(ctx.ops, Transposed.name)(out, A, B, bias)
        whole = (A.double().t() @ B.double()).float()
        ctx.ccl.all_reduce(whole, whole)
        torch_ops._register(Transposed.name)
        operator = getattr(torch.ops.iris_ops, Transposed.name)
        assert torch.equal(operator(A, B, bias, (24, 48), ctx.group_name), out)
        with pytest.raises(ShapeError, match=r"expected A \(K,M\), B \(K,N\), out \(M,N\)") as error:
            getattr(ctx.ops, Transposed.name)(out, A.t(), B)
        return float((out - whole - 1).abs().max() / whole.abs().max()), str(error.value)


def test_a_new_op_runs_and_is_right() -> None:
    for missed, message in run_ranks(2, run_transposed):
        assert missed < 2**-7 and message.startswith(f"{Transposed.name}: A is (24, 64)")


def test_an_op_that_no_table_has_is_no_attribute() -> None:
    run_ranks(1, refuse)


def refuse(ctx: iris.Iris) -> None:
    with pytest.raises(AttributeError, match=r"'Ops' object has no attribute 'transposed_matmul_all_reduce'"):
        getattr(ctx.ops, Transposed.name)
