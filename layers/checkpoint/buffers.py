"""Copy bytes between files and tensors through two host buffers, a few rows at a time.

The buffers have 32 MiB (or one row, if that is more) and are pinned where the tensors are on a GPU: while one is filled
from the file, the other is copied to the device. pread reads only the requested bytes and maps nothing, so they do not
stay in the process's memory. Every byte is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os

import torch

_BUFFER = 32 << 20


class Staging:
    """Copy between files and tensors on `device`; `bytes_read` and `bytes_written` count the bytes."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.bytes_read = self.bytes_written = 0
        self._on_gpu = self.device.type == "cuda"
        self._buffers: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []  # the last copy out of each buffer
        self._turn = 0

    def read(self, file: int, start: int, stride: int, local: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill row i of `local` from byte `start + i * stride` of `file`, where its elements lie as `dtype`."""
        for rows, offset, staged, memory in self._pieces(start, stride, local, dtype):
            for at, piece in _runs(memory, rows.shape[0], offset, stride):
                self.bytes_read += _all(os.preadv, file, piece, at)
            # a copy that also converts would go through pageable memory: so move first
            rows.copy_(staged.to(self.device, non_blocking=True) if rows.dtype != dtype else staged, non_blocking=True)
            if self._on_gpu:
                self._sent[self._turn].record()

    def write(self, file: int, start: int, stride: int, local: torch.Tensor, dtype: torch.dtype) -> None:
        """Write row i of `local`, as `dtype`, to byte `start + i * stride` of `file`."""
        for rows, offset, staged, memory in self._pieces(start, stride, local, dtype):
            staged.copy_(rows)
            for at, piece in _runs(memory, rows.shape[0], offset, stride):
                self.bytes_written += _all(os.pwritev, file, piece, at)

    def _pieces(
        self, start: int, stride: int, local: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, int, torch.Tensor, memoryview]]:
        """Yield rows of `local` that fit a buffer, the byte they start at in the file, and a buffer of their shape."""
        local = local.unsqueeze(0) if local.dim() == 0 else local
        row = local[:1].numel() * dtype.itemsize
        step = max(1, _BUFFER // max(row, 1))
        for first in range(0, local.shape[0] if row else 0, step):
            rows = local[first : first + step]
            buffer = self._free(min(step, local.shape[0]) * row)[: rows.shape[0] * row]
            yield rows, start + first * stride, buffer.view(dtype).view(rows.shape), buffer.numpy().data

    def _free(self, size: int) -> torch.Tensor:
        """Return the next buffer, of at least `size` bytes, once its last copy to the device has ended."""
        self._turn = (self._turn + 1) % 2
        while len(self._buffers) < 2:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
            self._sent += [torch.cuda.Event()] if self._on_gpu else []
        if self._on_gpu:
            self._sent[self._turn].synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu)
        return self._buffers[self._turn]


def _runs(memory: memoryview, rows: int, offset: int, stride: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of `memory` that are contiguous in the file, and where they start there."""
    row = len(memory) // rows
    if row == stride:
        yield offset, memory
        return
    for i in range(rows):
        yield offset + i * stride, memory[i * row : (i + 1) * row]


def _all(transfer: Callable[[int, list[memoryview], int], int], file: int, memory: memoryview, offset: int) -> int:
    """Repeat `transfer` until all of `memory` is moved, for the system may move less at a time; return its length."""
    done = 0
    while done < len(memory):
        moved = transfer(file, [memory[done:]], offset + done)
        if moved <= 0:
            raise OSError(f"a file ends at byte {offset + done}: expected {len(memory) - done} bytes more")
        done += moved
    return done
