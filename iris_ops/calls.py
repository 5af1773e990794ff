"""Finds an earlier call of an op that is like this one, and keeps what the next one like it needs.

A model calls its layers with the same shapes over and over, often at the same addresses. What the first call found out
(`Prepared`: its problem, plan and workspace) serves all calls whose key is the same but for the addresses.
`iris/launch/relaunch.py` keeps launches by the whole key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from iris import transforms
from iris.launch import relaunch
import torch

from .config import FusedConfig
from .problem import GATHER_MATMUL, Problem

if TYPE_CHECKING:
    from .kernels.rmsnorm_epilogue import Epilogue
    from .workspace import Workspace

NAMES = ("out", "A", "B", "bias", "scale")


@dataclass(frozen=True)
class Prepared:
    """What the first call of a problem found out. `spans`: bytes of each tensor, `NAMES` first."""

    problem: Problem
    config: FusedConfig
    writes_to_peers: bool
    num_flags: int
    nbytes: int
    exchange: int
    spans: tuple[int, ...]

    def facts(self, biased: bool, async_op: bool, workspace: int | None, out: int | None) -> dict[str, Any]:
        """What ranks compare of a call with IRIS_DEBUG=1.

        `workspace`, `out`: their offsets on the heap; None for the context's own workspace and for an `out` elsewhere.
        """
        problem = self.problem
        facts: dict[str, Any] = {
            "form": problem.form,
            "M": problem.M,
            "dtype": problem.dtype,
            "config": replace(self.config, prediction=None),  # which is each rank's own
            "async_op": async_op,
            "bias": "given" if biased else "none",
            "workspace": "the context's own" if workspace is None else f"at {workspace} of the heap",
        }
        if problem.by_tree:
            facts["depths"] = problem.depths
        if problem.fp8:
            facts["B"] = "in eight bits"
        if problem.op == GATHER_MATMUL:  # else each may multiply a depth of its own, and here has columns of its own
            facts["K"] = problem.K
        else:
            facts["N"] = problem.N
        if self.writes_to_peers:
            facts["out"] = "outside the heap" if out is None else f"at {out} of the heap"
        return facts


def key_of(
    op: str, device_of: Callable[[torch.Tensor], Any], out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    bias: torch.Tensor | None, config: FusedConfig | None, workspace: Workspace | None, epilogue: Epilogue | None,
    scale: torch.Tensor | None, depths: Sequence[int] | None = None,
) -> tuple | None:  # fmt: skip
    """What a call comes down to: one with the same key passes the same checks and launches the same."""
    try:
        if transforms.any_hides(out, A, B, bias, scale, *(epilogue or ())):
            return None
        if (out.requires_grad or A.requires_grad or B.requires_grad) and torch.is_grad_enabled():
            return None
        lazy = out.dtype in relaunch.LAZY
        if lazy and (out.is_neg() or A.is_neg() or B.is_neg()):
            return None
        where = device_of
        address, more = 0, None
        if bias is not None:
            if lazy and bias.is_neg() or bias.requires_grad and torch.is_grad_enabled():
                return None
            address, more = bias.data_ptr(), (bias.shape, bias.stride(), bias.dtype, where(bias))
        scales, ending = 0, ()
        if scale is not None:
            if scale.is_neg() or scale.requires_grad and torch.is_grad_enabled():
                return None
            scales, ending = scale.data_ptr(), (scale.shape, scale.stride(), scale.dtype, where(scale))
        addresses = (out.data_ptr(), A.data_ptr(), B.data_ptr(), address, scales)
        if epilogue is not None:
            if any(t.is_neg() or t.requires_grad and torch.is_grad_enabled() for t in epilogue):
                return None
            addresses += tuple(t.data_ptr() for t in epilogue)
            ending += tuple((t.shape, t.stride(), t.dtype, where(t)) for t in epilogue)
        return (
            *addresses, op,
            out.shape, out.stride(), out.dtype, where(out),
            A.shape, A.stride(), A.dtype, where(A),
            B.shape, B.stride(), B.dtype, where(B),
            more, *ending, depths, config, workspace,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):  # wrong arguments: the checks will say so
        return None
