"""FlashInfer's all-reduce (https://github.com/flashinfer-ai/flashinfer), measured where FlashInfer is installed.

One kernel sums what every rank has, in one shot (Lamport: data that shows its own arrival) or in two
(partial sums, then totals, with flags between). The same kernel can end in the residual's sum and an RMSNorm. The
ranks reach each other by torch's symmetric memory; none of it uses multicast. Called as vLLM calls it: sums in float32,
overlapped with the kernel before, one shot for small messages.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals import contender
from benchmarks.rivals.contender import RIVAL, Contender

NAMES = {True: "FlashInfer one-shot", False: "FlashInfer two-shot"}
LIMITS = {True: 16 << 20, False: 64 << 20}  # bytes of a message; beyond them vLLM takes other kernels
WORLDS = (2, 4, 8, 16)
HIDDEN = 8192  # columns of the workspace; calls of other widths share it
LATE = 16  # rows from which on a kernel lets the next one start only at its end, as in vLLM


def installed(team: Team) -> bool:
    """Return whether FlashInfer can be imported; say so where it cannot."""
    return contender.installed(team, "flashinfer", "FlashInfer")


def supports(one_shot: bool, rows: int, columns: int, world: int, dtype: torch.dtype) -> bool:
    small_enough = rows * columns * dtype.itemsize <= LIMITS[one_shot] and columns % 8 == 0
    enough = rows > (0 if one_shot else world)
    return dtype in (torch.bfloat16, torch.float16) and world in WORLDS and small_enough and enough


@functools.cache
def workspace(world: int, rank: int) -> torch.Tensor:
    """Return FlashInfer's workspace, for messages of up to the larger limit. Collective."""
    from flashinfer import comm

    rows = LIMITS[False] // (2 * HIDDEN)
    return comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, world, rows, HIDDEN, group=dist.group.WORLD)[1]


def reduced(team: Team, one_shot: bool, partial: torch.Tensor, **outputs: object) -> None:
    """Sum all ranks' `partial` [rows, columns] into what `outputs` name; with `norm_out` also the norm of it."""
    from flashinfer import comm

    rows, columns = partial.shape
    patterns = comm.AllReduceFusionPattern
    pattern = patterns.kARResidualRMSNorm if "norm_out" in outputs else patterns.kAllReduce
    blank = dict.fromkeys(
        ("allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps",
         "scale_factor", "layout_code")
    )  # fmt: skip
    comm.trtllm_allreduce_fusion(
        allreduce_in=partial,
        world_size=team.world,
        world_rank=team.rank,
        token_num=rows,
        hidden_dim=columns,
        workspace_ptrs=workspace(team.world, team.rank),
        launch_with_pdl=True,
        trigger_completion_at_end=rows > LATE,
        fp32_acc=True,
        pattern_code=pattern,
        use_oneshot=one_shot,
        **{**blank, **outputs},
    )


def contenders(team: Team, rows: list[Row], dtype: torch.dtype) -> list[Contender]:
    if not team.cuda or not installed(team):
        return []
    return [
        Contender(f"cuBLAS + {name}", RIVAL, {"ar": _prepare(team, one_shot)}, served(one_shot))
        for one_shot, name in NAMES.items()
    ]


def _prepare(team: Team, one_shot: bool) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        partial, out = inputs.new(*inputs.out_shape), inputs.new(*inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=partial)
            reduced(team, one_shot, partial, allreduce_out=out)
            return out

        return call

    return prepare


def served(one_shot: bool) -> Callable[[Row, int, torch.dtype], bool]:
    return lambda row, world, dtype: supports(one_shot, row.M, row.N, world, dtype)
