"""Access the peers' heaps from the host: view them, copy into them, signal them.

A copy from host to host needs no kernel: a peer's tensor is an address of this process, so the GPU's copy engines move
it in the order of the current stream. Kernels of one program wait for a flag before the copy and signal one after it.
"""

from __future__ import annotations

from typing import Any
import weakref

import torch

from . import aliases, platform, transforms
from .device.context import HEADER
from .device.copies import signal_kernel, wait_kernel
from .errors import ArgumentError, DtypeError, NotSymmetricError, ShapeError
from .heap import check_memory, check_tensor
from .launch import relaunch
from .tensors import TensorMethods, described


class PeerMethods(TensorMethods):
    """Reach the heaps of other ranks from the host. `Iris` inherits these methods."""

    def peer_view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of `rank`'s counterpart of `tensor`: the memory at the same offset of that rank's heap.

        Copy from it or into it; the caller orders these copies with that rank's work (`device_barrier`). Do not use it
        after the context is closed.

        Args:
            tensor: a tensor on this rank's heap.
            rank: the rank whose memory the view shows.

        Raises:
            NotSymmetricError: for a tensor that is not on the heap.
            ArgumentError: for a number that is no rank.
        """
        self.check()
        self._check_symmetric("tensor", tensor)
        self._check_rank("rank", rank)
        view = self.view_at(tensor, rank)
        # keeps `tensor` alive while a view of the peer's is in use
        finalizer = weakref.finalize(view.untyped_storage(), _let_go, tensor.untyped_storage())
        finalizer.atexit = False
        return view

    def as_remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return `peer_view(tensor, rank)`; the name that ROCm/iris has.

        Args:
            tensor: as in `peer_view`.
            rank: as in `peer_view`.
        """
        return self.peer_view(tensor, rank)

    def translate(self, ptr: int, from_rank: int, to_rank: int) -> int:
        """Return this process's address of the memory at `to_rank` that corresponds to `ptr` at `from_rank`.

        Args:
            ptr: an address in the heap of `from_rank`, as this process sees it.
            from_rank: the rank of `ptr`.
            to_rank: the rank of the result.

        Raises:
            ArgumentError: for a rank that does not exist, or an address outside the heap of `from_rank`.
        """
        self.check()
        self._check_rank("from_rank", from_rank)
        self._check_rank("to_rank", to_rank)
        if isinstance(ptr, bool) or not isinstance(ptr, int):
            raise ArgumentError(f"ptr is {described(ptr)}; expected an address, as tensor.data_ptr() returns")
        bases = self._segment.bases
        here = ptr - bases[from_rank] + bases[self.cur_rank]
        if not self.heap.holds(here, here):
            raise ArgumentError(f"ptr is {ptr:#x}; expected an address in the heap of rank {from_rank}, from_rank")
        return ptr - bases[from_rank] + bases[to_rank]

    def allocate_symmetric(self, *size: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `empty(*size, dtype=dtype)`, and its address at every rank, uint64 [w], on the device.

        Functions of kernels also accept these addresses as `heap_bases`, because they have the same differences.

        Args:
            dtype: as in `empty`.
            *size: the shape.
        """
        tensor = self.empty(*size, dtype=dtype)
        addresses = self.heap_bases.new_zeros(HEADER.value + self.num_ranks, dtype=torch.int64)[HEADER.value :]
        torch.add(self.heap_bases.view(torch.int64), self.heap.offset(tensor), out=addresses)
        return tensor, addresses.view(torch.uint64)

    @aliases.keywords(to_rank="dst_rank")
    def put(
        self, src_tensor: torch.Tensor, dst_rank: int, dst_tensor: torch.Tensor | None = None,
        wait_flag: torch.Tensor | None = None, wait_value: int = 1, signal_flag: torch.Tensor | None = None,
        signal_value: int = 1, async_op: bool = False, channel: int = 0, use_copy_engine: bool = False,
    ) -> None:  # fmt: skip
        """Copy `src_tensor` into `dst_tensor` of rank `dst_rank`, in the order of the current stream.

        Args:
            src_tensor: a tensor on this rank's device.
            dst_rank: the rank that receives.
            dst_tensor: this rank's tensor on the heap whose counterpart at `dst_rank` is written. It has as many
                elements and the same dtype. Default: `src_tensor`.
            wait_flag: int32 of this rank on the heap. The copy waits until it has reached `wait_value`; `dst_rank` adds
                to it.
            wait_value: an integer of 32 bits.
            signal_flag: int32 on the heap to which `signal_value` is added at `dst_rank` after the copy.
            signal_value: an integer of 32 bits.
            async_op: the host does not wait; `quiet` does.
            channel: no effect, nor has `use_copy_engine`; for code written for ROCm/iris.
            use_copy_engine: no effect; for code written for ROCm/iris.

        Raises:
            ArgumentError, ShapeError, DtypeError, NotSymmetricError: for bad arguments.
            PeerLostError: in a later call, if the flag does not reach the value in time.
        """
        self.check()
        target = src_tensor if dst_tensor is None else dst_tensor
        self._check_rank("dst_rank", dst_rank)
        check_tensor("put", "src_tensor", src_tensor, self.device)
        transforms.check_plain("put", "src_tensor", src_tensor)
        check_memory("put", ("src_tensor",), (src_tensor.data_ptr(),), (src_tensor.nbytes,))
        self._check_symmetric("src_tensor" if dst_tensor is None else "dst_tensor", target)
        if target.dtype != src_tensor.dtype:
            raise DtypeError(f"put: dst_tensor is {target.dtype}; expected {src_tensor.dtype} as src_tensor")
        if target.numel() != src_tensor.numel():
            raise ShapeError(
                f"put: dst_tensor has sizes {tuple(target.shape)}; expected as many elements as src_tensor, "
                f"{tuple(src_tensor.shape)}"
            )
        for name, flag in (("wait_flag", wait_flag), ("signal_flag", signal_flag)):
            self._check_flag(name, flag)
        for name, value in (("wait_value", wait_value), ("signal_value", signal_value)):
            if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
                raise ArgumentError(f"put: {name} is {value!r}; expected an integer of 32 bits")
        view = self.peer_view(target, dst_rank)
        if view.shape != src_tensor.shape:
            if not view.is_contiguous():
                raise ShapeError(
                    f"put: dst_tensor has sizes {tuple(target.shape)} and strides {target.stride()}; expected the "
                    f"sizes of src_tensor, {tuple(src_tensor.shape)}, or a contiguous tensor"
                )
            view = view.view(src_tensor.shape)
        if wait_flag is not None:
            args = dict(flag=wait_flag, value=wait_value, peer=dst_rank)
            self._launch_around_copy(wait_kernel, args)
        view.copy_(src_tensor, non_blocking=True)
        if signal_flag is not None:
            args = dict(flag=signal_flag, value=signal_value, to_rank=dst_rank)
            self._launch_around_copy(signal_kernel, args)
        if not async_op:
            self.quiet()

    def quiet(self, dst_rank: int | None = None, channel: int = 0) -> None:
        """Wait until all copies of `put` with `async_op` have arrived, at every rank.

        Args:
            dst_rank: no effect.
            channel: no effect.

        Raises:
            PeerLostError: if a rank was lost.
        """
        self.check()
        if dst_rank is not None:
            self._check_rank("dst_rank", dst_rank)
        platform.synchronize(self.device)
        self.check()

    def get_copy_engine_ctx(self) -> None:
        """Return None, as ROCm/iris does if its kernels cannot use a copy engine."""

    def _launch_around_copy(self, kernel: Any, args: dict[str, Any]) -> None:
        args = dict(ctx_ptr=self._context_tensor, **args, WORLD_SIZE=self.num_ranks)
        relaunch.launch({}, self.device, kernel, (1, 1, 1), args, num_warps=1)

    def _check_rank(self, name: str, rank: object) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise ArgumentError(f"{name} is {rank!r}, out of range; expected a rank from 0 to {self.num_ranks - 1}")

    def _check_symmetric(self, name: str, tensor: Any) -> None:
        if not self.is_symmetric(tensor):
            raise NotSymmetricError(
                f"{name}, a tensor {described(tensor)}, lies outside the symmetric heap; make it with ctx.empty(...)"
            )

    def _check_flag(self, name: str, flag: Any) -> None:
        if flag is None:
            return
        if not isinstance(flag, torch.Tensor) or flag.dtype != torch.int32 or flag.numel() != 1:
            raise ArgumentError(f"put: {name} is {described(flag)}; expected one int32 on the heap")
        self._check_symmetric(name, flag)


def _let_go(kept: object) -> None:
    """Do nothing: a finalizer of this holds `kept` until it is called."""
