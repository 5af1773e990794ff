"""Rivals from Kraken (https://github.com/meta-pytorch/kraken), Triton kernels on torch's symmetric memory.

Measured where `import kraken` works:

    pip install --no-deps git+https://github.com/meta-pytorch/kraken    # it also needs cuda-bindings

    Kraken                 gemm_one_shot_all_reduce_fused, all_gather_matmul
    Kraken fused           gemm_reduce_scatter: one kernel
    Kraken copy engines    gemm_reduce_scatter_ce_persistent
    cuBLAS + Kraken ...    torch.matmul, then its one_shot_all_reduce or two_shot_all_reduce

Each is called with its own defaults. A row of sizes for which a kernel is not built stays blank. None of them uses
multicast.
"""

from collections.abc import Callable
import functools
import importlib
import math
import sys

from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals.contender import RIVAL, Contender
from benchmarks.rivals.of_torch import SharedBuffer

# The two kernels with this note pass False for `hasPreviousMemAccess` at the barrier after their stores.
_UNORDERED = "the barrier between its stores and the peers' loads does not order them: a right result is not promised"
_BLOCK = 64  # of the kernels that have a program a tile
_GATHERED_BLOCK = 128


def contenders(team: Team, rows: list[Row], dtype: torch.dtype) -> list[Contender]:
    try:
        kraken = importlib.import_module("kraken")
    except ImportError as error:
        team.say(f"without Kraken: {error}")
        return []
    pads = _enlarge_signal_pads(rows, team.world)
    shared = SharedBuffer(team, rows, dtype)

    def all_reduced(row: Row, world: int, dtype: torch.dtype) -> bool:
        return _signals(row, world) <= pads

    def scattered(row: Row, world: int, dtype: torch.dtype) -> bool:
        aligned = row.form == "rows" and row.M % (world * _BLOCK) == 0
        return aligned and _signals(row, world) <= pads

    def fused(inputs: Inputs) -> Call:
        return lambda i: kraken.fused.gemm_one_shot_all_reduce_fused(inputs.A[i], inputs.B[i])

    def gather(inputs: Inputs) -> Call:
        A = [_symmetric(part) for part in inputs.A]
        return _forgetting("all_gather_matmul", lambda i: kraken.fused.all_gather_matmul(A[i], inputs.B[i])[1])

    def fused_scatter(inputs: Inputs) -> Call:
        return lambda i: kraken.fused.gemm_reduce_scatter(inputs.A[i], inputs.B[i])

    def engines(inputs: Inputs) -> Call:
        # The group: its default is resolved in one of its two functions only.
        scatter = kraken.fused.gemm_reduce_scatter_ce_persistent
        call = functools.partial(scatter, group=dist.group.WORLD)
        return _forgetting("gemm_reduce_scatter_ce_persistent", lambda i: call(inputs.A[i], inputs.B[i]))

    def reduced_by(collective: str, symmetric: bool) -> Callable[[Inputs], Call]:
        def prepare(inputs: Inputs) -> Call:
            op = getattr(kraken.comm, collective)
            partial = shared.partial(*inputs.out_shape) if symmetric else inputs.new(*inputs.out_shape)

            def call(i: int) -> torch.Tensor:
                torch.matmul(inputs.A[i], inputs.B[i], out=partial)
                return op(partial)

            return call

        return prepare

    one_shot, two_shot = reduced_by("one_shot_all_reduce", True), reduced_by("two_shot_all_reduce", False)
    return [
        Contender("Kraken", RIVAL, {"ar": fused}, all_reduced, note=_UNORDERED),
        Contender("Kraken", RIVAL, {"ag": gather}, _gathered),
        Contender("Kraken fused", RIVAL, {"rs": fused_scatter}, scattered, note=_UNORDERED),
        Contender("Kraken copy engines", RIVAL, {"rs": engines}, _even_bf16),
        Contender("cuBLAS + Kraken one-shot", RIVAL, {"ar": one_shot}, _eights),
        Contender("cuBLAS + Kraken two-shot", RIVAL, {"ar": two_shot}, _eights),
    ]


def _gathered(row: Row, world: int, dtype: torch.dtype) -> bool:
    """Return whether ranks have whole blocks of rows, and whole groups of four blocks if there are four."""
    rows = row.M // world
    group = 4 if row.M >= world * _GATHERED_BLOCK * 4 else 1
    return _even_bf16(row, world, dtype) and rows > 0 and rows % (_GATHERED_BLOCK * group) == 0


def _even_bf16(row: Row, world: int, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and row.form == "rows" and row.even(world)


def _eights(row: Row, world: int, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and row.M * row.N % 8 == 0


def _signals(row: Row, world: int) -> int:
    """Return bytes of signals: each program, one a tile, has one for every rank, and nobody checks that they fit."""
    return math.ceil(row.M / _BLOCK) * math.ceil(row.N / _BLOCK) * world * 4


def _enlarge_signal_pads(rows: list[Row], world: int) -> int:
    """Enlarge the signal pads for `rows` where torch can, which it cannot once one exists; return their bytes."""
    import torch.distributed._symmetric_memory as symm_mem

    if not hasattr(symm_mem, "set_signal_pad_size"):
        return 2048
    needed = max([_signals(row, world) for row in rows if row.op in ("ar", "rs")], default=0)
    size = max(symm_mem.get_signal_pad_size(), 1 << max(0, needed - 1).bit_length())
    symm_mem.set_signal_pad_size(size)
    return size


def _forgetting(module: str, call: Call) -> Call:
    """Return `call` without the descriptors, and with them results, that the module keeps for ever: some GB a batch."""
    cache = sys.modules[f"kraken.fused.{module}"]._tma_desc_cache

    def forgetting(i: int) -> torch.Tensor:
        out = call(i)
        cache.clear()
        return out

    return forgetting


def _symmetric(part: torch.Tensor) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symm_mem

    copy = symm_mem.empty(part.shape, dtype=part.dtype, device=part.device)
    symm_mem.rendezvous(copy, dist.group.WORLD.group_name)
    return copy.copy_(part)
