"""The code of every kernel on every target: limits, tracing, and that each check can fail."""

from __future__ import annotations

import json

from iris_ops.kernels.hopper.matmul_gather import hopper_matmul_gather_kernel
from iris_ops.kernels.hopper.matmul_reduce import hopper_matmul_reduce_kernel
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.assembly import (
    CUDA,
    HIP,
    Kernel,
    looks_around_a_copy,
    narrow_hip_stores,
    narrow_scopes,
    narrow_stores,
    releases_without_barriers,
    sound,
    unbounded_waits,
    undrained_signals,
    unfenced_loads,
    unordered_releases,
    waits_at_the_end_of_a_product,
)
from tests.compilation import RECORDS, WRITING, recorded

pytestmark = pytest.mark.compile

POINTERS = {"a", "b", "epilogue", "out", "staged", "joins", "step", "sync", "ctx_ptr"}
RECORDED = [CUDA[0], HIP[0]]
SHARED_LIMIT = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


@pytest.mark.skipif(WRITING, reason="the record is being written")
@pytest.mark.parametrize("target", RECORDED)
def test_the_record_is_of_these_kernels(compiled, target: str) -> None:
    """So that `make test` compiles nothing that was compiled before; `make test-all` compares all answers."""
    if json.loads((RECORDS / f"{target}.json").read_text())["triton"] != triton.__version__:
        pytest.skip(f"tests/compiled/{target}.json was made with another triton")
    keys = {name: each["key"] for name, each in recorded(target).items()}
    actual = {name: kernel.key for name, kernel in compiled(target).items()}
    old = sorted(name for name in keys.keys() | actual.keys() if keys.get(name) != actual.get(name))
    assert not old, f"kernels or checks have changed since they were recorded: {', '.join(old)}: make compiled"


@pytest.mark.parametrize("target", CUDA + HIP)
def test_kernels_fit_in_shared_memory_and_never_trap(compiled, target: str) -> None:
    for kernel in sound(compiled(target)):
        assert kernel.shared <= SHARED_LIMIT[target], (kernel.name, kernel.shared)
        assert not kernel.count(r"^\s*(trap|s_trap|brkpt)\b"), kernel.name


@pytest.mark.parametrize("kernel", [hopper_matmul_gather_kernel, hopper_matmul_reduce_kernel], ids=lambda k: k.__name__)
def test_how_tiles_are_shared_and_pushed_asks_for_no_further_kernel(kernel) -> None:
    """Triton specialises on 1 and on multiples of 16, which is useless for numbers that depend on all sizes."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    given = {p.name: torch.empty(64) if p.name in POINTERS else 0 if p.is_constexpr else 48 for p in kernel.params}

    def specialised(**changes: int) -> list:
        return bind(**given | changes)[1]

    for name in ("shared_tiles", "sharers", "skew", "spread"):
        assert all(specialised(**{name: value}) == specialised() for value in (0, 1, 7, 22763)), name
    assert specialised(N=7) != specialised(), "the width of rows decides how they are stored"


@pytest.mark.parametrize("target", CUDA + HIP)
@pytest.mark.parametrize(
    "name, cuda_check, hip_check",
    [
        ("no_barrier", unordered_releases, undrained_signals),
        ("late_store", unordered_releases, undrained_signals),
        ("gpu_scope", narrow_scopes, None),
        ("endless_wait", unbounded_waits, unbounded_waits),
        ("narrow_store", narrow_stores, narrow_hip_stores),
    ],
)
def test_the_checks_see_broken_kernels(compiled, target: str, name: str, cuda_check, hip_check) -> None:
    kernel = compiled(target)[f"broken_{name}"]
    check = cuda_check if target in CUDA else hip_check
    if check is None:
        assert not kernel.count("buffer_wbl2 sc0 sc1")  # the write-back that undrained_signals looks for
    elif name in ("no_barrier", "late_store") and target in CUDA and not check(kernel):
        # from 3.9 on triton puts a barrier before each release itself
        assert kernel.count(r"^\s*bar\.sync") and releases_without_barriers(kernel)
    else:
        assert check(kernel)


def test_a_missing_fence_is_seen() -> None:
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1], [%rd1];"
    look, fence = "@%p1 ld.global.sys.acquire.b32 %r1, [%rd1];", "fence.proxy.async.global;"
    assert unfenced_loads(Kernel("", "\n".join([fence, look, load]), 0)) == [load]
    assert unfenced_loads(Kernel("", "\n".join([load, look, fence, load]), 0)) == []


# --- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CUDA[:1])
def test_tracing_that_is_off_leaves_no_look_at_the_chip(compiled, target: str) -> None:
    """With the flag there are: of a product and a push at least, each with two looks at the clock and at its place."""
    kernels = compiled(target)
    traced = {name: kernel for name, kernel in kernels.items() if name.startswith("traced_")}
    assert len(traced) >= 5
    for name, kernel in traced.items():
        bare = kernels[name.removeprefix("traced_")]
        assert kernel.count("%globaltimer;") >= bare.count("%globaltimer;") + 4
        assert kernel.count("%smid;") >= 2 and not bare.count("%smid;")


def test_a_traced_product_ends_when_it_is_complete(compiled) -> None:
    """Between the last tensor-core instruction and the look at the clock that ends its span stands the wait for it."""
    kernel = compiled("sm_90")["traced_all_reduce_tma"]
    waits = waits_at_the_end_of_a_product(kernel)
    assert waits and waits[-1].endswith(" 0;"), waits


@pytest.mark.parametrize("name", ["rma_recorded_put", "gluon_recorded_put"])
@pytest.mark.parametrize("target", CUDA + HIP)
def test_a_span_holds_the_work_alone(compiled, target: str, name: str) -> None:
    """The clock is read after all else that starts an event and before all else that ends it."""
    actual = looks_around_a_copy(compiled(target)[name])
    assert actual["places"] and actual["starts"] and actual["ends"] == 1
    if target in CUDA:  # LLVM moves AMD's blocks about
        assert actual["starts"] == 1 and not actual["ordering"]
