"""Compute the same result by torch: its product and its collective, one after the other (NCCL, gloo on CPUs).

torch's collectives move equal parts, so parts of unequal size are padded, and gathered columns are copied into place,
as serving engines do.
"""

import torch
import torch.distributed as dist

from .inputs import Call, Inputs, side_by_side, stacked
from .team import Team


def name(team: Team) -> str:
    return "cuBLAS + NCCL" if team.cuda else "torch + gloo"


def all_reduce(inputs: Inputs) -> Call:
    out = inputs.new(*inputs.out_shape)

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=out)
        dist.all_reduce(out)
        return out

    return call


def reduce_scatter(inputs: Inputs) -> Call:
    row, world = inputs.row, inputs.team.world
    by_columns = row.form == "cols"
    out = inputs.new(*row.out_shape(0, world))  # the largest part
    partial = inputs.new(row.M if by_columns else world * out.shape[0], row.N).zero_()

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=partial[: row.M])
        dist.reduce_scatter_tensor(out, stacked(partial, world) if by_columns else partial)
        return out[: inputs.out_shape[0]]

    return call


def all_gather_first(inputs: Inputs) -> Call:
    row, world = inputs.row, inputs.team.world
    out = inputs.new(*inputs.out_shape)
    rows, columns = row.a_shape(0, world)
    gathered = inputs.new(world * rows, columns)

    def call(i: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, inputs.padded[i])
        A = side_by_side(gathered, world) if row.form == "k" else gathered[: row.M]
        return torch.matmul(A, inputs.B[i], out=out)

    return call


def all_gather_last(inputs: Inputs) -> Call:
    row, world = inputs.row, inputs.team.world
    rows, columns, _ = row.gemm(world)
    part, gathered = inputs.new(rows, columns), inputs.new(world * rows, columns)
    mine = part[: inputs.A[0].shape[0]]

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=mine)
        dist.all_gather_into_tensor(gathered, part)
        return side_by_side(gathered, world) if row.form == "cols" else gathered[: row.M]

    return call


def product(inputs: Inputs) -> Call:
    """Return the product without the collective."""
    A = [inputs.whole_A(i) for i in range(inputs.copies)]
    out = inputs.new(A[0].shape[0], inputs.B[0].shape[1])
    return lambda i: torch.matmul(A[i], inputs.B[i], out=out)


PREPARE = {"ar": all_reduce, "rs": reduce_scatter, "ag": all_gather_first, "ga": all_gather_last}
"""By op, the function that prepares a call: it allocates the call's tensors."""
