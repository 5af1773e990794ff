"""Memory and kernels for the layers of an engine, before vLLM measures memory and captures graphs.

A row-parallel layer's calls are made once while its model is built: they reserve their memory, but launch nothing.
Their kernels compile in other processes, while vLLM loads weights and compiles its own graphs. The first call of an
operator waits for what is left. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import Logger
import os
from typing import TYPE_CHECKING

from iris.errors import IrisError
from iris.launch import ahead
from iris_ops.local.norm import add_rms_norm
from iris_ops.local.skinny_matmul import skinny_matmul
from iris_ops.planning.epilogues import GATE
import torch
import torch.distributed as dist

from . import experts, ops

if TYPE_CHECKING:
    from iris.context import Iris

_PROCESSES = 4  # that compile for a rank: each takes some seconds and 300 MB to start
_EPS = 1e-6


class Preparation:
    """The kernels of one context, of which `finish` waits for those that compile.

    Args:
        name, group: vLLM's name of the tensor-parallel group, and its process group on CPUs.
        few, many: the rows of captured graphs, up to `few_rows` and above.
        widths: outputs of the products that follow a norm, but for gated ones, on this rank.
    """

    def __init__(
        self, ctx: Iris, name: str, group: dist.ProcessGroup, few: Sequence[int], many: Sequence[int],
        widths: Sequence[int], log: Logger,
    ) -> None:  # fmt: skip
        self._ctx, self._name, self._group, self._widths, self._log = ctx, name, group, widths, log
        self._few, self._many = sorted(few, reverse=True), sorted(many, reverse=True)
        self._shapes: set[torch.Size] = set()
        self._mixtures: dict[tuple, bool] = {}  # by their shapes, whether the kernels run them
        self._known: set[str] = set()  # names of forms
        self._unloaded: list[ahead.Form] = []
        self._compilers: ahead.Compilers | None = None

    def add(self, weight: torch.Tensor) -> None:
        """Make room for the calls of a row-parallel layer's `weight` [N, K], and compile their kernels. Collective."""
        if weight.shape in self._shapes:
            return
        self._shapes.add(weight.shape)
        self._prepare(lambda few, many: self._calls(weight, few, many))

    def add_experts(self, gate_up: torch.Tensor, down: torch.Tensor, top_k: int) -> bool:
        """Do the same for a mixture's weights [E, 2I, H] and [E, H, I]. Returns whether the kernels run it."""
        shapes = gate_up.shape, down.shape, top_k
        if shapes not in self._mixtures:
            try:
                self._prepare(lambda few, many: self._calls_of_experts(gate_up, down, top_k, [*many, *few]))
            except IrisError as error:
                self._log.info("iris-tp: mixtures of %d experts stay vLLM's (%s)", gate_up.shape[0], error)
                self._mixtures[shapes] = False
            else:
                self._mixtures[shapes] = True
        return self._mixtures[shapes]

    def _prepare(self, calls: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        with torch.device("cpu"):  # vLLM builds a model with its GPU as the default device
            if self._ctx.device.type == "cuda":
                self._compile(ahead.recorded([self._ctx], lambda: calls(self._few, self._many)))
            else:  # nothing to compile
                calls(self._few[:1], self._many[:1])
            self._ctx.barrier()

    def finish(self) -> None:
        """Wait for all kernels and load them. Collective."""
        compilers, self._compilers = self._compilers, None
        if compilers is None:
            return
        compilers.wait()
        for error in compilers.errors:
            self._log.warning("iris-tp: a kernel was not compiled ahead: %s", error)
        dist.barrier(self._group)  # the other ranks have compiled their share
        ahead.load(self._unloaded, compilers.folder)
        self._unloaded.clear()

    def _calls(self, weight: torch.Tensor, few: Sequence[int], many: Sequence[int]) -> None:
        """Call every operator on each number of rows, on zeros.

        The most rows first: memory that grows leaves its first piece to graphs.
        """
        ctx = self._ctx
        for rows in many:
            A, residual = self._inputs(rows, weight)
            ops.matmul_all_reduce_rms_norm(ctx, A, weight, residual, residual[0], _EPS)
        for rows in few:
            A, residual = self._inputs(rows, weight)
            norm = residual[0], _EPS
            ops.all_reduce(ctx, residual)
            ops.all_reduce_norm(ctx, residual, residual, *norm)
            ops.matmul_all_reduce_rms_norm(ctx, A, weight, residual, *norm)
            _, scaled, squares = ops.matmul_all_reduce_norm(ctx, A, weight, residual, residual[0])
            if weight.device.type == "cuda":
                for width in self._widths:
                    skinny_matmul(scaled, _without_memory(weight, (width, weight.shape[0])), squares=squares, eps=_EPS)
                gates = _without_memory(weight, (2 * weight.shape[1], weight.shape[0]))  # if this is a gated MLP's
                skinny_matmul(scaled, gates, epilogue=GATE.name, squares=squares, eps=_EPS)

    def _calls_of_experts(self, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, all_rows: Sequence[int]) -> None:
        for rows in all_rows:
            x = torch.zeros(rows, gate_up.shape[2], dtype=gate_up.dtype, device=gate_up.device)
            chosen = torch.zeros(rows, top_k, dtype=torch.int32, device=x.device)
            total = experts.experts(self._ctx, x, gate_up, down, chosen, chosen.float())
            add_rms_norm(total, x, x[0], _EPS)

    def _inputs(self, rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        A, residual = (torch.zeros(rows, n, dtype=weight.dtype, device=weight.device) for n in weight.shape[::-1])
        return A, residual

    def _compile(self, forms: dict[str, ahead.Form]) -> None:
        """Compile the new ones of `forms`, each on one rank."""
        new = {name: form for name, form in forms.items() if name not in self._known}
        self._known |= set(new)
        self._unloaded += new.values()
        names: list[list[str]] = [[]] * self._ctx.num_ranks
        dist.all_gather_object(names, list(new), group=self._group)
        if self._compilers is None:
            cores = len(os.sched_getaffinity(0)) // self._ctx.num_ranks
            self._compilers = ahead.Compilers(min(_PROCESSES, cores - 1))
        self._compilers.add(new[name] for name in ahead.share_of(self._ctx.cur_rank, names))
        ops.before_first_call(self._name, self.finish)


def _without_memory(like: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a tensor of `shape` at the address of `like`, which may be smaller: for calls that launch nothing."""
    nbytes = shape[0] * shape[1] * like.dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(like.data_ptr(), like.device, nbytes)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, shape, (shape[1], 1))
