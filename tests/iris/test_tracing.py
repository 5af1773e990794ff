"""Events recorded inside kernels: each field, the bound of the buffer, clocks of several ranks, the exported file."""

import json
import time
from types import SimpleNamespace

import iris
from iris import tracing
from iris.device import arch, sync
from iris.device import tracing as device_tracing
from iris.errors import ArgumentError
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

TICK_NS = 10**9 // iris.platform.ticks(1)
OWN = 64


@triton.jit
def put_kernel(ctx_ptr, x, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TRACING: tl.constexpr):
    """Record a put within a span, and a span that never ends."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE, TRACING)
    block, half = tl.program_id(0), tl.program_id(1)
    offsets = block * BLOCK + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    places, mask = x + offsets, offsets < n
    peer = (ctx.rank + 1) % WORLD_SIZE
    outer = ctx.tracing.record_event_start(64, peer, places, block, half)
    inner = ctx.tracing.record_event_start(device_tracing.PUT, peer, places, block, half, mask=mask)
    ctx.put(places, places, peer, mask=mask)
    ctx.tracing.record_event_end(inner)
    ctx.tracing.record_event_end(outer)
    ctx.tracing.record_event_start(65, peer, x, nbytes=7)


def put(ctx, x, tracing=True):
    put_kernel[(3, 2)](ctx.get_device_context(), x, x.numel(), ctx.num_ranks, 64, tracing)
    ctx.barrier()


def check_fields(ctx):
    x = ctx.ones(3 * 64 - 40, dtype=torch.float16)  # the last program has nothing, the one before it 24 elements
    put(ctx, x)  # not enabled yet: recorded nowhere
    ctx.tracing.enable(100)
    assert len(ctx.tracing.events()) == 0
    before = time.monotonic_ns()
    put(ctx, x)
    after = time.monotonic_ns()
    events = ctx.tracing.events()
    assert len(events) == 18 and ctx.tracing.dropped == 0
    assert np.array_equal(ctx._context_tensor.cpu()[tracing.TRACING_WORDS], [ctx.tracing._buffer.data_ptr(), 100])
    for block in range(3):
        for half in range(2):
            mine = {int(e["event"]): e for e in events if e["program"] == block + 3 * half}
            assert set(mine) == {OWN, OWN + 1, device_tracing.PUT.value}
            outer, inner, open_end = mine[OWN], mine[device_tracing.PUT.value], mine[OWN + 1]
            start = x.data_ptr() + 2 * (64 * block + 32 * half)
            inside = max(0, min(32, x.numel() - 64 * block - 32 * half))
            assert (outer["bytes"], inner["bytes"], open_end["bytes"]) == (64, 2 * inside, 7)
            assert outer["address"] == start and (inner["address"] == start or inside == 0)
            assert (inner["pid_m"], inner["pid_n"]) == (outer["pid_m"], outer["pid_n"]) == (block, half)
            assert 0 < outer["begin"] <= inner["begin"] <= inner["end"] <= outer["end"] <= open_end["begin"]
            assert open_end["end"] == 0 and (open_end["pid_m"], open_end["pid_n"]) == (0, 0)
    assert (events["target_rank"] == (ctx.cur_rank + 1) % ctx.num_ranks).all()
    assert ((0 <= events["multiprocessor"]) & (events["multiprocessor"] < ctx.get_cu_count())).all()
    if not ON_GPU:
        assert (before <= events["begin"]).all() and (events["end"] <= after).all()
    put(ctx, x, tracing=False)
    assert len(ctx.tracing.events()) == 18
    ctx.tracing.reset()
    assert len(ctx.tracing.events()) == 0
    put(ctx, x)
    assert len(ctx.tracing.events()) == 18
    ctx.tracing.disable()
    put(ctx, x)
    assert len(ctx.tracing.events()) == 18


@pytest.mark.parametrize("world_size", WORLDS)
def test_events_have_every_field(world_size):
    run_ranks(world_size, check_fields)


def check_bound(ctx):
    x = ctx.ones(192)
    ctx.tracing.enable(50)
    buffer, poison = ctx.tracing._buffer, -(2**60)
    for room in (5, 17, 18):
        ctx.tracing._announce(buffer.data_ptr(), room)  # what follows in the buffer is then not for events
        buffer[1:] = poison
        buffer[0] = 0
        put(ctx, x)
        used = 8 * (1 + room)
        assert (buffer[used:] == poison).all() and (buffer[1:8] == poison).all()
        assert buffer[0] == 18
        assert (buffer[8:used].view(room, 8)[:, 0] > 0).all()
    ctx.tracing.enable(5)
    put(ctx, x)
    assert ctx.tracing.dropped == 13 and len(ctx.tracing.events()) == 5
    ctx.tracing.reset()
    assert ctx.tracing.dropped == 0


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_events_beyond_the_buffer_are_counted_and_stored_nowhere(world_size):
    run_ranks(world_size, check_bound)


@triton.jit
def relay_kernel(ctx_ptr, flags, count, WORLD_SIZE: tl.constexpr):
    """A message around all ranks: each receives from the one before and then sends; rank 0 begins."""
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE, True)
    n = tl.load(count) + 1
    tl.store(count, n)
    before, after = (ctx.rank + WORLD_SIZE - 1) % WORLD_SIZE, (ctx.rank + 1) % WORLD_SIZE
    if ctx.rank == 0:
        sync.signal(ctx, flags, n, after)
    received = ctx.tracing.record_event_start(64, before, flags)
    sync.wait(ctx, flags, n, before)
    ctx.tracing.record_event_end(received)
    if ctx.rank != 0:
        sync.signal(ctx, flags, n, after)


def check_alignment(ctx, folder, shift_s):
    """A message arrives after it was sent on the common clock, though rank r's clock is r * shift_s ahead."""
    folder = ctx.broadcast(folder)  # where each rank is a process of pytest, each has a folder of its own
    flags, count = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    ahead = ctx.cur_rank * shift_s * 10**9
    try:
        if not ON_GPU:  # in the interpreter kernels ask the host
            arch.time = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead, sleep=time.sleep)
        ctx.tracing.names[64] = "receive"
        ctx.tracing.enable()
        for _ in range(5):
            relay_kernel[(1,)](ctx.get_device_context(), flags, count, ctx.num_ranks)
        clocks = ctx.tracing._measure_clocks()
        aligned = ctx.tracing.aligned()
        merged = json.loads(ctx.tracing.export(f"{folder}/all.json", merge=True).read_text())
        own = json.loads(ctx.tracing.export(f"{folder}/one.json").read_text())
    finally:
        arch.time = time
    if not ON_GPU:
        for rank, clock in enumerate(clocks):
            assert abs(clock.ticks - rank * shift_s * 10**9) <= clock.error, clocks
    return aligned, merged, own, [clock.error * TICK_NS for clock in clocks]


@pytest.mark.parametrize("world_size, shift_s", [(2, 0), (3, 100), (4, -7)])
def test_ranks_are_aligned_by_the_measured_offset(world_size, shift_s, tmp_path):
    results = run_ranks(world_size, check_alignment, str(tmp_path), shift_s)
    signal, wait = device_tracing.SIGNAL.value, device_tracing.WAIT.value
    errors = results[0][3]
    sent = [events["begin"][events["event"] == signal] for events, *_ in results]
    received = [events["end"][events["event"] == OWN] for events, *_ in results]
    for rank in range(world_size):
        before = (rank - 1) % world_size
        assert len(sent[before]) == len(received[rank]) == 5
        assert (received[rank] >= sent[before] - errors[rank] - errors[before]).all()
        assert (received[rank] - sent[before] < 10e9).all()
        waits = results[rank][0][results[rank][0]["event"] == wait]
        assert set(waits["target_rank"]) <= {before}
    merged = results[0][1]
    assert all(other == merged for _, other, *_ in results)
    assert set(merged["otherData"]["events dropped"].values()) == {0}
    assert all(0 < step < 1e5 for step in merged["otherData"]["clock step us"].values())
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0 and max(event["ts"] for event in spans) < 20e6  # µs
    for rank, (events, _, own, _) in enumerate(results):
        mine = [event for event in spans if event["pid"] == rank]
        assert len(mine) == len(events) and {"receive", "signal"} <= {event["name"] for event in mine}
        assert [event["dur"] for event in mine] == [(e["end"] - e["begin"]) / 1e3 for e in events]
        assert all(event["pid"] == rank for event in own["traceEvents"])
        assert len([event for event in own["traceEvents"] if event["ph"] == "X"]) == len(mine)
        assert mine[0]["args"].keys() == {"program", "target_rank", "pid_m", "pid_n", "bytes", "address"}
        names = {event["args"]["name"] for event in own["traceEvents"] if event["name"] == "process_name"}
        assert [name.startswith(f"rank {rank}: ") for name in names] == [True]


def check_bad_arguments(ctx, folder):
    folder = ctx.broadcast(folder)
    for call in (ctx.tracing.reset, ctx.tracing.events, lambda: ctx.tracing.export(f"{folder}/x.json")):
        with pytest.raises(ArgumentError, match=r"call ctx.tracing.enable\(\) first"):
            call()
    for bad in (0, -1, 2**40, 1.5, "many", True):
        given = bad if ctx.cur_rank == ctx.num_ranks - 1 else 10  # wrong on one rank only: raises on all
        with pytest.raises(ArgumentError, match=f"max_events is {bad!r}; expected an integer from 1"):
            ctx.tracing.enable(given)
    assert not ctx.tracing.enabled
    ctx.tracing.enable(10)
    for merge in (False, True):
        with pytest.raises(ArgumentError, match=r"path is .*none/x.json', which cannot be written"):
            ctx.tracing.export(f"{folder}/none/x.json", merge)
        for bad in (7, None):
            given = bad if ctx.cur_rank == 0 else f"{folder}/x.json"
            with pytest.raises(ArgumentError, match=f"path is '{bad}', which cannot be written: .*a file name"):
                ctx.tracing.export(given, merge)
    with pytest.raises(ArgumentError, match="path is '.*', which cannot be written: .*empty name"):
        ctx.tracing.export("")
    assert json.loads(ctx.tracing.export(f"{folder}/x.json", merge=True).read_text())["traceEvents"]


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_bad_arguments_raise_on_every_rank(world_size, tmp_path):
    run_ranks(world_size, check_bad_arguments, str(tmp_path))


def test_clocks_that_drift_apart_are_interpolated():
    before, after = tracing.Offset(1000, 0, 10_000), tracing.Offset(3000, 0, 110_000)
    true = np.array([10_000, 60_000, 110_000])
    events = np.zeros(3, dtype=tracing.EVENT)
    events["begin"] = true + [1000, 2000, 3000]
    assert np.abs(tracing.align(events, before, after)["begin"] - true * TICK_NS).max() <= 50 * TICK_NS
    assert (tracing.align(events, before, after)["end"] == 0).all()
