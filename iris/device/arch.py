"""Hide the few differences between architectures: a clock, fences, and what Triton's interpreter lacks.

Every function here is a no-op, or plain Triton, wherever the architecture already guarantees what it names.
"""

import math
import os
import select
import time
from typing import Any

import triton
import triton.language as tl

from .. import platform
from ..triton_private import program_threads
from .function import device_function

INTERPRET = tl.constexpr(platform.interpreting())


@triton.constexpr_function
def is_cuda():
    """Return whether the code is compiled for an NVIDIA GPU."""
    return not INTERPRET and tl.target_info.is_cuda()


@triton.constexpr_function
def is_hip():
    """Return whether the code is compiled for an AMD GPU."""
    return not INTERPRET and tl.target_info.is_hip()


# Called by interpreted kernels only; the mark makes the compiler skip the names in branches that it drops.
def _host_clock() -> int:
    return time.monotonic_ns()


def _host_any_gone(pids: Any) -> bool:
    return any(has_ended(pid) for pid in pids.handle.data.flat if pid)


def has_ended(pid: int) -> bool:
    """Return whether the process has ended; on the host."""
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    except OSError:  # this process has no free descriptor: the time-out bounds the wait
        return False
    try:
        return bool(select.select([descriptor], [], [], 0)[0])  # readable once the process has ended
    finally:
        os.close(descriptor)


def _host_pause(polls: Any) -> None:
    # The peer that we wait for may need this very core: soon longer than a poll takes, though short for a quick answer.
    time.sleep(50e-6 * 2 ** min(7, int(polls.handle.data.item())))


_builtins: tuple[Any, ...] = (_host_clock, _host_any_gone, _host_pause)
for _function in _builtins:
    _function.__triton_builtin__ = True


@device_function
def clock():
    """Return the time of a device-wide clock: int64 ticks (1 ns on cuda and cpu, 10 ns on hip)."""
    if INTERPRET:
        return tl.cast(_host_clock(), tl.int64)
    elif is_cuda():
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )


@device_function
def multiprocessor():
    """Return which multiprocessor (compute unit) the program runs on; 0 in the interpreter."""
    if INTERPRET:
        return 0
    elif is_cuda():
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        die, unit = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)\ns_getreg_b32 $1, hwreg(HW_REG_HW_ID, 8, 8)",
            "=s,=s",
            [],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        return die * 256 + unit  # shader engine, array and compute unit on that die


@device_function
def thread():
    """Return this thread's number in its program, to tell warps with different work apart; 0 where it is unknown."""
    if is_cuda():
        return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@device_function
def pause(polls):
    """Let other ranks run between polls, where ranks share cores. `polls`: how many came before."""
    if INTERPRET:
        _host_pause(polls)


@device_function
def any_gone(pids):
    """Return whether one of these processes, 0 for none, has ended; always False where kernels run on a device."""
    if INTERPRET:
        return _host_any_gone(pids)
    else:
        return False


@device_function
def drain_stores():
    """Wait until this thread's stores have left for memory. AMD's barrier does not await them; NVIDIA's fence does."""
    if is_hip():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


@device_function
def load_fresh(pointer, mask):
    """Load integers from memory past all caches, zero where masked out: `volatile`, which Triton drops for AMD.

    Each element is loaded once. Of a block with fewer elements than the program has threads, a compiler may repeat the
    load for a second layout, and whoever compares one load and uses the other can see two values. Here such a block is
    loaded in as many copies as there is room for, which a compiler does not repeat, and the greatest copy is returned.
    """
    if INTERPRET or layout_of(pointer.type) is not None:
        return _load_fresh(pointer, mask)
    elif pointer.numel >= program_threads():
        return _load_fresh(pointer, mask)
    else:
        COPIED: tl.constexpr = _copied(pointer.shape, program_threads())
        mask = tl.broadcast_to(tl.expand_dims(tl.broadcast_to(mask, pointer.shape), 0), COPIED)
        copies = _load_fresh(tl.broadcast_to(tl.expand_dims(pointer, 0), COPIED), mask)
        return tl.max(copies, 0).to(pointer.dtype.element_ty)


@triton.constexpr_function
def layout_of(kind):
    """Return a block's layout in Gluon: which thread holds which element; None in Triton, which chooses it."""
    return getattr(kind, "layout", None)


@triton.constexpr_function
def _copied(shape, threads):
    """Return the shape of as many copies of a block as give every thread an element."""
    sizes = [int(size) for size in shape]
    return [threads // math.prod(sizes), *sizes]


@device_function
def _load_fresh(pointer, mask):
    if is_hip():
        return tl.load(pointer, mask=mask, other=0, cache_modifier=".cv")
    else:
        return tl.load(pointer, mask=mask, other=0, volatile=True)


@device_function
def load_word(pointer):
    """Load one scalar as `load_fresh` does."""
    if is_hip():
        return tl.load(pointer, cache_modifier=".cv")
    else:
        return tl.load(pointer, volatile=True)


@device_function
def fence_async_proxy():
    """Make data that peers stored visible to this thread's following TMA loads."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "fence.proxy.async.global;\n\tmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


# Programmatic dependent launch (PDL), from Hopper on: a kernel's programs take multiprocessors while its predecessor
# runs. An early place need not be a good one: a few programs that draw the full memory bandwidth should be spread over
# the device. So a kernel lets the next one in when it is about to end, not before.


@triton.constexpr_function
def has_pdl():
    """Return whether the code is compiled for a GPU that has programmatic dependent launch."""
    return not INTERPRET and tl.target_info.cuda_capability_geq(*platform.HOPPER)


@device_function
def follow():
    """Wait for the end of the preceding kernel; first call of a kernel launched with `platform.pdl_options`.

    All stores of that kernel are visible then, so the work of two kernels never overlaps. A no-op without PDL.
    """
    if has_pdl():
        tl.extra.cuda.gdc_wait()


@device_function
def lead():
    """Let the next kernel start once all programs have called this or ended."""
    if has_pdl():
        tl.extra.cuda.gdc_launch_dependents()


@device_function
def dot(a, b, acc):
    """Return `acc + a @ b` in fp32. fp32 operands are multiplied exactly as torch does by default, not as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@device_function
def round_to(x, dtype: tl.constexpr):
    """Round fp32 `x` to the nearest `dtype`, ties to even."""
    return x.to(dtype)
