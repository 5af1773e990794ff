"""A product without ranks whose rows do not depend on each other: a row has the same bits however many there are.

torch's product, a library's, does not promise that. It takes another kernel for few rows than for many, and may cut K
in parts that it adds up. So where a row's bits are promised layers multiply by this in its place, eager or compiled,
and so do the ways of an op that come with torch's product.

    few rows, or any but Hopper's      `skinny_matmul`: a stream of weights
    many, where rows are whole vectors `kernels/hopper/gather_matmul.py` with one rank
    weights in another format          by the format's own product (`WeightFormat.fixed_product`)
    CPU                                `iris/fixed_order.py`
    float32 on GPUs                    torch's product of 64 rows at a time, the last ones filled up: so it is always
                                       the same product of the same sizes, whatever the number of rows

Which one depends on sizes, but all of one machine sum a row in one order (`planning/orders.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import fixed_order, registry
from iris.machines import machine_of
import numpy as np
import torch

from ..kernels.descriptors import as_stored
from ..kernels.hopper import gather_matmul, operands
from ..named import named
from ..operands import Operands
from ..operators import OPERATORS
from ..planning.epilogues import NO_EPILOGUE, Epilogue
from ..planning.orders import least_rows
from ..planning.product_model import local_problem, specialised
from ..planning.weights import format_of
from ..recording import is_recording, row_count
from ..with_torch import torch_matmul
from . import skinny_matmul

if TYPE_CHECKING:
    from iris.rank import Rank


_ROWS = 64  # of a product in float32 on a GPU


def multiply(
    ctx: Rank, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
    scale: torch.Tensor | None = None, epilogue: Epilogue = NO_EPILOGUE,
) -> None:  # fmt: skip
    """Store A [M, K] @ B [K, N] + bias in `out` [M, N], or what `epilogue` makes of it.

    With `scale`, float32 [N], B is stored in another format. An epilogue begins with the product rounded.
    """
    if out.numel() == 0:
        return
    whole = scale is None and A.device.type == "cuda" and A.dtype.itemsize == 2
    if epilogue.matrices > 1 and not whole:
        product = A.new_empty(A.shape[0], B.shape[1])
        multiply(ctx, product, A, B, bias, scale)
        named(epilogue.separate)(epilogue, out, product)
        return
    if scale is not None:
        restored = named(format_of(B, scale).fixed_product)(A, B.t(), scale, bias, out)
        if restored is None:
            return
        B = restored.t()
    if A.device.type == "cpu":
        result = torch.from_numpy(fixed_order.product(_array(A), _array(B)))
        out.copy_(result if bias is None else result.add_(bias.float()))
        return
    if A.dtype.itemsize != 2:
        _by_blocks(out, A, B, bias)
        return
    _in_16_bits(ctx, out, A, B, bias, epilogue)


def _in_16_bits(
    ctx: Rank, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue
) -> None:
    """Multiply on a GPU in one kernel."""
    machine = machine_of(A.device)
    problem = local_problem(A.shape[0], B.shape[1], B.shape[0], A.dtype, epilogue)
    config = specialised(problem, machine)
    stored = epilogue.matrices == 1 or as_stored(B) is not B  # the specialised kernel reads two matrices as [N, K]
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    if config is not None and stored and operands.supports(A, B, out) is None:
        gather_matmul.multiply_alone(ctx, problem, config, Operands(out, A, B, bias))
        return
    launch = skinny_matmul.Launch(least_rows=least_rows(machine), out=out if out.is_contiguous() else None)
    result = skinny_matmul.skinny_matmul(A, B.t(), bias, epilogue=epilogue.name, launch=launch)
    if result is not out:
        out.copy_(result)


def _by_blocks(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> None:
    rows = A.new_zeros(-(-A.shape[0] // _ROWS) * _ROWS, A.shape[1])
    rows[: A.shape[0]] = A
    result = out.new_empty(rows.shape[0], out.shape[1])
    for block, part in zip(rows.split(_ROWS), result.split(_ROWS), strict=True):
        torch_matmul.multiply(part, block, B, bias)
    out.copy_(result[: A.shape[0]])


def linear(
    ctx: Rank, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [..., K] times the transpose of the weight [N, K], plus bias [N], as a new tensor [..., N].

    It works in eager and in compiled code.
    """
    if is_recording():
        return torch.ops.iris_ops.linear_in_order(x, weight, bias, scale, ctx.group_name)
    return _linear(ctx, x, weight, bias, scale)


def _linear(
    ctx: Rank, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    rows = x.reshape(row_count(x), x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    if not out.is_meta:  # of a model that is tried without its weights
        multiply(ctx, out, rows, weight.t(), bias, scale)
    return out.view(*x.shape[:-1], weight.shape[0])


def _array(t: torch.Tensor) -> np.ndarray:
    return t.detach().float().numpy()


OPERATORS.add(
    "linear_in_order(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, str group) -> Tensor",
    lambda x, weight, bias, scale, group: _linear(registry.find(group), x, weight, bias, scale),
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
