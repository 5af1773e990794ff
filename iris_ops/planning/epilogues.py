"""Describe what follows the sum of a product: nothing, a gate, or the first half of a norm.

Each is an object. A problem holds one, and a way says which its kernels compute (`Way.fuses`); any other runs in a
separate kernel. To add one: an object here, its kernels, and its name in the ways that fuse it. One with another
activation needs the object alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..activation import Activation

if TYPE_CHECKING:
    from iris.machines import Machine

# The share of the memory's rate that gating reaches, and microseconds of a kernel after another.
_GATE_SHARE, _AFTER_US = 0.9, 3.0


@dataclass(frozen=True)
class Epilogue:
    """What follows the sum of a product. This class is nothing; subclasses and fields say what differs."""

    name: str = ""
    separate: str = ""
    """`module:function` below `iris_ops` that launches a separate kernel, given this object, `out`, the product,
    and the call's other tensors."""
    matrices: int = 1
    """How many matrices of as many columns lie side by side in B. A column of the result joins one column of each."""
    activation: Activation | None = None
    """The function that joins columns of two matrices."""

    @property
    def of_tiles(self) -> tuple[Epilogue, ...]:
        """Return this epilogue if a kernel computes it of a tile of each matrix alone, for `Way.fuses`."""
        return (self,) if self.activation else ()

    def us(self, problem: Any, machine: Machine) -> float:
        """Return the microseconds of a separate kernel."""
        return 0.0


class _Gate(Epilogue):
    def us(self, problem: Any, machine: Machine) -> float:
        nbytes = 1.5 * problem.M * problem.N * problem.dtype.itemsize
        return nbytes / (_GATE_SHARE * machine.hbm_gbs * 1e3) + _AFTER_US


class _Norm(Epilogue):
    def us(self, problem: Any, machine: Machine) -> float:
        return 2.5


NO_EPILOGUE = Epilogue()
GATE = _Gate("gate", "local.gated_matmul:gate", 2, Activation("silu"))
NORM = _Norm("norm", "kernels.rmsnorm_epilogue:after_product")
EPILOGUES = {each.name: each for each in (NO_EPILOGUE, GATE, NORM)}
