"""What kernels call to reach a peer's memory, to signal and to wait."""

from .fault import COLLECTIVES, EPOCHS, EXCHANGE, HEAPS, LOST, OPS, OUTPUTS, PTX, RMA, Fault

DEVICE = [
    Fault(
        "a minimum takes the maximum",
        "iris/device/rma.py",
        "return tl.atomic_min(remote, val",
        "return tl.atomic_max(remote, val",
        RMA,
    ),
    Fault(
        "a copy lands on the caller",
        "iris/device/rma.py",
        "remote = translate(dst_ptr, cur_rank, to_rank, heap_bases)",
        "remote = translate(dst_ptr, cur_rank, cur_rank, heap_bases)",
        RMA,
    ),
    Fault(
        "atomics reach this GPU only",
        "iris/device/rma.py",
        'return "sys" if scope is None else scope',
        'return "gpu" if scope is None else scope',
        (f"{PTX}of_gluon_is_wide_and_reaches_the_system[sm_90]",),
        kernels=r"^gluon_",
    ),
    Fault(
        "a signal releases nothing",
        "iris/device/sync.py",
        'rma.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="release", scope="sys")',
        'rma.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="relaxed", scope="sys")',
        (f"{PTX}has_signals_and_waits[sm_90]",),
        kernels=r"^(rma_put_and_signal|reduce_scatter_pointers|all_reduce_pointers|matmul_all_gather_pointers|all_gather_matmul_rows_pointers)$",
    ),
    Fault(
        "signals to all peers have no barrier before them",
        "iris/device/sync.py",
        "    tl.debug_barrier()  # a release covers one thread; the barrier brings every thread's stores before it\n"
        "    tl.atomic_xchg(flags",
        "    tl.atomic_xchg(flags",
        (f"{PTX}orders_signals[unordered_releases-sm_90]",),
        "Triton puts a barrier of its own before each release",
        kernels=r"^ccl_flags",
    ),
    Fault(
        "a wait does not acquire",
        "iris/device/sync.py",
        "    while waiting:\n"
        "        late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))\n"
        '        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")',
        "    while waiting:\n"
        "        late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))\n"
        '        seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")',
        (f"{PTX}acquires_at_every_look_at_a_flag[sm_90]",),
        kernels=r"^(ccl_spinlock|lamport_gather_first|reduce_scatter_pointers)$",
    ),
    Fault(
        "flags are compared without a wrap",
        "iris/device/sync.py",
        "return (seen - expected) >= 0",
        "return seen >= expected",
        EPOCHS,
    ),
    Fault(
        "an exact wait takes later epochs too",
        "iris/device/sync.py",
        "        return seen == expected\n",
        "        return (seen - expected) >= 0\n",
        EPOCHS,
    ),
    Fault(
        "an epoch may be 0",
        "iris/device/sync.py",
        "return epoch + 2 * (epoch == 0).to(tl.int32)",
        "return epoch",
        EPOCHS,
    ),
    Fault(
        "the count of tiles is not started again",
        "iris/device/sync.py",
        "        tl.store(sync + _NEXT_TILE, 0)\n",
        "",
        OPS,
    ),
    Fault(
        "a call that ends together does not wait for its peers",
        "iris/device/sync.py",
        "                _wait_all(ctx, completed, epoch, waiter, True, LANES)\n",
        "",
        (*EPOCHS, *OPS),
    ),
    Fault(
        "nobody waits until the peers have entered",
        "iris/device/sync.py",
        "ok = _wait_all(ctx, sync + _ENTERED, epoch, waiter, False, LANES)",
        "ok = True",
        (*EPOCHS, *OPS),
    ),
    Fault(
        "a collective does not advance its epoch",
        "iris/device/sync.py",
        '    if tl.atomic_add(sync + _FINISHED, 1, sem="relaxed", scope="gpu") == count - 1:\n'
        "        tl.store(sync + _FINISHED, 0)\n"
        "        tl.store(sync, epoch)\n",
        '    if tl.atomic_add(sync + _FINISHED, 1, sem="relaxed", scope="gpu") == count - 1:\n'
        "        tl.store(sync + _FINISHED, 0)\n",
        COLLECTIVES,
    ),
    Fault(
        "a barrier keeps one half of digests",
        "iris/device/sync.py",
        "said = digests + (counts & 1) * WORLD_SIZE",
        "said = digests + (counts & 0) * WORLD_SIZE",
        (*HEAPS, "tests/iris/test_litmus.py"),
    ),
    Fault(
        "a difference at the last peer is overwritten",
        "iris/device/places.py",
        "differing = tl.where(_told(places + peer * step) == place_of(ctx, out), differing, peer)",
        "differing = tl.where(_told(places + peer * step) == place_of(ctx, out), -1, peer)",
        HEAPS,
    ),
    Fault(
        "a peer's result is taken to lie where one's own does",
        "iris/device/places.py",
        "tl.load(ctx.heap_bases() + peer) + told - out.to(tl.int64)",
        "tl.load(ctx.heap_bases() + peer) + own - out.to(tl.int64)",
        OUTPUTS,
    ),
    Fault(
        "a rank tells the wrong peer where its result lies",
        "iris/device/places.py",
        "ctx.store(places + ctx.world_size - i, place_of(ctx, out)",
        "ctx.store(places + i, place_of(ctx, out)",
        OUTPUTS,
    ),
    Fault(
        "memory of a living output is given to another",
        "iris/memory/outputs.py",
        "for offset in [offset for offset, storage in self._live.items() if storage.expired()]:",
        "for offset in list(self._live):",
        OUTPUTS,
    ),
    Fault(
        "a wait does not look whether its peer lives",
        "iris/device/sync.py",
        "late = is_late(end, polls) | arch.any_gone(ctx.pid(peer))",
        "late = is_late(end, polls)",
        (*EPOCHS, *LOST),
    ),
    Fault(
        "a record names the peer as its group counts it",
        "iris/device/waits.py",
        "tl.cast(-mark, tl.int64) + _LEFT_MARK, _name(ctx, peer))",
        "tl.cast(-mark, tl.int64) + _LEFT_MARK, tl.cast(peer, tl.int64))",
        LOST,
    ),
    Fault(
        "nobody has more patience with who waits itself",
        "iris/device/waits.py",
        "return arch.clock() + patience * tl.load(ctx.ctx_ptr + 4)",
        "return arch.clock() + tl.load(ctx.ctx_ptr + 4)",
        (*LOST, *EPOCHS),
    ),
    Fault(
        "what is sent may be the sentinel",
        "iris/device/lamport.py",
        "return values ^ ((values == SENTINEL).to(values.dtype) << (bits - 1))",
        "return words",
        EXCHANGE,
    ),
    Fault(
        "values that were taken stay",
        "iris/device/lamport.py",
        "tl.store(first + i * step, SENTINEL, mask=_sent(ctx, mask, i, own))",
        "tl.store(first + i * step, SENTINEL, mask=_sent(ctx, mask, i, own) & (i > 0))",
        EXCHANGE,
    ),
    Fault(
        "values are summed in their own dtype",
        "iris/device/lamport.py",
        "    if dtype.is_floating():\n        return tl.float32\n",
        "    if dtype.is_floating():\n        return dtype\n",
        EXCHANGE,
    ),
    Fault(
        "the first source is blamed for all blocks",
        "iris/device/lamport.py",
        "tl.max(tl.where(values == SENTINEL, source + i, -1))",
        "tl.max(tl.where(values == SENTINEL, source, -1))",
        (*LOST, *EPOCHS),
    ),
    Fault(
        "taking a lock does not acquire",
        "iris/device/lock.py",
        'ctx.heap_bases(), sem="acquire", scope="sys") == 0',
        'ctx.heap_bases(), sem="relaxed", scope="sys") == 0',
        (f"{PTX}acquires_at_every_look_at_a_flag[sm_90]",),
        kernels=r"^(ccl_spinlock|lamport_gather_first|reduce_scatter_pointers)$",
    ),
]
