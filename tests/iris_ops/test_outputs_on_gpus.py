"""Outputs on the heap on GPUs, with streams, CUDA graphs and torch.compile, and more outputs than the heap can hold."""

from __future__ import annotations

import gc

import iris
from iris.memory.outputs import GraphOutputs
from iris_ops import torch_ops
from iris_ops.problem import ALL_REDUCE
import pytest
import torch

from tests.harness import WORLDS, run_ranks
from tests.iris_ops.test_graph import capture
from tests.iris_ops.test_outputs import DTYPE, PORTABLE, SIZE, Product, place, planned

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world_size", WORLDS, scope="session")]

HALF_A_SECOND = 1_000_000_000  # cycles


def used_elsewhere(ctx: iris.Iris) -> None:
    """Drop a tensor that another stream still reads, which `record_stream` reports to torch."""
    product, side = Product(ctx, ALL_REDUCE), torch.cuda.Stream(ctx.device)
    with planned(PORTABLE):
        out = product()
        assert ctx.heap.contains(out)
        expected = out.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(HALF_A_SECOND)
            seen = out.clone()
        out.record_stream(side)
        del out
        for step in range(1, 4):
            product.check(product(step), step)
        side.synchronize()
        assert torch.equal(seen, expected), "the memory was given to another output too early"


def test_a_tensor_that_another_stream_reads(world_size: int) -> None:
    run_ranks(world_size, used_elsewhere)


def in_turn(ctx: iris.Iris) -> None:
    """Calls in a side stream, as before a capture, and then in the user's: each finds room once the other is done."""
    product, side = Product(ctx, ALL_REDUCE), torch.cuda.Stream(ctx.device)
    with planned(PORTABLE):
        for stream in (side, torch.cuda.current_stream(), side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results = []
                for step in range(6):
                    out = product(step)
                    product.check(out, step)
                    results.append(ctx.heap.contains(out))
                    del out
            torch.cuda.current_stream().wait_stream(stream)
            assert results[-1], results


def test_calls_in_another_stream(world_size: int) -> None:
    run_ranks(world_size, in_turn)


def filled(ctx: iris.Iris) -> list[int | None]:
    """Return the addresses of a hundred outputs that stay alive, and of some later ones after these are dropped."""
    product, held, places = Product(ctx, ALL_REDUCE), [], []
    with planned(PORTABLE):
        for step in range(100):
            held.append(product(step))
            places.append(place(ctx, held[-1]))
        for step, out in enumerate(held):
            product.check(out, step)
        held.clear()
        for step in range(300):  # after so many misses torch is asked again
            product(step)
        places.append(place(ctx, product()))
    return places


def test_more_outputs_than_the_heap_has_room_for(world_size: int) -> None:
    for places in run_ranks(world_size, filled):
        assert places[0] is not None and places[99] is None and places[100] is not None, places
        on_heap = [each for each in places[:100] if each is not None]
        assert len(set(on_heap)) == len(on_heap), "two outputs at one place"


# --- graphs ----------------------------------------------------------------------------------------------------------


def captured(ctx: iris.Iris) -> None:
    """Two calls in a graph, the first's output gone when the second is captured; eager calls between replays."""
    product, storage = Product(ctx, ALL_REDUCE), GraphOutputs()
    A, B = product.inputs.A[ctx.cur_rank].clone(), product.inputs.B[ctx.cur_rank]
    bias = torch.zeros_like(product.inputs.bias[0])
    exact = product.exact - product.inputs.bias[0].double()

    def call(factor: float) -> torch.Tensor:
        return torch_ops.product(ALL_REDUCE, ctx, A * factor, B, bias, (SIZE, SIZE))

    with planned(PORTABLE):
        call(1)
        eager = [product()]
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with ctx.ops.outputs.keeping(storage), capture(graph):
            first = call(1)
            doubled = 2 * first
            at = first.data_ptr()
            del first
            out = call(3)
            assert ctx.heap.contains(out) and out.data_ptr() == at
        for replay in range(20):
            A.copy_(product.inputs.A[ctx.cur_rank] * 2.0 ** (replay % 3))
            graph.replay()
            eager.append(product(replay))
            for result, times in ((doubled, 2), (out, 3)):
                want = exact * times * 2.0 ** (replay % 3)
                error = (result.double() - want).norm() / want.norm()
                assert error < 0.01, (replay, times, float(error))
            if len(eager) > 2:
                eager.pop(1)
        product.check(eager[0])
        del graph, doubled, out, eager
        ctx.barrier()
    blocks = ctx.ops.outputs._graphs
    assert blocks is not None and blocks.cut(1) != 0, "the graph's block is still its own"
    del storage
    gc.collect()
    assert blocks.cut(1) == 0


def test_outputs_in_a_graph(world_size: int) -> None:
    run_ranks(world_size, captured)


def plain(ctx: iris.Iris) -> None:
    """A capture that keeps nothing has its output where the graph has all its memory."""
    product = Product(ctx, ALL_REDUCE)
    with planned(PORTABLE):
        product()
        graph = torch.cuda.CUDAGraph()
        A, B, bias = (each[ctx.cur_rank] for each in (product.inputs.A, product.inputs.B, product.inputs.bias))
        with capture(graph):
            out = torch_ops.product(ALL_REDUCE, ctx, A, B, bias, (SIZE, SIZE))
        assert not ctx.heap.contains(out)
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            product.check(out)
            product.check(product())


def test_a_graph_that_nobody_keeps_outputs_for(world_size: int) -> None:
    run_ranks(world_size, plain)


def in_trees(ctx: iris.Iris) -> None:
    product = Product(ctx, ALL_REDUCE)
    A, B, bias = (each[ctx.cur_rank] for each in (product.inputs.A, product.inputs.B, product.inputs.bias))

    def call(A: torch.Tensor) -> torch.Tensor:
        return torch_ops.product(ALL_REDUCE, ctx, A, B, bias, (SIZE, SIZE))

    with planned(PORTABLE):
        eager = product()
        torch.compiler.reset()
        compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(A).clone(), eager)
            again = product()
            assert torch.equal(again, eager) and again.dtype == DTYPE


def test_graphs_of_torch_compile(world_size: int) -> None:
    run_ranks(world_size, in_trees)
