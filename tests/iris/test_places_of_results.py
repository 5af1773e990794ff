"""Where peers write `out` it must lie at one place: all ranks raise before a tensor of a peer is written elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import iris
from iris import platform
from iris.ccl import Config
from iris.errors import NotSymmetricError
from iris_ops import FusedConfig
import pytest
import torch
import torch.distributed as dist

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.test_hopper import looked_at

pytestmark = both

SIZE, DEPTH, DTYPE = (512, 256, torch.bfloat16) if ON_GPU else (64, 32, torch.float32)
PORTABLE = FusedConfig(32, 32, 32, num_warps=4)
SPECIALISED = FusedConfig(128, 128, 64, num_stages=3, num_programs=7, warp_specialised=True)
UNTOUCHED = -7.0

Call = Callable[[iris.Iris, torch.Tensor], object]


def operands(ctx: iris.Iris, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ones = {"dtype": DTYPE, "device": ctx.device}
    return torch.ones(rows, DEPTH, **ones), torch.ones(DEPTH, SIZE, **ones)


def reduce_by(config: FusedConfig) -> Call:
    return lambda ctx, out: ctx.ops.matmul_all_reduce(out, *operands(ctx, SIZE), config=config)


def gather_by(config: FusedConfig) -> Call:
    return lambda ctx, out: ctx.ops.matmul_all_gather(out, *operands(ctx, SIZE // ctx.num_ranks), config=config)


def collective(op: str, config: Config, part: bool = False) -> Call:
    def call(ctx: iris.Iris, out: torch.Tensor) -> None:
        rows = SIZE // ctx.num_ranks if part else SIZE
        getattr(ctx.ccl, op)(out, torch.ones(rows, SIZE, dtype=DTYPE, device=ctx.device), config=config)

    return call


WARP_SPECIALISED: dict[str, Call] = {
    "matmul_all_reduce, warps specialised": reduce_by(SPECIALISED),
    "matmul_all_gather, warps specialised": gather_by(SPECIALISED),
}
CALLS: dict[str, Call] = {
    "matmul_all_reduce": reduce_by(PORTABLE),
    "matmul_all_gather": gather_by(PORTABLE),
    **(WARP_SPECIALISED if ON_GPU else {}),  # CPUs take the portable kernels for them
    "all_reduce, two shots": collective("all_reduce", Config(protocol="flags", all_reduce_variant="two_shot")),
    "all_reduce, ring": collective("all_reduce", Config(all_reduce_variant="ring")),
    "all_reduce, two rings": collective("all_reduce", Config(all_reduce_variant="ring", all_reduce_num_rings=2)),
    "all_gather": collective("all_gather", Config(protocol="flags"), part=True),
    "all_to_all": collective("all_to_all", Config(protocol="flags")),
}


def elsewhere(shared: iris.Iris, which: str, outside: bool) -> bool:
    """Whether warp-specialised kernels served the calls, all of which a context of its own makes."""
    call, served = CALLS[which], []
    ctx = iris.iris(1 << 26)
    with closing(ctx), looked_at(served):
        places = [ctx.full((SIZE, SIZE), UNTOUCHED, dtype=DTYPE) for _ in range(3)]
        for out in places[:2]:
            call(ctx, out)  # right where it is the same
            assert not (out == UNTOUCHED).any()
            ctx.barrier()
            out.fill_(UNTOUCHED)
        ctx.barrier()
        mine = int(ctx.cur_rank == 1)  # so of three ranks two agree
        out = places[mine]
        if outside and ctx.cur_rank == 1:
            out = torch.full_like(out, UNTOUCHED)
        with pytest.raises(
            NotSymmetricError, match=r"out lies \d+ bytes from the beginning of the heap on rank \d and else"
        ):
            call(ctx, out)
            platform.synchronize(ctx.device)
            ctx.check()
        platform.synchronize(ctx.device)
        dist.barrier()  # the peers' kernels have ended, too
        for number, place in enumerate(places):
            assert number == mine or (place == UNTOUCHED).all(), "written by a peer"
    return all(served) and bool(served)


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2], scope="session")
@pytest.mark.parametrize("outside", [False, True], ids=["another tensor", "outside the heap"])
@pytest.mark.parametrize("which", CALLS)
def test_results_at_different_places_are_found(world_size: int, which: str, outside: bool) -> None:
    served = run_ranks(world_size, elsewhere, which, outside)
    if which in WARP_SPECIALISED and platform.has_warp_specialisation(torch.device("cuda")):
        assert all(served)


@pytest.mark.parametrize("world_size, which", [
    (3, "matmul_all_reduce"), (3, "all_reduce, two shots"), (3, "all_reduce, two rings"), (4, "all_reduce, ring"),
])  # fmt: skip
def test_a_result_at_another_place_on_one_rank_of_several_is_found_on_all(world_size: int, which: str) -> None:
    run_ranks(world_size, elsewhere, which, False)
