"""Allocate, export and map virtual memory of NVIDIA GPUs.

The calls go through NVIDIA's bindings (package cuda-bindings). Each return code is checked; an error names the call and
gives the driver's text. Only memory from these calls can be imported, such as torch's expandable segments.
"""

from __future__ import annotations

from collections.abc import Callable
import os
from typing import Any

import torch

from ..errors import NotSymmetricError, PlatformError
from .base import ALIGNMENT
from .pages import Extent

_REMEDY = (
    "Make it with ctx.empty(...), or allocate it in `with ctx.memory_pool():`, or let torch take its memory from "
    "expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts), or copy_ it"
)


class CudaPages:
    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PlatformError(
                f"allocator 'vmem' needs NVIDIA's Python bindings ({error}); pip install 'iris-tp[vmem]', or "
                f"'cuda-bindings' of the CUDA version of torch, {torch.version.cuda}"
            ) from None
        self._driver, self._device = driver, device
        torch.cuda.synchronize(device)  # makes the device's context current
        self._call(driver.cuInit, 0)
        attribute = driver.CUdevice_attribute
        self._require(attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        self._require(attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        self._fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.requestedHandleTypes = self._fd_type
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._call(driver.cuMemGetAllocationGranularity, self._kind, minimum))
        if ALIGNMENT % self.granule:
            raise PlatformError(f"the driver maps pages of {self.granule} bytes, which do not divide {ALIGNMENT}")
        self._stream = self._call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def _require(self, attribute: Any) -> None:
        if not self._call(self._driver.cuDeviceGetAttribute, attribute, self._device.index):
            raise PlatformError(f"{self._device} lacks {attribute.name}; use allocator_type='torch'")

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        error, *values = function(*args)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise PlatformError(f"{function.__name__} failed: {self._text(error)}")
        return values[0] if len(values) == 1 else tuple(values)

    def _text(self, error: Any) -> str:
        status, text = self._driver.cuGetErrorString(error)
        known = status == self._driver.CUresult.CUDA_SUCCESS and text
        return f"{getattr(error, 'name', error)} ({text.decode() if known else 'unknown error'})"

    def window(self, size: int) -> int:
        # physical memory comes in handles of up to 20 MiB, as much again is for gaps; these are addresses only
        total = torch.cuda.get_device_properties(self._device).total_memory
        return -(-2 * total // ALIGNMENT) * ALIGNMENT

    def reserve(self, size: int) -> int:
        base = int(self._call(self._driver.cuMemAddressReserve, size, ALIGNMENT, 0, 0))
        if base % ALIGNMENT:
            self.unreserve(base, size)
            raise PlatformError(f"cuMemAddressReserve gave {base:#x}, which is not aligned to {ALIGNMENT}")
        return base

    def unreserve(self, base: int, size: int) -> None:
        self._call(self._driver.cuMemAddressFree, base, size)

    def create(self, size: int) -> Any:
        return self._call(self._driver.cuMemCreate, size, self._kind, 0)

    def export(self, memory: Any) -> int:
        return int(self._call(self._driver.cuMemExportToShareableHandle, memory, self._fd_type, 0))

    def receive(self, fd: int) -> Any:
        return self._call(self._driver.cuMemImportFromShareableHandle, fd, self._fd_type)

    def release(self, memory: Any) -> None:
        self._call(self._driver.cuMemRelease, memory)

    def map(self, address: int, size: int, memory: Any, start: int = 0) -> None:
        self._call(self._driver.cuMemMap, address, size, start, memory, 0)
        try:
            self._call(self._driver.cuMemSetAccess, address, size, [self._access], 1)
        except PlatformError:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self._call(self._driver.cuMemUnmap, address, size)

    def clear(self, address: int, size: int) -> None:
        # on a separate stream: the current one may wait for a peer that waits for this rank's host
        self._call(self._driver.cuMemsetD8Async, address, 0, size, self._stream)
        self._call(self._driver.cuStreamSynchronize, self._stream)

    def idle(self) -> None:
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        return torch.as_tensor(_Span(address, nbytes, owner), device=self._device)

    def extents(self, begin: int, end: int) -> list[Extent]:
        extents: list[Extent] = []
        try:
            at = begin
            while at < end:
                extents.append(self._extent(at))
                at = extents[-1].address + extents[-1].size
        except BaseException:
            for extent in extents:
                os.close(extent.fd)
                self.release(extent.memory)
            raise
        return extents

    def _extent(self, at: int) -> Extent:
        """Return the whole handle mapped at `at`; the driver gives the range of one mapping, not of a reservation."""
        error, memory = self._driver.cuMemRetainAllocationHandle(at)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise NotSymmetricError(
                f"its memory was not allocated with the driver's virtual-memory calls "
                f"(cuMemRetainAllocationHandle: {self._text(error)}), so no peer can map it. {_REMEDY}"
            )
        try:
            address, size = (int(value) for value in self._call(self._driver.cuMemGetAddressRange, at))
            if not address <= at < address + size or address % self.granule or size % self.granule:
                raise NotSymmetricError(f"{at:#x} lies in a mapping [{address:#x}, +{size}), which cannot be shared")
            try:
                fd = self.export(memory)
            except PlatformError as failure:
                raise NotSymmetricError(
                    f"its memory cannot be passed on as a file descriptor ({failure}). {_REMEDY}"
                ) from None
        except BaseException:
            self.release(memory)
            raise
        return Extent(address, size, memory, fd)


class _Span:
    """Device memory in the form that torch imports; `owner` lives as long as the tensor."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
