"""Kernels that the interpreter runs from a recording: the same results, each effect once, Python only for new ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import iris
from iris.device import arch
from iris.device.function import device_function
from iris.device.interpreter import launching
from iris.device.interpreter.fast import Fast, replay
from iris.errors import DtypeError
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from tests import fresh
from tests.harness import ON_GPU, run_ranks

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")

PYTHON_RAN: list[int] = []


def _note() -> None:
    PYTHON_RAN.append(1)


_note.__triton_builtin__ = True  # type: ignore[attr-defined]


@contextmanager
def recordings(packages: tuple[str, ...] = ("tests",)) -> Iterator[dict]:
    """Has kernels of these packages recorded, and nothing known of them at first."""
    with pytest.MonkeyPatch.context() as patch:
        fast = Fast(frozenset(packages))
        patch.setattr(launching, "fast", lambda: fast)
        PYTHON_RAN.clear()
        yield fast.recordings
        assert fast.tape.recorder is None


@device_function
def _halves(x, count):
    """x after as many halvings as `count` says, a number in memory."""
    for _ in range(count):
        x = x * 0.5
    return x


@triton.jit
def kernel(x, y, out, counter, sums, rows, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """What kernels of the library are made of: blocks, masks, products, reductions, atomics, loops and choices."""
    _note()
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


def test_what_is_replayed_is_what_python_computes() -> None:
    with recordings(()):
        plain = [launched(seed) for seed in range(60)]
    assert len(PYTHON_RAN) == 3 * 60
    with recordings() as known:
        for seed, expected in enumerate(plain):
            for mine, theirs in zip(launched(seed), expected, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), seed
            assert mine.isfinite().all()
        (recording,) = known.values()
        assert not recording.refused
    assert len(PYTHON_RAN) < 30, "it was not replayed"  # of 180 programs: some ways, each once


@triton.jit
def counted_kernel(numbers, wanted, out):
    """How many numbers come before the wanted one, each of which adds 1 to the last place of `out`."""
    _note()
    count = 0
    while tl.load(numbers + count) != tl.load(wanted):
        tl.atomic_add(out + 1, 1)
        count += 1
    tl.store(out, count)


@pytest.mark.parametrize("most", [500, 6])
def test_a_new_way_does_nothing_twice(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_TRACES", most)
    numbers = torch.arange(64, dtype=torch.int32)
    with recordings():
        for wanted in [*np.random.default_rng().integers(0, 12, 40).tolist(), 30, 3]:
            out = torch.tensor([-1, 0], dtype=torch.int32)
            counted_kernel[(1,)](numbers, torch.tensor([wanted], dtype=torch.int32), out)
            assert out.tolist() == [wanted, wanted]
    assert (len(PYTHON_RAN) <= replay._PLAIN_RUNS + 14) == (most == 500)


@triton.jit
def refused_kernel(x, out, KIND: tl.constexpr):
    _note()
    value = tl.load(x)
    tl.store(out, _from_elsewhere(value) if KIND == "array" else value.to(tl.float8e5, bitcast=True) + 1)


def _from_elsewhere(value):
    """A value of an array that no operation has made."""
    return core.tensor(replay.TensorHandle(value.handle.data * 2, value.handle.dtype), value.type)


_from_elsewhere.__triton_builtin__ = True  # type: ignore[attr-defined]


def test_an_array_from_elsewhere_is_not_replayed() -> None:
    with recordings() as known:
        for number in range(replay._PLAIN_RUNS + 2):
            out = torch.tensor([-1], dtype=torch.int32)
            refused_kernel[(1,)](torch.tensor([number], dtype=torch.int32), out, KIND="array")
            assert out.item() == 2 * number
        assert [each.refused for each in known.values()] == [True]
    assert len(PYTHON_RAN) == replay._PLAIN_RUNS + 2


def test_an_error_leaves_nothing_behind() -> None:
    with recordings():
        for _ in range(replay._PLAIN_RUNS + 2):
            with pytest.raises(DtypeError, match="cast to tl.float32"):
                refused_kernel[(1,)](torch.tensor([1], dtype=torch.int8), torch.zeros(1), KIND="number")
        assert torch.equal(launched(1)[3][:1], torch.tensor([3], dtype=torch.int32))


@triton.jit
def clock_kernel(out):
    polls = 0
    arch.pause(polls)
    tl.store(out, arch.clock())


def test_the_clock_goes_on() -> None:
    with recordings():
        seen = []
        for _ in range(replay._PLAIN_RUNS + 3):
            out = torch.zeros(1, dtype=torch.int64)
            clock_kernel[(1,)](out)
            seen.append(out.item())
    assert all(a + 10_000 < b for a, b in pairwise(seen))


def ops_body(ctx: iris.Iris) -> tuple[bool, int]:
    """Calls whose ranks come early and late, with new values and new places: right, and most of them replayed."""
    A, B, out = torch.empty(3, 24), torch.empty(40, 24), ctx.empty(3, 40, dtype=torch.float32)
    right, runs = True, []
    run = replay.Recording._record

    def counted(*given) -> None:
        runs.append(1)
        run(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Recording, "_record", counted)
        for call in range(60):
            for each in (A, B):
                each.normal_()
            if call % 5 == ctx.cur_rank:
                torch.zeros(1 << 20).sum()  # late
            exact = A.double() @ B.double().t()
            torch.distributed.all_reduce(exact)
            out.fill_(torch.nan)
            ctx.ops.matmul_all_reduce(out, A, B.t())
            right &= bool((out - exact).abs().max() < 1e-4)
    return right, len(runs)


def test_ops_whose_ranks_are_late_are_replayed() -> None:
    for right, recorded in run_ranks(2, ops_body):
        assert right and recorded < 40


def test_only_the_librarys_kernels_are_replayed_and_only_where_that_is_on() -> None:
    code = "from iris.device.interpreter import launching; from tests.iris import test_replay as t"
    code += "; fast = launching.fast()"
    off = f"{code}; assert fast is None"
    on = f"{code}; t.launched(0); assert len(t.PYTHON_RAN) == 3 and not fast.recordings and fast.supports(t.arch.clock)"
    for program, value in ((off, "0"), (on, "1")):
        done = fresh.run(program, TRITON_INTERPRET="1", IRIS_REPLAY=value)
        assert done.returncode == 0, done.stderr


def test_a_users_kernel_meets_triton_as_it_is() -> None:
    """Nothing that a kernel of the library replaces stays when it has run."""
    owners = [core.tensor, core.block_type, core.pointer_type, core.dtype, core, tl, replay.TensorHandle, arch]
    before = [dict(vars(owner)) for owner in owners]
    with recordings():
        for seed in range(20):
            launched(seed)
        assert [dict(vars(owner)) for owner in owners] == before
