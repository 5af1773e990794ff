"""Write inductor's code of a few graphs for Hopper as JSON: `python -m tests.inductor_code`.

It runs in its own process, in which torch sees a simulated Hopper GPU: nothing is launched, and no GPU is needed.
Each graph is generated twice: with programmatic dependent launch as inductor has it, and as
`layers/serving/inductor_waits.py` does.
"""

from __future__ import annotations

from contextlib import ExitStack
import json
import os
from types import SimpleNamespace
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

from layers.serving import inductor_waits  # noqa: E402
import torch  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
import torch._inductor.config as config  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

HOPPER = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, L2_cache_size=50 << 20, total_memory=140 << 30,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, gcnArchName="",
)  # fmt: skip

aten = torch.ops.aten
_library = torch.library.Library("iris_tests", "FRAGMENT")
_library.define("opaque(Tensor x, Tensor y) -> Tensor")
torch.library.register_fake("iris_tests::opaque", lambda x, y: x.new_empty(x.shape), lib=_library)


def cache(keys, fresh, start):
    """A cache that is written in place, and copied for grouped heads."""
    at = aten.add(start, aten.arange(fresh.shape[2], device="cuda"))
    aten.index_put_(keys, [None, None, at], fresh)
    return aten.clone(aten.expand(aten.unsqueeze(keys, 2), [2, 2, 4, 64, 64]), memory_format=torch.contiguous_format)


def filled(x, y):
    """A kernel that reads nothing, between two that do."""
    opaque = torch.ops.iris_tests.opaque
    t = aten.exp(opaque(x, y))
    z = aten.full_like(t, 2.0)
    q = aten.exp(opaque(t, aten.sum(t, [1])))
    return opaque(q, aten.index_put(z, [aten.argmax(q, 1)], aten.sum(q, [0])))


def normed(x, y, weight):
    """Reductions in loops, and what scales by them, after an opaque operator and after each other."""
    mean = aten.mean(aten.mul(x, x), [-1], True)
    o = torch.ops.iris_tests.opaque(aten.mul(aten.mul(x, aten.rsqrt(mean)), weight), y)
    return aten.softmax(aten.add(y, o), -1), aten.cumsum(aten.sum(aten.exp(y), [1]), 0)


def step(x, w, keys, values, cos, start):
    """Compute the part of a decode step between product and attention, which becomes one of three kernels."""
    q, k, v = aten.split(torch.ops.iris_tests.opaque(x, w), 64, 1)
    at, places = aten.add(start, aten.arange(1, device="cuda")), [None, None]
    aten.index_put_(keys, [*places, at], aten.unsqueeze(aten.mul(aten.view(k, [4, 1, 64]), cos), 1))
    aten.index_put_(values, [*places, at], aten.view(v, [4, 1, 1, 64]))
    rotated = aten.add(aten.mul(q, cos), aten.mul(aten.neg(k), cos))
    return torch.ops.iris_tests.opaque(torch.ops.iris_tests.opaque(rotated, keys), values)


def _empty(*shape: int, dtype: torch.dtype = torch.float32):
    return lambda: torch.empty(shape, dtype=dtype, device="cuda")


_ROWS, _CACHE = _empty(64, 8192), _empty(4, 1, 16, 64)
GRAPHS = {
    cache: (_empty(2, 2, 64, 64), _empty(2, 2, 8, 64), _empty(1, dtype=torch.int64)),
    filled: (_ROWS, _ROWS),
    normed: (_ROWS, _ROWS, _empty(8192)),
    step: (_empty(4, 192), _ROWS, _CACHE, _CACHE, _empty(64), _empty(1, dtype=torch.int64)),
}


def _with_a_simulated_gpu(stack: ExitStack) -> None:
    torch._C._ensureCUDADeviceGuardSet()
    reported = dict(
        is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0), is_initialized=True
    )
    reported |= dict(_lazy_init=None, get_device_properties=HOPPER, _get_device_properties=HOPPER)
    for name, value in reported.items():
        answer = mock.patch.object(torch.cuda, name, lambda *_, value=value: value, create=True)
        stack.enter_context(answer)
    reported = dict(get_device_properties=HOPPER, current_device=0)
    for name, value in reported.items():
        answer = staticmethod(lambda *_, value=value: value)
        stack.enter_context(mock.patch.object(CudaInterface.Worker, name, answer))
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)


def code(function, makers, **patches) -> str:
    """The module that inductor writes for `function`."""
    mode = FakeTensorMode()
    with mode:
        inputs = [make() for make in makers]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    with ExitStack() as stack:
        _with_a_simulated_gpu(stack)
        stack.enter_context(config.patch({"combo_kernels": True, "compile_threads": 1, **patches}))
        stack.enter_context(V.set_fake_mode(mode))
        graph = GraphLowering(traced, example_inputs=inputs)
        for handler in (V.set_graph_handler(graph), V.set_debug_handler(mock.MagicMock())):
            stack.enter_context(handler)
        stack.enter_context(V.set_extern_kernel_nodes([]))
        graph.run(*inputs)
        return graph.codegen()[0].value


def main() -> None:
    plain = {"triton.enable_pdl": True}
    print(
        json.dumps(
            {
                f.__name__: [code(f, makers, **each) for each in (plain, inductor_waits.patches())]
                for f, makers in GRAPHS.items()
            }
        )
    )


if __name__ == "__main__":
    main()
