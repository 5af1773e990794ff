"""A GPU, and the tiles of its warp-specialised kernels, are a line of a table each: plans use both."""

from __future__ import annotations

from dataclasses import replace

from iris import machines
from iris.machines import Machine, machine_named
from iris_ops.planning import tile_model
from iris_ops.planning.hopper_tiles import HOPPER
from iris_ops.planning.plan import plan
from iris_ops.problem import ALL_REDUCE, Request, requested_problem
import pytest
import torch

GPU = Machine("Toy 9000", 100, 500.0, 4000.0, 300.0, 3.2, 5.5, 1.6, 227 << 10, "toy", "of a toy")
TILES = replace(HOPPER, overlapped={(128, 128, 64, 8): (4, 0.97)})
MANY_ROWS = requested_problem(Request(ALL_REDUCE, 8192, 8192, 7168, 2, torch.bfloat16))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machines._MACHINES, GPU.name, GPU)
    monkeypatch.setitem(tile_model.SPECIALISED_TILES, GPU.architecture, TILES)


def test_a_new_gpu_has_its_own_rates(added: None) -> None:
    assert machine_named(GPU.name, 100) is GPU
    assert "rates of a toy" in plan(MANY_ROWS, GPU).reasons


def test_a_new_architecture_has_its_own_tiles(added: None) -> None:
    chosen = plan(MANY_ROWS, GPU)
    assert chosen.warp_specialised
    assert (chosen.block_m, chosen.block_n, chosen.block_k, chosen.num_stages) == (128, 128, 64, 4)
    assert plan(MANY_ROWS, machine_named("NVIDIA H200", 132)).block_n == 256


def test_without_one_no_warps_are_specialised(added: None) -> None:
    chosen = plan(MANY_ROWS, replace(GPU, architecture=""))
    assert not chosen.warp_specialised and "rejected hopper.matmul_reduce: it needs a Hopper GPU" in chosen.reasons
