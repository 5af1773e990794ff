"""The split linears against one whole nn.Linear, on every number of ranks, with sizes that the ranks do not divide."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from iris.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from layers import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from layers.shard import Shard, chunk
from layers.sharded import device_of
import pytest
from safetensors import safe_open
from safetensors.torch import save_file
import torch
from torch import nn

from tests.checks import assert_close_to_reference
from tests.harness import WORLDS, both, run_ranks

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS, scope="session")]


def whole_linear(n_in: int, n_out: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    """Make a linear layer that is the same on every rank and in the reference."""
    torch.manual_seed(seed)
    linear = nn.Linear(n_in, n_out, bias=bias)
    if bias:
        nn.init.normal_(linear.bias)
    return linear.requires_grad_(False)


def whole_input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def check(out: torch.Tensor, linear: nn.Linear, x: torch.Tensor) -> None:
    weight, bias = linear.weight, torch.zeros(()) if linear.bias is None else linear.bias
    reference = x.double() @ weight.double().t() + bias.double()
    magnitude = x.abs() @ weight.abs().t() + bias.abs()
    assert_close_to_reference(out, reference, linear(x), float(magnitude.max()) if x.numel() else 0.0)


# --- each layer is the whole linear ----------------------------------------------------------------------------------


def column_body(ctx, n_out: int, bias: bool, gather: bool, shape: tuple[int, ...]) -> torch.Tensor:
    layer = ColumnParallelLinear.from_linear(whole_linear(17, n_out, bias), gather, ctx=ctx)
    return layer(whole_input(*shape).to(ctx.device))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_out, shape", [(130, (5, 17)), (2, (2, 3, 17)), (8, (17,))])
def test_column_results_are_chunks(world_size: int, n_out: int, shape: tuple[int, ...], bias: bool) -> None:
    results = run_ranks(world_size, column_body, n_out, bias, False, shape)
    for rank, result in enumerate(results):
        start, stop = chunk(n_out, world_size, rank)
        assert result.shape == (*shape[:-1], stop - start)
    check(torch.cat(results, -1), whole_linear(17, n_out, bias), whole_input(*shape))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_out, shape", [(130, (5, 17)), (2, (2, 3, 17)), (257, (0, 17)), (1, (17,)), (1, (2, 17))])
def test_column_gathered_is_whole_and_the_same_bits_everywhere(
    world_size: int, n_out: int, shape: tuple[int, ...], bias: bool
) -> None:
    results = run_ranks(world_size, column_body, n_out, bias, True, shape)
    assert all(torch.equal(result, results[0]) for result in results)
    check(results[0], whole_linear(17, n_out, bias), whole_input(*shape))


def row_body(ctx, n_in: int, bias: bool, parallel: bool, reduce: bool, shape: tuple[int, ...]) -> torch.Tensor:
    layer = RowParallelLinear.from_linear(whole_linear(n_in, 33, bias), parallel, reduce, ctx=ctx)
    x = whole_input(*shape).to(ctx.device)
    if parallel:
        x = x[..., slice(*chunk(n_in, ctx.num_ranks, ctx.cur_rank))]
    return layer(input=x)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 130), (2, 3, 2)])
def test_row_is_whole_and_the_same_bits_everywhere(
    world_size: int, shape: tuple[int, ...], bias: bool, parallel: bool
) -> None:
    results = run_ranks(world_size, row_body, shape[-1], bias, parallel, True, shape)
    assert all(torch.equal(result, results[0]) for result in results)
    check(results[0], whole_linear(shape[-1], 33, bias), whole_input(*shape))


def test_row_without_reduction_sums_to_the_whole_with_one_bias(world_size: int) -> None:
    results = run_ranks(world_size, row_body, 130, True, True, False, (5, 130))
    check(sum(results[1:], results[0]), whole_linear(130, 33), whole_input(5, 130))


# --- fused outputs ---------------------------------------------------------------------------------------------------


def merged_body(ctx, gather: bool, fused: bool) -> torch.Tensor:
    gate, up = whole_linear(17, 130, seed=0), whole_linear(17, 6, seed=1)
    if fused:
        layer = MergedColumnParallelLinear.from_linear(stack(gate, up), [130, 6], gather, ctx=ctx)
    else:
        layer = MergedColumnParallelLinear.from_linear([gate, up], gather_output=gather, ctx=ctx)
    return layer(whole_input(5, 17).to(ctx.device))


def stack(*linears: nn.Linear) -> nn.Linear:
    fused = nn.Linear(linears[0].in_features, sum(each.out_features for each in linears))
    fused.weight.data = torch.cat([each.weight for each in linears])
    fused.bias.data = torch.cat([each.bias for each in linears])
    return fused.requires_grad_(False)


@pytest.mark.parametrize("fused", [True, False])
def test_merged_splits_each_output(world_size: int, fused: bool) -> None:
    results = run_ranks(world_size, merged_body, False, fused)
    sizes = [[len(range(*chunk(n, world_size, rank))) for n in (130, 6)] for rank in range(world_size)]
    halves = [result.split(size, -1) for result, size in zip(results, sizes, strict=True)]
    for i, size in enumerate((130, 6)):
        check(torch.cat([half[i] for half in halves], -1), whole_linear(17, size, seed=i), whole_input(5, 17))


@pytest.mark.parametrize("fused", [True, False])
def test_merged_gathered_keeps_the_order(world_size: int, fused: bool) -> None:
    results = run_ranks(world_size, merged_body, True, fused)
    assert all(torch.equal(result, results[0]) for result in results)
    check(results[0], stack(whole_linear(17, 130, seed=0), whole_linear(17, 6, seed=1)), whole_input(5, 17))


def qkv_body(ctx, num_heads: int, num_kv_heads: int, fused: bool) -> tuple:
    linears = [whole_linear(17, heads * 4, seed=i) for i, heads in enumerate((num_heads, num_kv_heads, num_kv_heads))]
    source = stack(*linears) if fused else linears
    layer = QKVParallelLinear.from_linear(source, 4, num_heads, num_kv_heads, ctx=ctx)
    return layer.heads, *layer.split(layer(whole_input(5, 17).to(ctx.device)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 2), (9, 3), (4, 1), (6, 6), (2, 2)])
def test_qkv_keeps_heads_whole(world_size: int, num_heads: int, num_kv_heads: int, fused: bool) -> None:
    x = whole_input(5, 17)
    whole = [whole_linear(17, n * 4, seed=i) for i, n in enumerate((num_heads, num_kv_heads, num_kv_heads))]
    for heads, q, k, v in run_ranks(world_size, qkv_body, num_heads, num_kv_heads, fused):
        for local, (start, stop), linear in zip((q, k, v), (heads.q, heads.kv, heads.kv), whole, strict=True):
            part = nn.Linear(17, 4 * (stop - start))
            part.weight.data, part.bias.data = linear.weight[4 * start : 4 * stop], linear.bias[4 * start : 4 * stop]
            check(local, part.requires_grad_(False), x)


# --- sequence parallel -----------------------------------------------------------------------------------------------


def sequence_body(ctx, tokens: int, batched: bool) -> tuple[torch.Tensor, torch.Tensor]:
    up, down = whole_linear(17, 130, seed=0), whole_linear(130, 17, seed=1)
    column = ColumnParallelLinear.from_linear(up, sequence_parallel=True, ctx=ctx)
    row = RowParallelLinear.from_linear(down, sequence_parallel=True, ctx=ctx)
    x = whole_input(tokens, 17).to(ctx.device)[slice(*chunk(tokens, ctx.num_ranks, ctx.cur_rank))]
    if batched:
        x = x.unsqueeze(0)
    hidden = column(x, tokens=tokens)
    return hidden, row(torch.relu(hidden))


@pytest.mark.parametrize("tokens, batched", [(12, False), (13, True), (2, False), (1, True)])
def test_sequence_parallel_pair_is_the_whole_mlp(world_size: int, tokens: int, batched: bool) -> None:
    results = run_ranks(world_size, sequence_body, tokens, batched)
    x, up, down = whole_input(tokens, 17), whole_linear(17, 130, seed=0), whole_linear(130, 17, seed=1)
    hidden = torch.cat([result[0] for result in results], -1)
    assert hidden.shape == ((1, tokens, 130) if batched else (tokens, 130))
    check(hidden, up, x[None] if batched else x)
    for rank, (_, out) in enumerate(results):
        assert out.shape[-2] == len(range(*chunk(tokens, world_size, rank)))
    check(torch.cat([out for _, out in results], -2), down, torch.relu(hidden))


def test_sequence_parallel_needs_the_number_of_tokens_only_if_uneven(world_size: int) -> None:
    run_ranks(world_size, even_body)


def even_body(ctx) -> None:
    column = ColumnParallelLinear.from_linear(whole_linear(17, 5), sequence_parallel=True, ctx=ctx)
    assert column(torch.zeros(2, 17, device=ctx.device)).shape[0] == 2 * ctx.num_ranks
    with pytest.raises(ShapeError, match="tokens"):
        column(torch.zeros(2, 17, device=ctx.device), tokens=5 * ctx.num_ranks)
    for tokens in ("a", 4.0, True, -1):
        with pytest.raises(ArgumentError, match=f"tokens is {tokens!r}: expected None or an integer from 0 on"):
            column(torch.zeros(2, 17, device=ctx.device), tokens=tokens)
    local = ColumnParallelLinear.from_linear(whole_linear(17, 4 * ctx.num_ranks), ctx=ctx)
    with pytest.raises(ArgumentError, match="tokens is 13: expected None, because the layer is not sequence_parallel"):
        local(torch.zeros(2, 17, device=ctx.device), tokens=13)
    with pytest.raises(ArgumentError, match="gated is for layers that do not gather"):
        column.gated(torch.zeros(2, 17, device=ctx.device))
    with pytest.raises(ShapeError, match="flatten"):
        column(torch.zeros(2, 3, 17, device=ctx.device))


# --- parameters ------------------------------------------------------------------------------------------------------


def state_body(ctx) -> None:
    for make in (
        lambda: ColumnParallelLinear(17, 130, ctx=ctx),
        lambda: MergedColumnParallelLinear(17, [130, 6], ctx=ctx),
        lambda: QKVParallelLinear(17, 4, 9, 3, ctx=ctx),
        lambda: RowParallelLinear(130, 17, ctx=ctx),
    ):
        first, second = make(), make()
        assert set(first.state_dict()) == {"weight", "bias"}
        assert first.weight.device == ctx.device and not first.weight.requires_grad
        assert not torch.equal(first.weight, second.weight)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
        half = first.to(torch.bfloat16)
        assert half.state_dict()["weight"].dtype == torch.bfloat16


def test_state_dict_round_trip(world_size: int) -> None:
    run_ranks(world_size, state_body)


def slices_body(ctx, path: str) -> None:
    linear = whole_linear(130, 17)
    with safe_open(path, framework="pt") as file:
        for kind in (ColumnParallelLinear, RowParallelLinear):
            empty = kind(130, 17, ctx=ctx, device="meta")
            for name in ("weight", "bias"):
                empty.load_shard(name, file.get_slice(name))
            expected = kind.from_linear(linear, ctx=ctx)
            assert torch.equal(empty.weight, expected.weight) and torch.equal(empty.bias, expected.bias)
            assert empty.weight.device == ctx.device
        with pytest.raises(ShapeError, match=r"weight has shape \[17, 130\]: expected \[130, 17\]"):
            ColumnParallelLinear(17, 130, ctx=ctx).load_shard("weight", file.get_slice("weight"))
        with pytest.raises(ArgumentError, match="expected one of"):
            ColumnParallelLinear(130, 17, ctx=ctx).load_shard("scale", file.get_slice("weight"))


def test_load_shard_from_safetensors(world_size: int, tmp_path: Path) -> None:
    save_file(whole_linear(130, 17).state_dict(), tmp_path / "linear.safetensors")
    run_ranks(world_size, slices_body, str(tmp_path / "linear.safetensors"))


# --- bad input -------------------------------------------------------------------------------------------------------


def bad_body(ctx) -> torch.Tensor:
    for arguments, match in (
        ((0, 4), "in_features is 0"),
        ((4, -1), "out_features is -1"),
        ((4, 2.5), "out_features is 2.5"),
        ((4, 4, True, True, True), "gather_output and sequence_parallel"),
    ):
        with pytest.raises(ArgumentError, match=match):
            ColumnParallelLinear(*arguments, ctx=ctx)
    for layer, sizes in (
        (ColumnParallelLinear, (8, 8)),
        (RowParallelLinear, (8, 8)),
        (MergedColumnParallelLinear, (8, [8])),
        (QKVParallelLinear, (8, 4, 2, 2)),
    ):
        with pytest.raises(ArgumentError, match="ctx is a NoneType: expected the context"):
            layer(*sizes, ctx=None)
    columns, rows = ("bias", "gather_output", "sequence_parallel"), ("bias", "input_is_parallel", "reduce_results",
                                                                     "sequence_parallel")  # fmt: skip
    for layer, sizes, names in (
        (ColumnParallelLinear, (8, 8), columns),
        (MergedColumnParallelLinear, (8, [8]), columns),
        (QKVParallelLinear, (8, 4, 2, 2), columns),
        (RowParallelLinear, (8, 8), rows),
    ):
        for name in names:
            with pytest.raises(ArgumentError, match=f"{name} is 'no': expected a bool"):
                layer(*sizes, ctx=ctx, **{name: "no"})
    half, padded = Shard(4, ((0, 4),)), Shard(4, (), pad=1)
    for layer in (ColumnParallelLinear, RowParallelLinear):
        for parts in (5, (), half, (half, 4), "ab", (padded, half)):
            with pytest.raises(ArgumentError, match="parts is .*: expected None or a tuple of Shards"):
                layer(8, 8, ctx=ctx, parts=parts)
            with pytest.raises(ArgumentError, match="parts is .*: expected None or a tuple of Shards"):
                layer.from_linear(whole_linear(8, 8), ctx=ctx, parts=parts)
    for options, error, match in (
        ({"dtype": torch.int32}, DtypeError, "dtype is torch.int32: expected None or a floating-point"),
        ({"dtype": "bf16"}, DtypeError, "dtype is 'bf16'"),
        ({"device": "nowhere"}, DeviceError, "device is 'nowhere': expected None"),
        ({"device": "mps"}, DeviceError, "device is 'mps': expected the context's"),
        ({"device": f"{ctx.device.type}:63"}, DeviceError, f"device is '{ctx.device.type}:63': expected the context's"),
        ({"device": 2.5}, DeviceError, "device is 2.5: expected None"),
    ):
        for layer, sizes in (
            (ColumnParallelLinear, (8, 8)),
            (RowParallelLinear, (8, 8)),
            (MergedColumnParallelLinear, (8, [8])),
            (QKVParallelLinear, (8, 4, 2, 2)),
        ):
            with pytest.raises(error, match=match):
                layer(*sizes, ctx=ctx, **options)
            for device in (None, ctx.device, str(ctx.device), ctx.device.type):
                assert layer(*sizes, ctx=ctx, device=device).weight.device == ctx.device
            assert layer(*sizes, ctx=ctx, device="meta").weight.is_meta
    third: Any = SimpleNamespace(device=torch.device("cuda:3"))
    for device in (None, "cuda", torch.device("cuda"), "cuda:3"):  # a bare type is the context's, not the current one
        assert device_of(None, device, third) == third.device
    for layer, sizes in (
        (ColumnParallelLinear, ()),
        (RowParallelLinear, ()),
        (MergedColumnParallelLinear, ()),
        (QKVParallelLinear, (4, 2, 2)),
    ):
        for given, name in ((None, "NoneType"), (torch.nn.Conv1d(1, 1, 1), "Conv1d")):
            with pytest.raises(ArgumentError, match=f"linear is a {name}: expected a torch.nn.Linear"):
                layer.from_linear(given, *sizes, ctx=ctx)
    with pytest.raises(ArgumentError, match="linear is an empty list"):
        MergedColumnParallelLinear.from_linear([], ctx=ctx)
    with pytest.raises(ShapeError, match=r"y has shape \(2, 5\): expected \[\.\.\., "):
        QKVParallelLinear(8, 4, 2, 2, ctx=ctx).split(torch.zeros(2, 5, device=ctx.device))
    with pytest.raises(ArgumentError, match="reduce_results"):
        RowParallelLinear(4, 4, reduce_results=False, sequence_parallel=True, ctx=ctx)
    with pytest.raises(ArgumentError, match=r"out_features\[1\] is 0"):
        MergedColumnParallelLinear(4, [4, 0], ctx=ctx)
    with pytest.raises(ArgumentError, match="expected a list"):
        MergedColumnParallelLinear(4, 8, ctx=ctx)
    with pytest.raises(ShapeError, match="num_heads is 3"):
        QKVParallelLinear(4, 4, 3, 2, ctx=ctx)
    with pytest.raises(ArgumentError, match="list of 3"):
        MergedColumnParallelLinear.from_linear([whole_linear(4, 4)] * 3, [4, 8], ctx=ctx)
    layer = RowParallelLinear.from_linear(whole_linear(8, 4), input_is_parallel=False, ctx=ctx)
    for x, error, match in (
        ([1.0], ArgumentError, "input is a list"),
        (torch.zeros(3, 7), ShapeError, r"input has shape \(3, 7\): expected \[\.\.\., 8\]"),
        (torch.zeros(()), ShapeError, "input has shape"),
        (torch.zeros(3, 8, dtype=torch.float64), DtypeError, "input is torch.float64: expected torch.float32"),
    ):
        with pytest.raises(error, match=match):
            layer(x.to(ctx.device) if isinstance(x, torch.Tensor) else x)
    return layer(whole_input(3, 8).to(ctx.device))


def test_bad_input_is_refused_and_the_context_goes_on(world_size: int) -> None:
    for result in run_ranks(world_size, bad_body):
        check(result, whole_linear(8, 4), whole_input(3, 8))
