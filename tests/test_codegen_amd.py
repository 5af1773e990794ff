"""AMD's assembly of every kernel: what no CPU run can show about ordering, and how wide its accesses are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.assembly import (
    EXCHANGES,
    HIP,
    OTHERS,
    TREES,
    WORLD_SIZE,
    Kernel,
    all_complaints,
    fused,
    hip_acquires,
    narrow_hip_stores,
    sound,
    unbounded_waits,
    undrained_signals,
)

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", HIP)
@pytest.mark.parametrize("check", [undrained_signals, unbounded_waits], ids=lambda f: f.__name__)
def test_amd_orders_signals(compiled, target: str, check: Callable[[Kernel], list[str]]) -> None:
    # of a traced kernel LLVM puts parts elsewhere, where a look at its lines does not follow
    read = [kernel for kernel in sound(compiled(target)) if not kernel.name.startswith("traced_")]
    assert not all_complaints(read, check)
    for kernel in fused(compiled(target)):
        assert kernel.count(r"global_atomic_swap .* sc1") >= WORLD_SIZE - 1, kernel.name
        assert hip_acquires(kernel) >= 2 * (WORLD_SIZE - 1), kernel.name


@pytest.mark.parametrize("target", HIP)
def test_amd_exchanges_lamport_values_past_its_caches(compiled, target: str) -> None:
    for name in EXCHANGES:
        kernel, others = compiled(target)[name], OTHERS.get(name, WORLD_SIZE - 1)
        assert kernel.count(r"global_store_dword\w* .*sc0 sc1") >= others, name
        assert kernel.count(r"global_load_dword\w* .*sc0 sc1") >= (3 if name in TREES else 2 * others), name


@pytest.mark.parametrize("target", HIP)
def test_amd_uses_matrix_cores_and_wide_stores(compiled, target: str) -> None:
    kernels = compiled(target)
    stores = [*fused(kernels), *(kernels[f"rma_{name}"] for name in ("store", "store_bytes", "put_and_signal"))]
    assert not all_complaints(stores, narrow_hip_stores)
    for kernel in fused(kernels):
        assert kernel.count(r"v_mfma_f32_\w*bf16"), kernel.name
    for kernel in stores:
        assert kernel.count(r"global_store_dwordx4"), kernel.name
    assert all(kernels[name].count(r"global_load_dwordx4") for name in ("rma_load", "rma_load_bytes", "rma_get"))


@pytest.mark.parametrize("target", HIP)
def test_amd_reaches_peers_by_whole_addresses(compiled, target: str) -> None:
    """Buffer instructions add 32 bits to where a tensor begins; a peer's heap is further away."""
    for kernel in compiled(target).values():
        assert not kernel.count(r"\bbuffer_(load|store|atomic)"), kernel.name


@pytest.mark.parametrize("target", HIP)
def test_amd_records_events(compiled, target: str) -> None:
    traced, bare = (compiled(target)[f"{prefix}all_reduce_pointers"] for prefix in ("traced_", ""))
    spans = 3  # a product, a push and a sum at least, each with two looks at the clock and its place on the chip
    assert traced.count("s_memrealtime") >= bare.count("s_memrealtime") + 2 * spans
    assert traced.count("HW_REG_XCC_ID") >= spans and not bare.count("HW_REG_XCC_ID")


@pytest.mark.parametrize("target", HIP)
def test_amd_has_room_for_what_plans_launch(compiled, target: str) -> None:
    """Waves of 64 threads, at most 16 of them; memory is looked at where that of all kernels is."""
    planned = [kernel for name, kernel in compiled(target).items() if name.startswith("planned_")]
    assert len(planned) == 5
    for kernel in planned:
        (threads,) = map(int, kernel.tally(r"\.max_flat_workgroup_size: (\d+)"))
        assert threads <= 1024 and kernel.shared, kernel.name


@pytest.mark.parametrize("target", HIP)
def test_amd_of_gluon_is_wide_and_reaches_the_system(compiled, target: str) -> None:
    kernels = compiled(target)
    copies, message, atomics = (kernels[f"gluon_{name}"] for name in ("copies", "put_and_signal", "atomics"))
    for kernel in (copies, message):
        assert kernel.count("global_store_dwordx4") and not narrow_hip_stores(kernel)
    assert copies.count("global_load_dwordx4") == copies.count("global_store_dwordx4") == 4
    assert message.count(r"global_atomic_swap .* sc1") == 1
    # at system scope LLVM makes loops around cmpswap of what PCIe does not offer: xor, and, or, min, max
    kinds = atomics.tally(r"global_atomic_(\w+) .*sc1")
    assert kinds == dict(add=1, cmpswap=6, swap=1)
    assert atomics.count("global_atomic_") == sum(kinds.values()) + 1  # the one that was asked for at gpu scope
