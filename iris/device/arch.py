"""The few things that differ by architecture: a clock, fences, and what Triton's interpreter lacks.

Every function here is a no-op, or plain Triton, wherever the architecture already guarantees what it names.
"""

import os
import select
import time
from typing import Any

import triton
import triton.language as tl

from .. import platform
from .function import device_function

INTERPRET = tl.constexpr(platform.interpreting())


@triton.constexpr_function
def is_cuda():
    """Whether the code is compiled for an NVIDIA GPU."""
    return not INTERPRET and tl.target_info.is_cuda()


@triton.constexpr_function
def is_hip():
    """Whether the code is compiled for an AMD GPU."""
    return not INTERPRET and tl.target_info.is_hip()


# Called by interpreted kernels only; the mark lets the compiler pass over the names in branches that it drops.
def _host_clock() -> int:
    return time.monotonic_ns()


def _host_any_gone(pids: Any) -> bool:
    return any(has_ended(pid) for pid in pids.handle.data.flat if pid)


def has_ended(pid: int) -> bool:
    """Whether the process has ended; on the host."""
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is left here, which says nothing of that process: the time-out bounds the wait
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
    """A device-wide clock: int64 ticks (1 ns on cuda and cpu, 10 ns on hip)."""
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
    """Which multiprocessor (compute unit) the program runs on; 0 in the interpreter."""
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
    """The number of this thread in its program; where it is not known, 0: it tells warps with different work apart."""
    if is_cuda():
        return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@device_function
def pause(polls):
    """Before another poll, after so many: lets other ranks run where ranks share cores."""
    if INTERPRET:
        _host_pause(polls)


@device_function
def any_gone(pids):
    """Whether one of these processes, 0 for none, has ended; only known where kernels run on the host."""
    if INTERPRET:
        return _host_any_gone(pids)
    else:
        return False


@device_function
def drain_stores():
    """This thread's earlier stores have left for memory. AMD's barrier does not wait for them; NVIDIA's fence does."""
    if is_hip():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


@device_function
def load_fresh(pointer, mask):
    """What stands in memory now, past all caches, zero where masked out: `volatile`, which Triton drops for AMD."""
    if is_hip():
        return tl.load(pointer, mask=mask, other=0, cache_modifier=".cv")
    else:
        return tl.load(pointer, mask=mask, other=0, volatile=True)


@device_function
def load_word(pointer):
    """The same of one word."""
    if is_hip():
        return tl.load(pointer, cache_modifier=".cv")
    else:
        return tl.load(pointer, volatile=True)


@device_function
def fence_async_proxy():
    """Data that peers stored is visible to this thread's following TMA loads."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "fence.proxy.async.global;\n\tmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


# Programmatic dependent launch, from Hopper on: a kernel's programs take their places while the one before still runs.
# A place that a program takes early need not be a good one: where few programs draw all that the memory gives, they are
# to be spread over the device. So a kernel lets the next one in when it is about to end, not before.


@triton.constexpr_function
def launches_ahead():
    """Whether the code is compiled for a GPU that has programmatic dependent launch."""
    return not INTERPRET and tl.target_info.cuda_capability_geq(*platform.HOPPER)


@device_function
def follow():
    """First thing in a kernel that is launched beside the one before (`platform.beside`): waits until that has ended.

    All it has done is visible then, so what two kernels do never overlaps. Without such a launch this does nothing.
    """
    if launches_ahead():
        tl.extra.cuda.gdc_wait()


@device_function
def lead():
    """The next kernel may be launched, once all programs have come here or ended."""
    if launches_ahead():
        tl.extra.cuda.gdc_launch_dependents()


@device_function
def dot(a, b, acc):
    """`acc + a @ b` in fp32. fp32 operands are multiplied exactly as torch does by default, not as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@device_function
def round_to(x, dtype: tl.constexpr):
    """fp32 `x` rounded to nearest even in `dtype`."""
    return x.to(dtype)
