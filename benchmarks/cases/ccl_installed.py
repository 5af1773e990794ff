"""Contenders of `benchmarks.ccl` besides torch: NCCL's symmetric kernels, vLLM's and FlashInfer's all-reduces.

Those of vLLM and FlashInfer where they are installed. NCCL's need input and output in memory that it has registered;
copying it there is not counted.
"""

from __future__ import annotations

from functools import partial
import math

from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.cases.ccl_case import COPIES, Call, Case, Contender
from benchmarks.rivals import of_flashinfer, of_nccl, of_vllm


def contenders(team: Team, nbytes: int, dtype: torch.dtype) -> list[Contender]:
    contenders = [_nccl_symmetric(team, nbytes, dtype)]
    if of_vllm.installed(team):
        contenders.append(_vllm(team))
    if of_flashinfer.installed(team):
        contenders += [_flashinfer(team, one_shot) for one_shot in (True, False)]
    return contenders


def _nccl_symmetric(team: Team, nbytes: int, dtype: torch.dtype) -> Contender:
    elements = nbytes // dtype.itemsize + team.world**2

    def place(part: str, shape: tuple[int, ...], copies: int = 1) -> torch.Tensor:
        window = of_nccl.window(f"ccl {part}", copies * elements, dtype, team.device)
        return window[: copies * math.prod(shape)].view(copies, *shape)

    def prepare(case: Case) -> tuple[Call, Call]:
        given, out = place("sent", case.shape, COPIES), place("received", case.out_shape)[0]
        for own, tensor in zip(given, case.inputs, strict=True):
            own.copy_(tensor)

        def all_reduce(i: int) -> torch.Tensor:
            out.copy_(case.inputs[i])
            return again(i)

        def again(i: int) -> torch.Tensor:
            # There is no call but in place, and NCCL's symmetric kernels have no mean: the sums grow beyond all
            # numbers while they are timed, which takes no other time.
            dist.all_reduce(out)
            return out

        def gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(out, given[i])
            return out

        def scatter(i: int) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, given[i])
            return out

        if case.op == "all_reduce":
            return all_reduce, again
        call = gather if case.op == "all_gather" else scatter
        return call, call

    def supports(case: Case) -> bool:
        return case.op != "all_to_all"

    return Contender(of_nccl.NAME, "rival", prepare, supports, in_place=True)


def _vllm(team: Team) -> Contender:
    def prepare(case: Case) -> tuple[Call, Call]:
        out = case.empty()

        def call(i: int) -> torch.Tensor:
            return of_vllm.reduced(team.device, case.inputs[i], out)

        return call, call

    def supports(case: Case) -> bool:
        return case.op == "all_reduce" and of_vllm.supports(_nbytes(case), team.world, case.dtype)

    capture = partial(of_vllm.capturing, team.device)
    return Contender(of_vllm.NAME, "rival", prepare, supports, capture=capture)


def _flashinfer(team: Team, one_shot: bool) -> Contender:
    def prepare(case: Case) -> tuple[Call, Call]:
        out, shape = case.empty(), as_matrix(math.prod(case.shape), team.world)

        def call(i: int) -> torch.Tensor:
            partial_sums = case.inputs[i].view(shape)
            of_flashinfer.reduced(team, one_shot, partial_sums, allreduce_out=out.view(shape))
            return out

        return call, call

    def supports(case: Case) -> bool:
        if case.op != "all_reduce":
            return False
        return of_flashinfer.supports(one_shot, *as_matrix(math.prod(case.shape), team.world), team.world, case.dtype)

    return Contender(of_flashinfer.NAMES[one_shot], "rival", prepare, supports)


def _nbytes(case: Case) -> int:
    return math.prod(case.shape) * case.dtype.itemsize


def as_matrix(elements: int, world: int) -> tuple[int, int]:
    """Return rows and columns of `elements` elements: columns as in a model's hidden states, but more rows than
    ranks."""
    columns = math.gcd(elements, of_flashinfer.HIDDEN)
    while columns % 2 == 0 and elements // columns <= world:
        columns //= 2
    return elements // columns, columns
