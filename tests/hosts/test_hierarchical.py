"""Sums over the ranks of several hosts: right against float64 on 2 x 2 and 2 x 3 ranks, planned, explained, refused."""

from __future__ import annotations

import time
from typing import Any

import iris
from iris.errors import ArgumentError, CaptureError, PeerLostError, ShapeError
from iris.machines import machine_named
from iris_ops.config import FusedConfig, Prediction
from iris_ops.planning.hosts import SCATTER, WHOLE, Network, plan_all_reduce
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.hosts.meshes import SHORT
from tests.hosts.namespaces import kill_own_host, needs_namespaces, run_hosts

pytestmark = needs_namespaces()

_SHAPES = [(12, 16, 32), (1, 8, 16), (7, 24, 16), (0, 8, 16), (33, 40, 24)]


def _mesh(world_size: int, inside: int) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world_size // inside, inside), mesh_dim_names=("hosts", "tp"))


def _operands(seed: int, world_size: int, M: int, N: int, K: int, dtype: torch.dtype) -> Any:
    """Every rank's A and B, and the bias that all have."""
    draw = torch.Generator().manual_seed(seed)
    As = [torch.randn(M, K, generator=draw).to(dtype) for _ in range(world_size)]
    Bs = [torch.randn(K, N, generator=draw).to(dtype) for _ in range(world_size)]
    return As, Bs, torch.randn(N, generator=draw).to(dtype)


def _close(result: torch.Tensor, products: list[torch.Tensor], inside: int, rows: slice = slice(None)) -> None:
    """Within rounding, of ranks' products and hosts' sums, which travel in the result's dtype, and of the result."""
    hosts = [sum(products[first : first + inside]) for first in range(0, len(products), inside)]
    expected = sum(products)
    rounded = sum(each.abs() for each in (*products, *hosts, expected))
    bound = torch.finfo(result.dtype).eps * rounded + 1e-5
    assert ((result.double() - expected[rows]).abs() <= bound[rows]).all(), (result.double() - expected[rows]).abs()


def _sums(rank: int, world_size: int, inside: int, seed: int) -> list[str]:
    mesh, ways = _mesh(world_size, inside), []
    hosts = world_size // inside
    with iris.iris(1 << 24, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        assert ctx.across.rank == rank // inside and ctx.across_rate.gbs > 0
        for dtype in (torch.float32, torch.bfloat16):
            for number, (M, N, K) in enumerate(_SHAPES if dtype == torch.float32 else _SHAPES[:3]):
                As, Bs, bias = _operands(seed + number, world_size, M, N, K, dtype)
                with_bias = bias if number % 2 == 0 else None
                products = [a.double() @ b.double() for a, b in zip(As, Bs, strict=True)]
                products[0] += 0 if with_bias is None else bias.double()
                for force in (None, SCATTER, WHOLE):
                    real = ctx.ops._plan
                    if force is not None:
                        ctx.ops._plan = lambda *args, real=real, force=force: _forced(real(*args), force)
                    out = torch.full((M, N), torch.nan, dtype=dtype)
                    ctx.ops.matmul_all_reduce(out, As[rank], Bs[rank], with_bias)
                    ctx.ops._plan = real
                    _close(out, products, inside)
                    alike = [torch.empty_like(out) for _ in range(world_size)]
                    dist.all_gather(alike, out)
                    assert all(torch.equal(out, other) for other in alike)
                rows = -(-M // world_size)
                mine = slice(min(M, rank * rows), min(M, (rank + 1) * rows))
                part = torch.full((mine.stop - mine.start, N), torch.nan, dtype=dtype)
                ctx.ops.matmul_reduce_scatter(part, As[rank], Bs[rank].t().contiguous().t(), with_bias)
                _close(part, products, inside, mine)
                part = torch.full((M, N), torch.nan, dtype=dtype)
                ctx.ops.all_gather_matmul(part, As[0][mine], Bs[0], with_bias)
                whole = As[0].double() @ Bs[0].double() + (0 if with_bias is None else bias.double())
                torch.testing.assert_close(part, whole.to(dtype), rtol=1.6e-2, atol=1e-4)
                columns = -(-N // world_size)
                own = slice(min(N, rank * columns), min(N, (rank + 1) * columns))
                part = torch.full((M, N), torch.nan, dtype=dtype)
                ctx.ops.matmul_all_gather(part, As[0], Bs[0][:, own], None if with_bias is None else bias[own])
                torch.testing.assert_close(part, whole.to(dtype), rtol=1.6e-2, atol=1e-4)
                ways.append(ctx.ops.plan("matmul_all_reduce", M, N, K, dtype).way)
        text = ctx.ops.plan("matmul_all_reduce", 512, 64, 64, torch.float32).explain()
        assert f"over {hosts} hosts of {inside} ranks: between hosts" in text and "GB/s a rank" in text
        assert "share by share" in text and "chosen" in text
        assert "matmul_reduce_scatter" in ctx.ops.plan("matmul_reduce_scatter", 512, 64, 64, torch.float32).explain()
    return ways


def _forced(plan: Any, way: str) -> Any:
    from dataclasses import replace

    return replace(plan, way=way)


@pytest.mark.parametrize("inside", [2, 3])
def test_sums_over_two_hosts(inside: int) -> None:
    ends = run_hosts((inside, inside), _sums, inside, 17 * inside, env=SHORT, timeout=200)
    for end in ends:
        assert end.exitcode == 0, end.traceback
        assert end.result == ends[0].result  # all plan alike


def _refused(rank: int, world_size: int) -> None:
    mesh = _mesh(world_size, 2)
    with pytest.raises(ArgumentError, match="across connects rank"):
        iris.iris(1 << 20, group=mesh["tp"], across=mesh["tp"])
    with pytest.raises(ArgumentError, match="expected one dimension"):
        iris.iris(1 << 20, group=mesh["tp"], across=mesh)
    with pytest.raises(ArgumentError, match="across is None on some ranks"):
        iris.iris(1 << 20, group=mesh["tp"], across=mesh["hosts"] if rank % 2 else None)
    with pytest.raises(ArgumentError, match="invariant is 'batch' with across"):
        iris.iris(1 << 20, group=mesh["tp"], across=mesh["hosts"], invariant="batch")
    with iris.iris(1 << 22, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        A, B, out = torch.ones(4, 8), torch.ones(8, 4), torch.empty(4, 4)
        with pytest.raises(ArgumentError, match=r"inside\.moe_down_reduce_scatter is over the ranks of this host"):
            ctx.ops.moe_down_reduce_scatter(A)
        with pytest.raises(ArgumentError, match="plan: op is 'moe_down_all_reduce'"):
            ctx.ops.plan("moe_down_all_reduce", 4, 4, 8, torch.float32)
        with pytest.raises(ShapeError, match="moe_down_all_reduce: out is"):
            ctx.ops.moe_down_all_reduce(None, A, B, None, None)
        with pytest.raises(ShapeError, match="moe_down_all_reduce"):
            ctx.ops.moe_down_all_reduce(out, A, B, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
        with pytest.raises(ShapeError, match="expected 1 of 4 rows"):
            ctx.ops.all_gather_matmul(out, A[:2], B)
        with pytest.raises(ShapeError, match="expected 1 of 4 columns"):
            ctx.ops.matmul_all_gather(out, A, B)
        with pytest.raises(ShapeError, match="out is"):
            ctx.ops.matmul_all_reduce(out[:2], A, B)
        with pytest.raises(ShapeError, match="rows of 4"):
            ctx.ops.matmul_reduce_scatter(out, A, B)
        with pytest.raises(ArgumentError, match="async_op"):
            ctx.ops.matmul_all_reduce(out, A, B, async_op=True)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(CaptureError, match=r"one of gloo: expected one of NCCL"),
        ):
            patch.setattr("iris_ops.hierarchical.platform.is_capturing", lambda device: True)
            ctx.ops.matmul_all_reduce(out, A, B)
        ctx.ops.inside.matmul_all_reduce(out, A, B)
        assert (out == 16).all()
        ctx.ops.matmul_all_reduce(out, A, B)
        assert (out == 32).all()
        dist.barrier()
        if rank >= 2:
            time.sleep(1)  # until the others have left the barrier
            kill_own_host()
        with pytest.raises(PeerLostError, match="host hosta lost host hostb"):
            ctx.ops.matmul_all_reduce(out, A, B)
        with pytest.raises(PeerLostError, match="host hosta lost host hostb"):
            ctx.ops.matmul_reduce_scatter(out[:1], A, B)


def test_what_is_refused_and_a_lost_host() -> None:
    for end in run_hosts((2, 2), _refused, env=SHORT)[:2]:
        assert end.exitcode == 0, end.traceback


def test_few_rows_are_reduced_whole_and_many_by_shares() -> None:
    network, machine = Network(4, 50.0, 10.0), machine_named("NVIDIA H200", 132)
    inside = FusedConfig(prediction=Prediction(10.0, 10.0, 20.0))
    few, many = (plan_all_reduce(rows * 8192 * 2, 8, network, machine, inside, inside) for rows in (1, 4096))
    assert few.way == WHOLE and many.way == SCATTER
    assert many.across_us < network.all_reduce_us(4096 * 8192 * 2) / 4
