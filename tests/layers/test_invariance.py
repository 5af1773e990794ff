"""With `invariant="batch"`: layers, attention, norms and the engine give a row the same bits among any others."""

from __future__ import annotations

import copy
import random

import iris  # before triton: it may set up the interpreter
from iris_ops.kernels import rmsnorm_epilogue
from iris_ops.local import decode_attention, gated_matmul, matmul
from iris_ops.planning.epilogues import GATE
from iris_tp import verify
import layers
from layers.hf import whole_products
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, both, run_ranks
from tests.layers import models

pytestmark = both
DEVICE = "cuda" if UNDER_TORCHRUN and torch.cuda.is_available() else "cpu"
ROWS = (1, 2, 5, 17, 64, 130)


def different(layer, rows: torch.Tensor, tokens: int = 0) -> list[str]:
    """Where a row through `layer` has other bits than alone."""
    messages = []
    for M in ROWS:
        place = random.Random(M).randrange(M)  # the same on all ranks
        x = torch.full((M, rows.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
        x[place] = rows[0]
        found = layer(x)[place]
        alone = layer(rows[:1])[0]
        if found.view(torch.uint8).ne(alone.view(torch.uint8)).any():
            messages.append(f"{M} rows, place {place}: {int((found != alone).sum())} of {alone.numel()} differ")
    return messages


def linear_body(ctx: iris.Iris, dtype: torch.dtype, bias: bool) -> dict[str, list[str]]:
    ctx.invariant = "batch"
    torch.manual_seed(0)
    inner = torch.nn.Linear(96, 144, bias).to(dtype)
    outer = torch.nn.Linear(144, 96, bias).to(dtype)
    made = {
        "column": layers.ColumnParallelLinear.from_linear(inner, ctx=ctx),
        "gated": layers.ColumnParallelLinear.from_linear(inner, ctx=ctx).gated,
        "gathered": layers.ColumnParallelLinear.from_linear(inner, gather_output=True, ctx=ctx),
        "row": layers.RowParallelLinear.from_linear(outer, ctx=ctx),
        "row, partial": layers.RowParallelLinear.from_linear(outer, reduce_results=False, ctx=ctx),
    }
    found = {}
    for name, layer in made.items():
        held = getattr(layer, "__self__", layer)
        width = held.in_features if held.dim == 0 else held.weight.shape[1]
        found[name] = different(layer, torch.randn(1, width).to(ctx.device, dtype))
    return found


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float16 if ON_GPU else torch.float32, True), (torch.bfloat16, False)]
)
def test_layers_give_a_row_the_same_bits(world_size, dtype, bias):
    for found in run_ranks(world_size, linear_body, dtype, bias):
        assert not any(found.values()), found


def gated_body(ctx: iris.Iris, dtype: torch.dtype) -> list[str]:
    """List cases in which a gated product differs from its two halves, gated after a product, or runs as two."""
    ctx.invariant = "batch"
    torch.manual_seed(2)
    weight, bias = torch.randn(2 * 192, 320) / 16, torch.randn(2 * 192)
    B, bias = weight.to(ctx.device, dtype).t(), bias.to(ctx.device, dtype)
    messages = []
    for M in (*ROWS, 700):
        A = torch.randn(M, 320).to(ctx.device, dtype)
        found, behind, both = (A.new_full((M, width), float("nan")) for width in (192, 192, 384))
        matmul.multiply(ctx, found, A, B, bias, epilogue=GATE)
        matmul.multiply(ctx, both, A, B, bias)
        gated_matmul.gate(GATE, behind, both)
        if not found.view(torch.uint8).equal(behind.view(torch.uint8)):
            messages.append(f"{M} rows: {int((found != behind).sum())} numbers differ")
        gate, up = torch.addmm(bias.double(), A.double(), B.double()).chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
        if not (found - exact).abs().max() <= 0.03 * exact.abs().max():
            messages.append(f"{M} rows: wrong")
    return messages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_product_has_the_bits_of_its_halves(dtype):
    for messages in run_ranks(1, gated_body, dtype):
        assert not messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_attends_alike_in_any_batch(monkeypatch, dtype):
    monkeypatch.setattr(decode_attention.platform, "num_programs", lambda device: 100)
    heads, kv_heads, dim, filled = 6, 2, 128 if ON_GPU else 32, 300
    q, k, v = (
        torch.randn(1, *size, dim, dtype=dtype, device=DEVICE)
        for size in ((heads,), (kv_heads, filled), (kv_heads, filled))
    )
    results = []
    cases = (1, filled, 0), (1, 700, 0), (3, 700, 37), (5, 400, 100), (2, 1000, 640)
    for batch, length, padding in (*cases, *[(1, 5000, 40)] * ON_GPU):  # where programs that weigh have fewer columns
        place = random.randrange(batch)
        queries = torch.randn(batch, heads, dim, dtype=dtype, device=DEVICE)
        keys, values = (torch.randn(batch, kv_heads, length, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        mask = torch.rand(batch, length, device=DEVICE) < 0.5
        mask[:, -1], mask[place] = True, False
        seen = slice(padding, padding + filled)
        queries[place], keys[place, :, seen], values[place, :, seen], mask[place, seen] = q[0], k[0], v[0], True
        found = decode_attention.decode_attention(queries, keys, values, mask, 0.2, equal_splits=True)[place]
        results.append((found, decode_attention.decode_attention(queries, keys, values, mask, 0.2)[place]))
    first = results[0][0]
    for found, _ in results[1:]:
        assert found.view(torch.uint8).equal(first.view(torch.uint8))
    scores = torch.einsum("hd,hnd->hn", q[0].double(), k[0].double().repeat_interleave(3, 0)) * 0.2
    exact = torch.einsum("hn,hnd->hd", scores.softmax(-1), v[0].double().repeat_interleave(3, 0))
    assert (first - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * exact.abs().max()
    if dtype == torch.float32:  # padding moves the blocks of what promises nothing
        assert any(plain.ne(results[0][1]).any() for _, plain in results[1:])


def norm_body(ctx: iris.Iris) -> list[str]:
    ctx.invariant = "batch"
    random_rows = torch.Generator().manual_seed(3 + ctx.cur_rank)
    B, weight = (
        torch.randn(64, 192, generator=random_rows),
        torch.randn(192, generator=torch.Generator().manual_seed(1)),
    )
    x, h = torch.randn(1, 64, generator=random_rows), torch.randn(1, 192, generator=torch.Generator().manual_seed(2))
    first, messages = None, []
    for M in (1, 7, 40):
        A, residual = torch.full((M, 64), float("nan")), torch.full((M, 192), float("nan"))
        A[M // 2], residual[M // 2] = x[0], h[0]
        out, scaled, squares = torch.empty(M, 192), torch.empty(M, 192), torch.empty(3, M)
        ctx.ops.matmul_all_reduce_norm(out, scaled, squares, A, B, residual, weight)
        whole = rmsnorm_epilogue.second_half(scaled, squares, 1e-5)
        found = torch.cat([out[M // 2], scaled[M // 2], squares[:, M // 2], whole[M // 2]])
        first = found if first is None else first
        if not torch.equal(found, first):
            messages.append(f"{M} rows: {int((found != first).sum())} numbers differ")
    return messages


@pytest.mark.skipif(ON_GPU, reason="tensors of the host")
def test_a_norm_behind_an_all_reduce_has_the_same_bits():
    assert not any(run_ranks(2, norm_body))


def engine_body(ctx: iris.Iris, name: str, level: str | None) -> list:
    ctx.invariant = level
    model = models.build(name)
    layers.parallelize(model, ctx)
    return verify.batch(model, ctx, (3,), steps=2, length=9)


@pytest.mark.skipif(ON_GPU, reason="`iris-tp verify` is for GPUs, too")
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "kv2"),
        pytest.param(3, "sliding", marks=pytest.mark.slow),
        pytest.param(2, "offset_norm", marks=pytest.mark.slow),
    ],
)
def test_an_engine_gives_a_prompt_the_same_bits_in_any_batch(world_size, name):
    pytest.importorskip("transformers")
    for found in run_ranks(world_size, engine_body, name, "batch"):
        assert len(found) == 6 and not any(each.differing for each in found), verify.table(found)


def mixture_body(ctx: iris.Iris, name: str, compile: bool | str) -> tuple[list, set[tuple[int, ...]]]:
    """Return the findings of `verify`, and the shapes of weights that were multiplied row by row outside the ops."""
    ctx.invariant, shapes, linear = "batch", set(), matmul._linear

    def seen(ctx, x, weight, bias, scale):
        shapes.add(tuple(weight.shape))
        return linear(ctx, x, weight, bias, scale)

    model = models.build(name)
    router = next(tuple(p.shape) for key, p in model.named_parameters() if key.endswith("mlp.gate.weight"))
    layers.parallelize(model, ctx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "_linear", seen)
        return verify.batch(model, ctx, (3,), steps=2, length=9, compile=compile), {router} - shapes


@pytest.mark.skipif(ON_GPU, reason="`iris-tp verify` is for GPUs, too")
@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("mixtral", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mixtral", "eager"), ("qwen3_moe", False))),
    ],
)
def test_a_mixture_gives_a_prompt_the_same_bits_and_routes_it_row_by_row(name, compile):
    pytest.importorskip("transformers")
    for found, missing in run_ranks(2, mixture_body, name, compile):
        assert len(found) == 6 and not any(each.differing for each in found), verify.table(found)
        assert not missing, "the router's product was torch's"


def whole_body(ctx: iris.Iris) -> list[str]:
    """Run a replicated module with any number of rows; a copy keeps its own weights."""
    ctx.invariant = "batch"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(130, 33), torch.nn.Embedding(3, 33))
    assert whole_products.keep_rows_alike(model, ctx) == 1
    x, messages = torch.randn(70, 130), []
    expected = model[0](x)
    assert torch.allclose(expected, torch.nn.functional.linear(x, model[0].weight, model[0].bias), atol=1e-4)
    for M in range(1, 70):
        if not torch.equal(model[0](x[:M]), expected[:M]):
            messages.append(f"{M} rows")
    other = copy.deepcopy(model)
    other[0].weight.data.zero_()
    assert torch.equal(other[0](x), other[0].bias.expand(70, 33)) and torch.equal(model[0](x), expected)
    return messages


@pytest.mark.skipif(ON_GPU, reason="tensors of the host")
def test_a_linear_that_stays_whole_gives_a_row_the_same_bits():
    assert not any(run_ranks(1, whole_body))
