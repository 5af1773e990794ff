"""The library's own kernels run faster in the interpreter: the same results, and nothing changes for other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iris.device import arch
from iris.device.function import device_function
from iris.device.interpreter import launching
from iris.device.interpreter.fast import Fast
from iris.triton_private import TensorHandle
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import InterpreterError

from tests import fresh
from tests.harness import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")
OWNERS = [core.tensor, core.block_type, core.pointer_type, core.dtype, core, tl, TensorHandle, arch]


@contextmanager
def fast(*packages: str) -> Iterator[None]:
    """Runs kernels of these packages faster; on leaving, the language is what it was."""
    before = [dict(vars(owner)) for owner in OWNERS]
    with pytest.MonkeyPatch.context() as patch:
        runner = Fast(frozenset(packages))
        patch.setattr(launching, "fast", lambda: runner)
        yield
    assert not packages or [dict(vars(owner)) for owner in OWNERS] == before


@device_function
def _halves(x, count):
    """Halve x as often as `count`, a number in memory, demands."""
    for _ in range(count):
        x = x * 0.5
    return x


@triton.jit
def kernel(x, y, out, counter, sums, rows, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """What kernels of the library are made of: blocks, masks, products, reductions, atomics, loops and choices."""
    program = tl.program_id(0)
    before = tl.atomic_add(counter, 1)
    r, c = tl.arange(0, SIZE), tl.arange(0, DEEP)
    inside = (r < rows)[:, None] & (c < DEEP - 1)[None, :]
    a = tl.load(x + r[:, None] * DEEP + c[None, :], mask=inside, other=1.0)
    b = tl.load(y + program * DEEP + c).to(tl.float32)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(2):
        total = tl.dot(a + k, (a * b[None, :]).T, total, input_precision="ieee")
    largest = tl.max(tl.abs(b))
    if largest > 1.5:
        total = _halves(total, tl.load(counter + 1))
    elif largest > 1.0:
        total = tl.where(total > 0, total, -total)
    tl.store(out + program * SIZE * SIZE + r[:, None] * SIZE + r[None, :], total, mask=(r < rows)[:, None])
    tl.store(sums + program, tl.sum(total, 1).to(tl.bfloat16).to(tl.float32).sum(0) + before * 0)


def inputs(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 16, generator=random)
    y = torch.randn(3, 16, generator=random).mul(torch.rand(3, 1, generator=random)).bfloat16()
    out, sums = torch.full((3, 16, 16), torch.nan), torch.full((3,), torch.nan)
    return [x, y, out, torch.tensor([0, seed % 4], dtype=torch.int32), sums]


def launched(seed: int) -> list[torch.Tensor]:
    given = inputs(seed)
    kernel[(3,)](*given, 1 + seed % 16, SIZE=16, DEEP=16)
    return given


def test_results_are_those_of_triton() -> None:
    with fast():
        plain = [launched(seed) for seed in range(20)]
    with fast("tests"):
        for seed, expected in enumerate(plain):
            for mine, theirs in zip(launched(seed), expected, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), seed
            assert mine.isfinite().all()


@triton.jit
def failing_kernel(x, out):
    tl.store(out, tl.load(x) + tl.arange(0, 3))


def test_an_error_leaves_nothing_behind() -> None:
    with fast("tests"), pytest.raises(InterpreterError, match="power of 2"):
        failing_kernel[(1,)](torch.tensor([1]), torch.zeros(1))


def test_only_the_librarys_kernels_run_so_and_only_where_that_is_on() -> None:
    code = "from iris.device.interpreter import launching; from tests.iris import test_fast as t; f = launching.fast()"
    off, on = f"{code}; assert f is None", f"{code}; assert f.supports(t.arch.clock) and not f.supports(t.kernel.fn)"
    for program, value in ((off, "0"), (on, "1")):
        done = fresh.run(program, TRITON_INTERPRET="1", IRIS_REPLAY=value)
        assert done.returncode == 0, done.stderr
