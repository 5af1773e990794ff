"""The device context for Gluon, Triton's language with explicit layouts.

    import iris.experimental.iris_gluon as iris_gl

    @gluon.jit
    def kernel(context_tensor, x, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
        ctx = iris_gl.IrisDeviceCtx.initialize(context_tensor)
        offsets = gl.arange(0, BLOCK, layout=LAYOUT)
        ctx.put(x + offsets, x + offsets, (ctx.rank + 1) % ctx.world_size)

    with iris_gl.iris(heap_size) as ctx:
        kernel[(1,)](ctx.get_device_context(), x, BLOCK, LAYOUT)

The methods are those of `iris.DeviceContext`, the very functions: Triton compiles a function in the language of its
caller, and what they are made of means the same in both. A block of pointers brings its layout along, and what is
loaded has it too; values and masks must have the pointers' layout. `signal` and `wait` of `iris.device.sync` work with
this context as well.

A layout's threads per warp are 32 on NVIDIA GPUs and 64 on AMD's, so layouts written for ROCm/iris need another number.

Gluon has no interpreter: kernels need a GPU, though they can be compiled ahead of time without. A launch without one
raises `PlatformError`.
"""

import triton
import triton.language as tl

from .. import platform, triton_private
from ..context import Iris, iris
from ..device.context import RemoteAccess
from ..device.function import device_function
from ..device.tracing import DeviceTracing, device_tracing
from ..errors import PlatformError
from ..triton_private import aggregate

__all__ = ["Iris", "IrisDeviceCtx", "iris"]


def _refusal() -> PlatformError:
    return PlatformError(
        "a Gluon kernel is launched where Triton's interpreter runs kernels, which cannot run Gluon; expected a GPU "
        "and no TRITON_INTERPRET=1. Without a GPU, write the kernel with iris.DeviceContext in @triton.jit, or compile "
        "it ahead of time."
    )


if platform.interpreting():
    triton_private.refuse_gluon(_refusal)


@aggregate
class IrisDeviceCtx(RemoteAccess):
    """Represent this rank's view of the heap inside a Gluon kernel. Make it with `IrisDeviceCtx.initialize`.

    `cur_rank` and `num_ranks` are what ROCm/iris calls `rank` and `world_size` here.
    """

    rank: tl.tensor
    world_size: tl.tensor
    cur_rank: tl.tensor
    num_ranks: tl.tensor
    ctx_ptr: tl.tensor
    tracing: DeviceTracing

    @triton.constexpr_function
    def __init__(self, rank, world_size, ctx_ptr, tracing):
        self.rank = rank
        self.world_size = world_size
        self.cur_rank = rank
        self.num_ranks = world_size
        self.ctx_ptr = ctx_ptr
        self.tracing = tracing

    @staticmethod
    @device_function
    def initialize(context_tensor, tracing: tl.constexpr = False):
        """Return the device context of the tensor from `Iris.get_device_context()`, which holds the rank and their
        number."""
        rank = tl.load(context_tensor).to(tl.int32)
        world_size = tl.load(context_tensor + 1).to(tl.int32)
        return IrisDeviceCtx(rank, world_size, context_tensor, device_tracing(context_tensor, tracing))
