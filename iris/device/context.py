"""`DeviceContext`: the RMA functions without the arguments that a kernel would repeat at every call.

The context tensor is int64, one a rank, built by `pack` on the host and read here: `[rank, world_size, status address,
record address, time-out in ticks, event buffer address, its capacity in events, address of the ranks' names or 0, bytes
of a heap, a mark (`bounds.py`), heap bases ..., process ids ..., where the library's results begin on the heap]`.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..triton_private import aggregate
from . import atomics, bounds, rma
from .function import device_function
from .tracing import DeviceTracing, device_tracing

HEADER = bounds.HEADER
TRACING_WORDS = slice(5, 7)
# Past the end of every heap: the library has handed out no memory for results yet.
_NOWHERE = 1 << 62


def pack(
    rank: int, bases: list[int], span: int, pids: list[int], status: int, record: int, timeout_ticks: int
) -> list[int]:
    """Return the entries of the context tensor, of heaps of `span` bytes each."""
    header = [rank, len(bases), status, record, timeout_ticks, 0, 0, 0, span, bounds.MARK.value]
    return [*header, *bases, *pids, _NOWHERE]


class RemoteAccess:
    """Access the heaps of all ranks inside a kernel. The caller is the context's rank.

    Parameters that a method does not explain have the meaning of the function of the same name, such as `iris.load`.
    """

    if TYPE_CHECKING:  # fields of the aggregate that inherits from it
        rank: tl.tensor
        world_size: tl.constexpr
        ctx_ptr: tl.tensor

    @device_function
    def heap_bases(self):
        """Return the pointer to the heap base of every rank, int64."""
        return self.ctx_ptr + HEADER

    @device_function
    def pid(self, rank):
        """Return the process id of a rank, int64.

        Args:
            rank: the rank.
        """
        return tl.load(self.ctx_ptr + HEADER + self.world_size + rank)

    @device_function
    def pids(self, ranks, mask):
        """Return the process ids of a block of ranks, int64, 0 where masked out.

        Args:
            ranks: a block of ranks.
            mask: which elements of the block are ranks.
        """
        return tl.load(self.ctx_ptr + HEADER + self.world_size + ranks, mask=mask, other=0)

    @device_function
    def results_begin(self):
        """Return the offset on the heap, in bytes, int64, at which the library's memory for results begins."""
        return tl.load(self.ctx_ptr + HEADER + 2 * self.world_size)

    @device_function
    def remote(self, pointer, to_rank):
        """Return the address at `to_rank` of this rank's `pointer`.

        Args:
            pointer: an address in this rank's heap, scalar or block.
            to_rank: the rank of the result.
        """
        return rma.translate(pointer, self.rank, to_rank, self.heap_bases())

    @device_function
    def as_remote(self, ptr, rank):
        """Return the address at `rank` of this rank's `ptr`: `remote` by its name in ROCm/iris.

        Args:
            ptr: an address in this rank's heap, scalar or block.
            rank: the rank of the result.
        """
        return rma.translate(ptr, self.rank, rank, self.heap_bases())

    @device_function
    def load(
        self,
        pointer,
        from_rank,
        mask=None,
        other=None,
        cache_modifier: tl.constexpr = None,
        volatile: tl.constexpr = False,
        hint: tl.constexpr = None,
    ):
        """Return the value at `pointer` on `from_rank`.

        Args:
            pointer: an address in this rank's heap, scalar or block.
            from_rank: the rank whose memory is read.
            mask, other, cache_modifier, volatile, hint: as in `iris.load`.
        """
        return rma.load(pointer, self.rank, from_rank, self.heap_bases(), mask, other, cache_modifier, volatile, hint)

    @device_function
    def store(self, pointer, value, to_rank, mask=None, cache_modifier: tl.constexpr = None, hint: tl.constexpr = None):
        """Store `value` at `pointer` on `to_rank`.

        Args:
            pointer: an address in this rank's heap, scalar or block.
            value: the value, scalar or block.
            to_rank: the rank whose memory is written.
            mask, cache_modifier, hint: as in `iris.store`.
        """
        rma.store(pointer, value, self.rank, to_rank, self.heap_bases(), mask, cache_modifier, hint)

    @device_function
    def get(
        self,
        from_ptr,
        to_ptr,
        from_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from `from_ptr` on `from_rank` to this rank's `to_ptr`.

        Args:
            from_ptr: an address in this rank's heap.
            to_ptr: any memory of this rank.
            from_rank: the rank whose memory is read.
            mask, other, load_cache_modifier, store_cache_modifier, hint: as in `iris.get`.
        """
        data = self.load(from_ptr, from_rank, mask, other, load_cache_modifier, hint=hint)
        tl.store(to_ptr, data, mask=mask, cache_modifier=store_cache_modifier)

    @device_function
    def put(
        self,
        from_ptr,
        to_ptr,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
        copy_engine_ctx=None,
        use_copy_engine: tl.constexpr = False,
    ):
        """Copy from this rank's `from_ptr` to `to_ptr` on `to_rank`.

        Args:
            from_ptr: any memory of this rank.
            to_ptr: an address in this rank's heap.
            to_rank: the rank whose memory is written.
            mask, other, load_cache_modifier, store_cache_modifier, hint: as in `iris.put`.
            copy_engine_ctx, use_copy_engine: None and False: kernels cannot drive a copy engine.
        """
        rma.put(
            from_ptr,
            to_ptr,
            self.rank,
            to_rank,
            self.heap_bases(),
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
            copy_engine_ctx,
            use_copy_engine,
        )

    @device_function
    def copy(
        self,
        src_ptr,
        dst_ptr,
        from_rank,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from `src_ptr` on `from_rank` to `dst_ptr` on `to_rank`.

        Args:
            src_ptr: an address in this rank's heap.
            dst_ptr: an address in this rank's heap.
            from_rank: the rank whose memory is read.
            to_rank: the rank whose memory is written.
            mask, other, load_cache_modifier, store_cache_modifier, hint: as in `iris.copy`.
        """
        rma.copy(
            src_ptr,
            dst_ptr,
            from_rank,
            to_rank,
            self.rank,
            self.heap_bases(),
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @device_function
    def atomic_cas(
        self,
        pointer,
        cmp,
        val,
        to_rank,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Store `val` at `pointer` on `to_rank` if its value is `cmp`; return the old value.

        Args:
            pointer, cmp, val, to_rank, sem, scope, hint: as in `iris.atomic_cas`.
        """
        return atomics.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases(), sem, scope, hint)

    @device_function
    def atomic_add(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Add `val` at `pointer` on `to_rank`; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_add`.
        """
        return atomics.atomic_add(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_xchg(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Store `val` at `pointer` on `to_rank`; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_xchg`.
        """
        return atomics.atomic_xchg(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_xor(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Apply exclusive-or with `val` to `pointer` on `to_rank`; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_xor`.
        """
        return atomics.atomic_xor(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_and(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Apply and with `val` to `pointer` on `to_rank`; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_and`.
        """
        return atomics.atomic_and(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_or(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Apply or with `val` to `pointer` on `to_rank`; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_or`.
        """
        return atomics.atomic_or(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_min(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Store the minimum of `val` and the value at `pointer` on `to_rank` there; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_min`.
        """
        return atomics.atomic_min(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)

    @device_function
    def atomic_max(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Store the maximum of `val` and the value at `pointer` on `to_rank` there; return the old value.

        Args:
            pointer, val, to_rank, mask, sem, scope, hint: as in `iris.atomic_max`.
        """
        return atomics.atomic_max(pointer, val, self.rank, to_rank, self.heap_bases(), mask, sem, scope, hint)


@aggregate
class DeviceContext(RemoteAccess):
    """Represent this rank's view of the heap inside a kernel. Make it with `DeviceContext.initialize`."""

    rank: tl.tensor
    world_size: tl.constexpr
    ctx_ptr: tl.tensor
    tracing: DeviceTracing

    @triton.constexpr_function
    def __init__(self, rank, world_size, ctx_ptr, tracing):
        self.rank = rank
        self.world_size = tl.constexpr(getattr(world_size, "value", world_size))
        self.ctx_ptr = ctx_ptr
        self.tracing = tracing

    @staticmethod
    @device_function
    def initialize(context_tensor, rank, world_size: tl.constexpr, tracing: tl.constexpr = False):
        """Return the device context of the caller.

        Args:
            context_tensor: `Iris.get_device_context()`.
            rank: the caller's rank, `cur_rank`.
            world_size: the number of ranks, `num_ranks`.
            tracing: whether `tracing.record_event_start` and `_end` record; if not, they leave no instruction.
        """
        return DeviceContext(
            tl.cast(rank, tl.int32), world_size, context_tensor, device_tracing(context_tensor, tracing)
        )


@device_function
def own_context(ctx_ptr, world_size: tl.constexpr, tracing: tl.constexpr = False):
    """Return the device context with the rank read from the context tensor, so all ranks share one compiled kernel."""
    return DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr).to(tl.int32), world_size, tracing)
