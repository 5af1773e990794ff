"""bfloat16 and fp8 in a user's kernel, compared with torch: each operation rounds once, to nearest even, as on GPUs."""

from __future__ import annotations

import iris  # before triton: it may set up the interpreter
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, run_ranks

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")

SIZE = 1024
BF16 = torch.bfloat16
FP8 = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}


def once(x: torch.Tensor) -> torch.Tensor:
    """float64 `x`, rounded once to bfloat16: to float32 and again would round some of a product and sum twice."""
    bits = x.float().view(torch.int32)
    exact = x.float().double() == x
    odd = torch.where(exact, bits, (bits - (x.float().double().abs() > x.abs()).int()) | 1)
    return odd.view(torch.float32).to(BF16)


# --- element by element -----------------------------------------------------------------------------------------------


@triton.jit
def elementwise_kernel(x_ptr, y_ptr, z_ptr, out, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y, z = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)
    if OP == "add":
        r = x + y
    elif OP == "mul":
        r = x * y
    elif OP == "div":
        r = x / y
    elif OP == "scaled":
        r = x * 1.7
    elif OP == "fma":
        r = tl.fma(x, y, z)
    elif OP == "two":
        r = x * y + z
    elif OP == "clamp":
        r = tl.clamp(x, -0.5, 0.75)
    elif OP == "where":
        r = tl.where(x > y, x, 2.0)
    elif OP == "equal":
        r = (x == x) & (x >= y) & (x != 0.0)
    elif OP == "exp":
        r = tl.exp(tl.minimum(x.to(tl.float32), 8.0))
    elif OP == "whole":
        r = x.to(tl.int32)
    elif OP == "full":
        r = tl.full((SIZE,), 1.7, tl.bfloat16) + tl.zeros((SIZE,), tl.bfloat16)
    elif OP == "half":
        r = x.to(tl.float16).to(tl.bfloat16)
    elif OP == "masked":
        r = tl.load(x_ptr + i, mask=i < SIZE // 3, other=1.7)
    elif OP == "towards zero":
        r = (x.to(tl.float32) * y.to(tl.float32)).to(tl.bfloat16, fp_downcast_rounding="rtz")
    tl.store(out + i, r)


WANTED = {
    "add": lambda x, y, z: x + y,
    "mul": lambda x, y, z: x * y,
    "div": lambda x, y, z: x / y,
    "scaled": lambda x, y, z: x * float(torch.tensor(1.7).to(BF16)),
    "fma": lambda x, y, z: x * y + z,
    "two": lambda x, y, z: once(x * y).double() + z,
    "clamp": lambda x, y, z: x.clamp(-0.5, 0.75),
    "where": lambda x, y, z: torch.where(x > y, x, 2.0),
    "equal": lambda x, y, z: ((x >= y) & (x != 0)).double(),
    "exp": lambda x, y, z: x.float().clamp(max=8).exp().double(),
    "whole": lambda x, y, z: x.trunc(),
    "full": lambda x, y, z: torch.full((SIZE,), 1.7).double(),
    "half": lambda x, y, z: x.half().double(),
    "masked": lambda x, y, z: torch.where(torch.arange(SIZE) < SIZE // 3, x, 1.7),
    "towards zero": lambda x, y, z: ((x * y).float().view(torch.int32) & -65536).view(torch.float32).double(),
}


@pytest.mark.parametrize("op", WANTED)
def test_each_operation_rounds_once(op: str) -> None:
    torch.manual_seed(0)
    x, y, z = (torch.randn(SIZE).mul(10.0 ** torch.randint(-2, 3, (SIZE,))).to(BF16) for _ in range(3))
    z[::2] = (-x * y)[::2]  # a sum of which little is left
    out = torch.full((SIZE,), torch.nan, dtype=BF16)
    elementwise_kernel[(1,)](x, y, z, out, op, SIZE)
    expected = once(WANTED[op](x.double(), y.double(), z.double()))
    if op == "exp":  # numpy's and torch's may be one float32 apart
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(out, expected), (out[out != expected], expected[out != expected])


@triton.jit
def cast_kernel(x, out, TO: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(TO))


def test_every_bfloat16_is_the_same_number_as_a_float32_and_back() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    wide, back = torch.full((1 << 16,), torch.nan), torch.full((1 << 16,), torch.nan, dtype=BF16)
    cast_kernel[(1,)](every, wide, tl.float32, 1 << 16)
    assert torch.equal(wide.view(torch.int32), every.float().view(torch.int32))
    cast_kernel[(1,)](wide, back, tl.bfloat16, 1 << 16)
    numbers = ~every.isnan()
    assert (
        torch.equal(back.view(torch.int16)[numbers], every.view(torch.int16)[numbers]) and back[~numbers].isnan().all()
    )


def test_a_float32_is_rounded_to_the_nearest_even_bfloat16() -> None:
    x = torch.randn(1 << 16) * 10.0 ** torch.arange(-40, 24).repeat_interleave(1024)
    x.view(torch.int32)[::4] &= -65536
    x.view(torch.int32)[::4] |= 0x8000  # halfway between two
    x[:6] = torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, -0.0])
    out = torch.full((1 << 16,), torch.nan, dtype=BF16)
    cast_kernel[(1,)](x, out, tl.bfloat16, 1 << 16)
    assert torch.equal(out[5:].view(torch.int16), x[5:].to(BF16).view(torch.int16)) and out[4].isnan()
    assert out[:4].tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf]


# --- several elements -------------------------------------------------------------------------------------------------


@triton.jit
def _sum_and_half(a, b):
    return a + b * 0.5


@triton.jit
def several_kernel(x_ptr, out, OP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    x = tl.load(x_ptr + rows[:, None] * COLS + cols[None, :])
    at = rows[:, None] * COLS + cols[None, :]
    if OP == "sum":
        tl.store(out + rows, tl.sum(x, axis=1))
    elif OP == "max":
        tl.store(out + rows, tl.max(x, axis=1))
    elif OP == "argmax":
        tl.store(out + rows, tl.argmax(x, axis=1).to(tl.bfloat16))
    elif OP == "cumsum":
        tl.store(out + at, tl.cumsum(x, axis=1))
    elif OP == "scan":
        tl.store(out + at, tl.associative_scan(x, 1, _sum_and_half))
    elif OP == "fold":
        tl.store(out + rows, tl.reduce(x, 1, _sum_and_half))
    elif OP == "dot":
        tl.store(out + rows[:, None] * ROWS + rows[None, :], tl.dot(x, x.T))
    elif OP == "broadcast":
        tl.store(out + at, x * tl.max(x, axis=1)[:, None].to(tl.bfloat16))


def _folded(x: torch.Tensor) -> torch.Tensor:
    """Step by step, each rounded: [rows, cols], what has been added up so far."""
    steps = [x[:, 0]]
    for column in x[:, 1:].unbind(1):
        steps.append(steps[-1] + column * 0.5)
    return torch.stack(steps, 1)


OF_SEVERAL = {
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "scan": lambda x: _folded(x.to(BF16)),
    "fold": lambda x: _folded(x.to(BF16))[:, -1],
    "dot": lambda x: x @ x.T,
    "broadcast": lambda x: x * x.amax(1, keepdim=True),
}


@pytest.mark.parametrize("op", OF_SEVERAL)
def test_operations_on_several_elements(op: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(16, 32).to(BF16)
    expected = OF_SEVERAL[op](x.double()).to(BF16)
    out = torch.full((expected.numel(),), torch.nan, dtype=BF16)
    several_kernel[(1,)](x, out, op, 16, 32)
    if op in ("sum", "cumsum", "dot"):  # sums in float32, in an order of the interpreter's
        torch.testing.assert_close(out.view(expected.shape), expected, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(out.view(expected.shape), expected)


# --- fp8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, torch.float64], ids=str)
def test_casts_to_fp8_and_back(kind: torch.dtype, dtype: torch.dtype) -> None:
    """Beyond the largest number it is that one, as on GPUs."""
    largest = torch.finfo(kind).max
    x = (torch.randn(SIZE) * 10.0 ** torch.randint(-4, 4, (SIZE,))).to(dtype)
    x[:4] = torch.tensor([1e30, -1e30, torch.nan, 0.0])
    bits = torch.zeros(SIZE, dtype=torch.uint8)
    out = torch.full((SIZE,), torch.nan, dtype=dtype)
    cast_kernel[(1,)](x, bits.view(kind), FP8[kind], SIZE)
    expected = x.float().clamp(-largest, largest).to(kind)
    assert torch.equal(bits, expected.view(torch.uint8))
    cast_kernel[(1,)](bits.view(kind), out, {BF16: tl.bfloat16}.get(dtype) or getattr(tl, str(dtype)[6:]), SIZE)
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


@triton.jit
def fp8_kernel(x_ptr, y_ptr, out, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    if OP == "dot":
        r = tl.dot(x, y)
    elif OP == "moved":
        r = tl.where(i[:, None] > 3, x, y).T.to(tl.float32)
    elif OP == "zeros":
        r = tl.zeros((SIZE, SIZE), x_ptr.dtype.element_ty).to(tl.float32)
    elif OP == "add":
        r = x + y
    elif OP == "less":
        r = x < y
    elif OP == "scaled":
        r = x * 2.0
    elif OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "sum":
        r = tl.sum(x, axis=0)[None, :] + tl.zeros((SIZE, SIZE), tl.float32)
    elif OP == "towards zero":
        r = y.to(tl.float32).to(tl.float8e4nv, fp_downcast_rounding="rtz").to(tl.float32)
    tl.store(out + at, r)


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_can_be_moved_and_multiplied(kind: torch.dtype) -> None:
    x, y = (torch.randn(16, 16).to(kind) for _ in range(2))
    out = torch.full((16, 16), torch.nan)
    fp8_kernel[(1,)](x, y, out, "dot", 16)
    torch.testing.assert_close(out, (x.double() @ y.double()).float(), rtol=1e-5, atol=1e-5)
    fp8_kernel[(1,)](x, y, out, "moved", 16)
    assert torch.equal(out, torch.where(torch.arange(16)[:, None] > 3, x.float(), y.float()).T)
    fp8_kernel[(1,)](x, y, out, "zeros", 16)
    assert not out.any()


@pytest.mark.parametrize(
    "op, named",
    [
        ("add", "add"),
        ("less", "less"),
        ("scaled", "multiply"),
        ("neg", "subtract|negative"),
        ("abs", "absolute"),
        ("sum", "reduction"),
        ("towards zero", "cast"),
    ],
)
def test_arithmetic_in_fp8_is_refused_by_name(op: str, named: str) -> None:
    x = torch.ones(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(iris.IrisError, match=f"({named}).*fp8e4nv.*float32") as caught:
        fp8_kernel[(1,)](x, x, torch.zeros(16, 16), op, 16)
    assert caught.value.__cause__ is None


# --- between ranks ----------------------------------------------------------------------------------------------------


@triton.jit
def peers_kernel(x, out, rank, bases, SIZE: tl.constexpr, WORLD: tl.constexpr):
    """What all ranks have, added up and halved."""
    i = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.bfloat16)
    for peer in range(WORLD):
        total += iris.load(x + i, rank, peer, bases)
    tl.store(out + i, total * 0.5)


def _sums(ctx) -> None:
    torch.manual_seed(2)
    everyone = torch.randn(ctx.num_ranks, SIZE).to(BF16)
    x = ctx.empty(SIZE, dtype=BF16).copy_(everyone[ctx.cur_rank])
    out = ctx.zeros(SIZE, dtype=BF16)
    ctx.barrier()
    peers_kernel[(1,)](x, out, ctx.cur_rank, ctx.get_heap_bases(), SIZE, ctx.num_ranks)
    assert torch.equal(out, sum(everyone.unbind()) * 0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_of_what_peers_have(world_size: int) -> None:
    run_ranks(world_size, _sums)
