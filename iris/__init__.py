"""A symmetric heap that every GPU of a host can address, and remote memory access to it inside Triton kernels.

`ctx = iris.iris(heap_size)` is the whole set-up. See `iris.context.Iris` for the host side and `iris.device` for what
can be called inside `@triton.jit`.
"""

from . import platform, requirements

requirements.check_triton()  # before anything imports it
platform.prepare_triton()

from .context import Iris, iris  # noqa: E402
from .device.context import DeviceContext  # noqa: E402
from .device.rma import (  # noqa: E402
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
)
from .errors import IrisError  # noqa: E402
from .log import DEBUG, ERROR, INFO, WARNING, set_logger_level  # noqa: E402
from .version import __version__  # noqa: E402

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "DeviceContext",
    "Iris",
    "IrisError",
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
    "get",
    "iris",
    "load",
    "put",
    "set_logger_level",
    "store",
]
