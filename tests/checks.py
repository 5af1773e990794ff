"""What a test asks of an output: error bounds from a float64 reference, poisoned memory, guard bands around it."""

from __future__ import annotations

from collections.abc import Callable
import math

import iris
import torch


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with what no result has, NaN or the smallest integer, and return it."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def assert_close_to_reference(
    out: torch.Tensor, ref64: torch.Tensor, torch_out: torch.Tensor, magnitude: float | None = None
) -> None:
    """Check that `out` is at most twice as far from the float64 reference as torch's own op in that dtype, or rounding.

    Measured as the largest error and as the norm of the error. Where torch happens to be exact, one fp32 rounding of
    the largest sum of absolute values that an element was summed from, `magnitude`, is allowed beside it; without it,
    of the largest element. Non-finite values pass only where torch has the same.
    """
    assert out.shape == ref64.shape == torch_out.shape, (out.shape, ref64.shape, torch_out.shape)
    assert out.dtype == torch_out.dtype, (out.dtype, torch_out.dtype)
    dtype = out.dtype
    ref64, out, torch_out = (t.detach().double().cpu().reshape(-1) for t in (ref64, out, torch_out))
    finite = out.isfinite()
    wrong = ~finite & ((out != torch_out) | ~ref64.to(dtype).isinf())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {out.numel()} elements are NaN or infinite, first at {_first(wrong)}"
    )
    out, ref64, torch_out = out[finite], ref64[finite], torch_out[finite]
    if not out.numel():
        return
    slack = torch.finfo(torch.float32).eps * (float(ref64.abs().max()) if magnitude is None else magnitude)
    error, theirs, rounding = ((t - ref64).nan_to_num(0.0).abs() for t in (out, torch_out, ref64.to(dtype).double()))
    largest = 2 * max(float(theirs.max()), float(rounding.max())) + slack
    assert float(error.max()) <= largest, (
        f"largest error {float(error.max()):.3e}, allowed {largest:.3e}, at flat index {int(error.argmax())} of "
        f"{out.numel()}; torch's own {float(theirs.max()):.3e}"
    )
    norm = 2 * max(float(theirs.norm()), float(rounding.norm())) + slack * math.sqrt(out.numel())
    assert float(error.norm()) <= norm, (
        f"norm of the error {float(error.norm()):.3e}, allowed {norm:.3e}; torch's own {float(theirs.norm()):.3e}, "
        f"norm of the reference {float(ref64.norm()):.3e}"
    )


def _first(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])


_GUARD_BYTE = 0xA5


class Guarded:
    """A tensor on the heap inside a larger buffer, whose bytes around it must stay as they are."""

    def __init__(self, ctx: iris.Iris, sizes: tuple[int, ...], dtype: torch.dtype, row_pad: int = 0) -> None:
        """Guard `row_pad` elements, too, between the end of a row and the next one's beginning."""
        around = 1024 // dtype.itemsize
        *outer, last = sizes
        pitch = last + row_pad
        numel = math.prod(outer) * pitch
        strides = [math.prod([*outer[i + 1 :], pitch]) for i in range(len(outer))] + [1]
        self.buffer = ctx.empty(numel + 2 * around, dtype=dtype)
        self._bytes = self.buffer.view(torch.uint8)
        self._bytes.fill_(_GUARD_BYTE)
        self.tensor = poison(self.buffer[around:].as_strided(sizes, strides))
        inside = torch.zeros(self.buffer.shape, dtype=torch.bool, device=ctx.device)
        inside[around:].as_strided(sizes, strides).fill_(True)
        self._outside = ~inside.repeat_interleave(dtype.itemsize)

    def check(self) -> None:
        """Raise AssertionError when a byte outside `tensor` was written."""
        touched = self._outside & (self._bytes != _GUARD_BYTE)
        assert not touched.any(), (
            f"{int(touched.sum())} guard bytes around a tensor {tuple(self.tensor.shape)} were overwritten, the first "
            f"{_first(touched) - 1024} bytes from its beginning"
        )


def guarded(ctx: iris.Iris, sizes: tuple[int, ...], dtype: torch.dtype, row_pad: int = 0) -> Guarded:
    """Return a poisoned tensor on the heap, `.tensor`, with guard bands that `.check()` looks at."""
    return Guarded(ctx, tuple(sizes), dtype, row_pad)


def assert_only_launches(ctx: iris.Iris, call: Callable[[], object]) -> None:
    """Check on a busy GPU that three calls neither wait for it nor allocate."""
    used, allocated = ctx.heap.used, torch.cuda.memory_stats()["allocation.all.allocated"]
    busy = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the calls waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, "the calls allocated device memory"
    assert ctx.heap.used == used, "the calls allocated heap memory"


def scales_rows(device: str = "cpu") -> bool:
    """Return whether torch's fp8 product takes a scale for each row there: on some CPUs torch 2.11's does not."""
    rows, scale = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn), torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(rows, rows.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
