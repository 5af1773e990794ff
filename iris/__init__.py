"""A symmetric heap that every GPU of a host can address, and remote memory access to it inside Triton kernels.

`ctx = iris.iris(heap_size)` is the whole set-up. See `iris.context.Iris` for the host side and `iris.device` for what
can be called inside `@triton.jit`.
"""

from typing import TYPE_CHECKING

from . import platform, requirements

requirements.warn_of_namesake()
requirements.check_triton()  # before anything imports it
platform.prepare_triton()

from . import ops, triton_private  # noqa: E402
from .aliases import PAGE  # noqa: E402
from .context import Iris, iris  # noqa: E402
from .device import tiles  # noqa: E402
from .device.atomics import (  # noqa: E402
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
)
from .device.context import DeviceContext  # noqa: E402
from .device.rma import copy, get, load, put, store  # noqa: E402
from .device.tracing import TraceEvent  # noqa: E402
from .errors import IrisError  # noqa: E402
from .log import DEBUG, ERROR, INFO, WARNING, logger, set_logger_level  # noqa: E402
from .timing import do_bench  # noqa: E402
from .version import __version__  # noqa: E402

triton_private.name_kernels_alike()
Context = TritonContext = DeviceContext  # as ROCm/iris calls it, or called it once

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "Context",
    "DeviceContext",
    "Iris",
    "IrisError",
    "TraceEvent",
    "TritonContext",
    "__version__",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "copy",
    "do_bench",
    "get",
    "iris",
    "load",
    "logger",
    "ops",
    "put",
    "set_logger_level",
    "store",
    "tiles",
]

# Names of ROCm/iris, and their counterparts here.
_ELSEWHERE = {
    "AllReduceConfig": "ctx.ccl.all_reduce or ctx.ops.matmul_all_reduce outside the kernel",
    "Tile": "ctx.ccl or ctx.ops outside the kernel, load, store and atomics inside",
    "TileView": "pointers",
    "TensorView": "pointers",
    "make_tensor_view": "pointers",
    "bench": "iris.do_bench, or the command iris-tp bench",
    "hip": "ctx.get_cu_count() and torch.cuda",
    "memset_tensor": "tensor.fill_(value)",
    "get_device_id_for_rank": "ctx.get_device_id()",
    "is_simulation_env": "TRITON_INTERPRET=1, or no GPU, for the interpreter",
    "tensor_from_ptr": "ctx.empty(...), or ctx.as_remote(tensor, rank)",
    "CUDAArrayInterface": "ctx.empty(...), or ctx.as_remote(tensor, rank)",
    "tensor_creation": "ctx.zeros(...) and the other constructors of ctx",
    "x": "iris.tiles inside kernels, ctx.ccl outside",
    "host": "names from iris itself",
    "mem": "iris.load, iris.store and the other functions of iris",
    "triggered": "ctx.put, or iris.device.sync inside kernels",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _ELSEWHERE:
            raise AttributeError(f"iris.{name} is ROCm/iris's; expected {_ELSEWHERE[name]} here ({PAGE})")
        raise AttributeError(f"module 'iris' has no attribute {name!r}")
