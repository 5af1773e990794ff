"""Hide whether this process runs on cuda, hip or cpu; no other module checks that.

On a machine without a GPU the kernels run in Triton's interpreter. Triton decides that once, when it is imported, so
`prepare_triton()` must run before; `iris/__init__.py` calls it first of all. On AMD it keeps Triton from cutting the
addresses of peers' memory to 32 bits.
"""

from collections.abc import Callable
import functools
import os
import sys
from typing import Any, TypeVar

import torch

from .errors import PlatformError

Function = TypeVar("Function", bound=Callable[..., Any])

ENV_INTERPRET = "TRITON_INTERPRET"
ENV_TIMEOUT = "IRIS_TIMEOUT"
ENV_SHARE_GPUS = "IRIS_SHARE_GPUS"
ENV_REPLAY = "IRIS_REPLAY"
_ENV_BUFFER_OPS = "AMDGCN_USE_BUFFER_OPS"

# A kernel's wait ends after this long. Ranks drift apart while they compile; in the interpreter they are slow,
# but there the process of a lost peer shows it, not the time.
DEFAULT_TIMEOUT_S = 60.0
_TIMEOUT_S = {"cuda": DEFAULT_TIMEOUT_S, "hip": DEFAULT_TIMEOUT_S, "cpu": 300.0}

# Ticks per second of the clock that `device/arch.py` reads on each platform.
_CLOCK_HZ = {"cuda": 1e9, "hip": 1e8, "cpu": 1e9}

# Compute capabilities, in the form of `compute_capability`.
HOPPER, BLACKWELL = (9, 0), (10, 0)


def prepare_triton() -> None:
    """Enable Triton's interpreter when there is no GPU; raise `PlatformError` where that comes too late.

    `TRITON_INTERPRET=0` keeps it off, for compiling ahead of time on a machine without a GPU.
    """
    if torch.version.hip:
        keep_addresses_whole()
    if os.environ.get(ENV_INTERPRET) is not None or torch.cuda.is_available():
        return
    if "triton" in sys.modules and not interpreting():
        raise PlatformError(
            "triton was imported before iris on a machine without a GPU, so its interpreter is off. "
            "Import iris first, or set TRITON_INTERPRET=1 before Python starts."
        )
    os.environ[ENV_INTERPRET] = "1"


def fast_packages() -> frozenset[str]:
    """Return the packages whose kernels the interpreter runs faster (`device/interpreter/fast`).

    With `IRIS_REPLAY=1` these are the library's own, with `IRIS_REPLAY=name,name` the named ones, too; else none.
    """
    names = os.environ.get(ENV_REPLAY) or "0"
    if names == "0":
        return frozenset()
    return frozenset({"iris", "iris_ops", "layers", *names.split(",")})


def keep_addresses_whole() -> None:
    """Disable Triton's buffer instructions, for all kernels that this process compiles for AMD from now on.

    They address a tensor by its beginning and an offset of 32 bits. For a tensor in less than 2 GiB of memory Triton
    assumes that every offset fits. The distance to a peer's heap does not: the instruction would drop its upper bits.
    """
    os.environ[_ENV_BUFFER_OPS] = "0"


@functools.cache
def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter in this process."""
    from .triton_private import interprets  # by now the interpreter has been set up, or not

    return interprets()


def name() -> str:
    """Return `"cpu"` under the interpreter, else `"hip"` or `"cuda"`."""
    if interpreting():
        return "cpu"
    return "hip" if torch.version.hip else "cuda"


def sharing_gpus() -> bool:
    """Return whether several ranks may have the same GPU (environment variable IRIS_SHARE_GPUS).

    This is for development and tests with fewer GPUs than ranks. The driver runs the ranks' processes in turn, for some
    milliseconds each. A kernel that waits for a peer waits until that peer runs, so results are right but slow.
    """
    text = os.environ.get(ENV_SHARE_GPUS) or "0"
    if text not in ("0", "1"):
        raise PlatformError(f"{ENV_SHARE_GPUS} is {text!r}: expected 0 or 1")
    return text == "1"


def device(rank: int, num_ranks: int) -> torch.device:
    """Return the device of this rank.

    Raises `PlatformError` when there are fewer GPUs than ranks on this host, unless ranks share them.
    """
    if name() == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", rank))
    if count and sharing_gpus():
        return torch.device("cuda", local % count)
    if local >= count or num_ranks > count:
        raise PlatformError(
            f"{num_ranks} ranks on this host but {count} GPUs are visible (local rank {local}); start at most "
            f"{count} ranks, let them take turns on the GPUs with {ENV_SHARE_GPUS}=1, which is slow, or set "
            "TRITON_INTERPRET=1 to run on the CPU."
        )
    return torch.device("cuda", local)


def backend() -> str:
    """Return the torch.distributed backend of the platform; NCCL refuses two ranks on one GPU."""
    return "gloo" if name() == "cpu" or sharing_gpus() else "nccl"


@functools.cache
def num_programs(dev: torch.device) -> int:
    """Return how many programs run at once, one on each multiprocessor; the interpreter runs them one by one."""
    if dev.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(dev).multi_processor_count


@functools.cache
def shared_bytes(dev: torch.device) -> int:
    """Return the bytes of shared memory that a program may take; Triton refuses a kernel that takes more."""
    if dev.type == "cpu":
        return 1 << 40
    from .triton_private import max_shared_bytes

    return max_shared_bytes(torch.cuda.current_device() if dev.index is None else dev.index)


def compute_capability(dev: torch.device) -> tuple[int, int]:
    """Return NVIDIA's compute capability, (major, minor); (0, 0) of any other device."""
    nvidia = dev.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(dev) if nvidia else (0, 0)


@functools.cache
def has_warp_specialisation(dev: torch.device) -> bool:
    """Return whether warps of a program can be given different work: NVIDIA Hopper."""
    return compute_capability(dev)[0] == HOPPER[0]


@functools.cache
def pdl_options(dev: torch.device) -> dict[str, bool]:
    """Return options of a kernel that begins by `arch.follow()`: from Hopper on, programmatic dependent launch."""
    return {"launch_pdl": True} if compute_capability(dev) >= HOPPER else {}


@functools.cache
def launch_options(dev: torch.device, fused: bool = True) -> dict[str, bool]:
    """Return the options of `pdl_options`, and the one that fuses a product and a sum, whatever Triton's default is.

    `fused`: False keeps products and sums apart. A compiler can only make one instruction of a product and a sum that
    one thread holds, so with True a result's bits may depend on how a tile is spread over threads.
    """
    from .triton_private import FUSED

    return (FUSED if fused else dict.fromkeys(FUSED, False)) | pdl_options(dev)


def timeout_s() -> float:
    """Return the longest that a kernel waits for a peer, in seconds (environment variable IRIS_TIMEOUT)."""
    text = os.environ.get(ENV_TIMEOUT)
    if text is None:
        return _TIMEOUT_S[name()]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e9:  # its ticks fit into int64
        raise PlatformError(f"{ENV_TIMEOUT} is {text!r}; expected seconds, greater than 0 and at most 1e9")
    return value


# Tools that serialise the kernels of a process, by the environment variable that they set: then a kernel that waits for
# a peer may keep this rank from launching what the peer waits for.
_SERIALISERS = {
    "CUDA_LAUNCH_BLOCKING": "CUDA_LAUNCH_BLOCKING",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "NV_SANITIZER_INJECTION_PORT_BASE": "compute-sanitizer",
    "AMD_SERIALIZE_KERNEL": "AMD_SERIALIZE_KERNEL",
}


def serialised() -> str:
    """Return the addition to a time-out's message where a tool runs kernels one at a time; "" where none is seen."""
    active = sorted({tool for name, tool in _SERIALISERS.items() if os.environ.get(name, "0") not in ("", "0")})
    if not active:
        return ""
    tools = " and ".join(active)
    return f", under {tools}, which runs kernels one at a time and so stops those that wait (docs/debugging.md)"


def timeout_ticks() -> int:
    """Return `timeout_s` in ticks of the device clock."""
    return ticks(timeout_s())


def ticks(seconds: float) -> int:
    """Return a time in ticks of the device clock that kernels read."""
    return int(seconds * _CLOCK_HZ[name()])


def is_capturing(dev: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return dev.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize(dev: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Wait on the host until the device, or one stream of it, is idle."""
    if dev.type == "cuda":
        (stream or torch.cuda).synchronize()


def constant(function: Function) -> Function:
    """Let torch's compiler call `function` once and reuse its result.

    As `torch.compiler.assume_constant_result`, which imports the compiler: a second, even where nothing is compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
