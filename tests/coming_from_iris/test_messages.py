"""What a port reads where a name of ROCm/iris means something else here: each message names the remedy."""

import importlib

import iris
from iris.device import rma
import pytest
import triton
import triton.language as tl

from tests.harness import ON_GPU, run_ranks

pytestmark = pytest.mark.skipif(ON_GPU, reason="messages of the interpreter")


@triton.jit
def _method_for_a_pointer(x, ctx_ptr, bases):
    ctx = iris.DeviceContext.initialize(ctx_ptr, 0, 1)
    iris.store(x, 1.0, 0, 0, ctx.heap_bases)


@triton.jit
def _get_by_a_method(x, ctx_ptr, bases):
    ctx = iris.DeviceContext.initialize(ctx_ptr, 0, 1)
    iris.get(x, x + 1, 0, 0, ctx.heap_bases)


@triton.jit
def _atomic_by_a_method(x, ctx_ptr, bases):
    ctx = iris.DeviceContext.initialize(ctx_ptr, 0, 1)
    iris.atomic_add(x, 1.0, 0, 0, ctx.heap_bases)


@triton.jit
def _hint_by_position(x, ctx_ptr, bases):
    iris.store(x + tl.arange(0, 16), 1.0, 0, 0, bases, None, 16)


@triton.jit
def _copy_engine(x, ctx_ptr, bases):
    iris.put(x, x + 1, 0, 0, bases, use_copy_engine=True)


MESSAGES = {
    _method_for_a_pointer: "expected ctx.heap_bases(), with parentheses",
    _get_by_a_method: "expected ctx.heap_bases(), with parentheses",
    _atomic_by_a_method: "expected ctx.heap_bases(), with parentheses",
    _hint_by_position: "pass hint= by keyword",
    _copy_engine: "use_copy_engine is True; expected False",
}


def check_kernels(ctx):
    x = ctx.zeros(16)
    for kernel, message in MESSAGES.items():
        with pytest.raises(Exception) as caught:
            kernel[(1,)](x, ctx.get_device_context(), ctx.get_heap_bases())
        assert message in str(caught.value) and "coming-from-iris.md" in str(caught.value), kernel
    ctx.barrier()


def test_kernels():
    run_ranks(1, check_kernels)


def test_what_counts_as_a_pointer():
    """Compiled, a method of the context is triton's own object, which cannot be called."""

    class Bound:
        __func__ = None

    assert not rma.is_pointer(Bound()) and not rma.is_pointer(len) and rma.is_pointer(1)


def test_modules():
    with pytest.raises(ImportError, match="expected iris.tiles inside kernels"):
        importlib.import_module("iris.x")
    for name in ("x", "host", "mem"):
        with pytest.raises(AttributeError, match=f"iris.{name} is ROCm/iris's; expected"):
            getattr(iris, name)
    for name in ("host", "mem", "triggered", "tracing.events"):  # Python's own error, as the page documents
        with pytest.raises(ModuleNotFoundError, match=f"No module named 'iris.{name}'"):
            importlib.import_module(f"iris.{name}")
