"""The rivals of `benchmarks.ccl`: torch.distributed (NCCL, gloo) and torch's symmetric memory."""

from functools import partial
import math

from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.cases.ccl_case import Call, Case, Contender
from benchmarks.rivals.of_torch import symmetric_memory as memory_of_all

ONE_SHOT_LIMIT = 16 << 20  # beyond it nobody would send everything to everyone


def torch_distributed(team: Team) -> Contender:
    def prepare(case: Case) -> tuple[Call, Call]:
        out, w = case.empty(), team.world

        def all_reduce(i: int) -> torch.Tensor:
            out.copy_(case.inputs[i])
            dist.all_reduce(out)
            return out

        def all_reduce_again(i: int) -> torch.Tensor:
            # there is no call but in place; the mean of means keeps the numbers finite, at the same cost
            dist.all_reduce(out, op=dist.ReduceOp.AVG if team.cuda else dist.ReduceOp.SUM)
            return out

        def gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(out, case.inputs[i])
            return out

        def scatter(i: int) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, case.inputs[i])
            return out

        def exchange(i: int) -> torch.Tensor:
            dist.all_to_all_single(out.view(w, -1), case.inputs[i].view(w, -1))
            return out

        if case.op == "all_reduce":
            return all_reduce, all_reduce_again
        call = {"all_gather": gather, "reduce_scatter": scatter, "all_to_all": exchange}[case.op]
        return call, call

    def supports(case: Case) -> bool:
        return team.cuda or case.op != "all_to_all"

    return Contender("NCCL" if team.cuda else "gloo", "rival", prepare, supports, in_place=True)


def symmetric_memory(team: Team, nbytes: int, dtype: torch.dtype) -> list[Contender]:
    """Return torch's one-shot and two-shot. Input must lie in symmetric memory; copying it there is not counted."""
    memory = partial(memory_of_all, nbytes // dtype.itemsize + team.world**2, dtype, team.device)
    group = dist.group.WORLD.group_name

    def one_shot(case: Case) -> tuple[Call, Call]:
        shared, out = memory()[: math.prod(case.shape)], case.empty()

        def timed(i: int) -> torch.Tensor:
            return torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out)

        def checked(i: int) -> torch.Tensor:
            case.team.barrier()
            shared.copy_(case.inputs[i])
            return timed(i)

        return checked, timed

    def two_shot(case: Case) -> tuple[Call, Call]:
        shared = memory()[: math.prod(case.shape)]

        def timed(i: int) -> torch.Tensor:
            return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

        def checked(i: int) -> torch.Tensor:
            case.team.barrier()
            shared.copy_(case.inputs[i])
            return timed(i)

        return checked, timed

    def reduces(case: Case) -> bool:
        return case.op == "all_reduce" and dtype in (torch.bfloat16, torch.float32)

    def small(case: Case) -> bool:
        return reduces(case) and case.nbytes <= ONE_SHOT_LIMIT

    return [
        Contender("torch one-shot", "rival", one_shot, small, in_place=True),
        Contender("torch two-shot", "rival", two_shot, reduces, in_place=True),
    ]
