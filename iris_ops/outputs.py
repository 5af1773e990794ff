"""New tensors for results: on the heap where peers write them, so that nothing is copied.

The plan decides whether peers write a result; it is computed once for calls of the same sizes. At the first call with a
larger result, all ranks reserve memory: for outputs, and for the results of a rank that finds no room there, which it
copies to ordinary memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iris import platform
from iris.errors import IrisError
from iris.memory.outputs import Outputs
import torch

from .calls import Call, Calls
from .config import FusedConfig
from .operands import Operands

if TYPE_CHECKING:
    from iris.rank import Rank

_MOST_CALLS = 4096  # calls of which is known whether peers write their results


class NewOutputs(Outputs):
    """`ctx.ops.outputs`: the allocator of layers' results.

    `calls`: those of the same context, with the memory that they share.
    """

    def __init__(self, rank: Rank, calls: Calls) -> None:
        super().__init__(rank)
        self._calls = calls
        self._written: dict[tuple, bool] = {}  # whether peers write the result of such a call
        self._copied = 0  # bytes of the largest that a rank can copy, if it must

    def new(
        self, op: str, A: torch.Tensor, B: torch.Tensor, size: Sequence[int], config: FusedConfig | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return a new tensor of `size` for the result of `op` on A and B: on the heap if peers write it and there is
        room.

        Collective, like the call for which it is made.
        """
        key = op, A.shape, B.shape, A.dtype, B.dtype, config, scale is not None and scale.ndim
        written = self._written.get(key)
        if written is None:
            written = self._has_written(key, op, A, B, size, config, scale)
        out = self.empty(tuple(size), A.dtype) if written else None
        return A.new_empty(size) if out is None else out

    def _has_written(
        self, key: tuple, op: str, A: torch.Tensor, B: torch.Tensor, size: Sequence[int], config: FusedConfig | None,
        scale: torch.Tensor | None,
    ) -> bool:  # fmt: skip
        """Return whether peers write the result. If so, the heap has room for such outputs, and for a copy if they are
        full."""
        rank = self._rank
        rank.check()
        if platform.is_capturing(rank.device):
            return False  # no memory can be reserved now
        try:
            call = Call(op, Operands(A.new_empty(size), A, B, None, scale), config=config)
            prepared = self._calls.prepare(call)
        except (IrisError, AttributeError, RuntimeError, TypeError):  # wrong arguments: the call will say so
            return False
        problem = prepared.problem
        written = prepared.writes_to_peers and not problem.empty
        nbytes = problem.M * problem.N * problem.dtype.itemsize
        if written and nbytes > self._copied:
            rank.compare(op, **self._calls.facts(call, prepared))  # before memory differs, too
            self._copied = 1 << (nbytes - 1).bit_length()
            self._calls.own_workspace().results(self._copied)
            if nbytes > self.largest:
                self.reserve(nbytes)
        if len(self._written) >= _MOST_CALLS:
            self._written.clear()
        self._written[key] = written
        return written
