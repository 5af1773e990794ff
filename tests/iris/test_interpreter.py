"""What the interpreter does once is what it would do again: types and shapes. `test_narrow_floats.py` has numbers."""

from __future__ import annotations

from iris.device.interpreter import launching
from iris.device.interpreter.fast import Fast
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from tests import fresh
from tests.harness import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")


@pytest.fixture(autouse=True, params=[False, True], ids=["as Triton runs them", "as the library's"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of tests run like a user's, and like the library's."""
    if request.param:
        actual = Fast(frozenset({"tests"}))
        monkeypatch.setattr(launching, "fast", lambda: actual)


def test_types_that_were_made_before_are_those_asked_for() -> None:
    kinds = [tl.int32, tl.bfloat16, core.pointer_type(tl.float32), core.pointer_type(tl.float32, const=True)]
    for _ in range(2):
        for kind in kinds:
            for shape in ([16], [2, 8], [core.constexpr(16)], [8, 2]):
                sizes = [getattr(size, "value", size) for size in shape]
                result = core.block_type(kind, shape)
                assert result.element_ty is kind and list(result.shape) == sizes and result.numel == 16
                for other in kinds:
                    assert result.with_element_ty(other) == core.block_type(other, shape)
                    assert (result == core.block_type(other, shape)) == (kind is other)
                value = core.tensor(None, result)
                assert [size.value for size in value.shape] == sizes and value.numel.value == 16
                assert value.type == result and value.dtype == kind
            alone = core.tensor(1, kind)
            assert alone.handle == 1 and alone.dtype == kind and not list(alone.shape) and alone.numel.value == 1
    with pytest.raises(TypeError):
        core.block_type(tl.int32, [])
    with pytest.raises(ValueError):
        core.block_type(tl.int32, [3])


@triton.jit
def operators_kernel(x_ptr, y_ptr, out, n, SIZE: tl.constexpr):
    """Apply each operator to two blocks, a block and a scalar, and a block and a number: out [row, SIZE]."""
    i = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    row = 0
    for other in tl.static_range(3):
        if other == 1:
            y = tl.load(y_ptr + n)
        elif other == 2:
            y = 3
        for r in (x + y, x - y, x * y, y + x, y - x, y * x, (x < y).to(x.dtype), (x >= y).to(x.dtype), x * (x != y)):
            tl.store(out + row * SIZE + i, r)
            row += 1
        if not x_ptr.dtype.element_ty.is_floating():
            for r in (x // y, x % y, x & y, x | y, x ^ y, ((x > y) & (y > 0)).to(x.dtype), x.to(tl.int64) + y):
                tl.store(out + row * SIZE + i, r)
                row += 1


def _operators(x: torch.Tensor, y: torch.Tensor, n: int):
    for other in (y, y[n], torch.tensor(3, dtype=y.dtype)):
        yield from (x + other, x - other, x * other, x + other, other - x, x * other)
        yield from ((x < other).to(x.dtype), (x >= other).to(x.dtype), x * (x != other))
        if not x.is_floating_point():
            yield from (x.div(other, rounding_mode="trunc"), x.fmod(other), x & other, x | other, x ^ other)
            yield from (((x > other) & (other > 0)).to(x.dtype).expand(x.shape), (x.long() + other).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_operators_whose_types_are_known(dtype: torch.dtype) -> None:
    """From the second time on an operator takes the types of its result from the first."""
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = (torch.randint(-1000, 1000, (64,)).to(dtype) for _ in range(2))
        y[y == 0] = 7
        expected = torch.stack([*_operators(x, y, 5)])
        out = torch.zeros_like(expected)
        operators_kernel[(1,)](x, y, out, 5, 64)
        assert torch.equal(out, expected)


@triton.jit
def shapes_kernel(x, out, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [4, ROWS, COLS]"""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    at = r[:, None] * COLS + c[None, :]
    inside = (r < rows)[:, None] & (c >= 2)[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0)
    tl.store(out + at, tile)
    tl.store(out + ROWS * COLS + at, tile + tl.load(x + r * COLS)[:, None])
    tl.store((out + 2 * ROWS * COLS) + at, tile.T.to(tl.float32).T * tl.load(x + c)[None, :])
    tl.store(out + 3 * ROWS * COLS + (at + 1 - 1), at)


def test_shapes_and_addresses_that_are_known() -> None:
    for _ in range(3):
        x, out = torch.randn(8, 16), torch.full((4, 8, 16), torch.nan)
        shapes_kernel[(1,)](x, out, 5, 8, 16)
        tile = x.clone()
        tile[5:], tile[:, :2] = 0, 0
        at = torch.arange(128.0).view(8, 16)
        assert torch.equal(out, torch.stack([tile, tile + x[:, :1], tile * x[:1], at]))


@triton.jit
def described_kernel(x_ptr, out_ptr, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, cols], [cols, 1], [ROWS, COLS])
    out = tl.make_tensor_descriptor(out_ptr, [rows, cols], [cols, 1], [ROWS, COLS])
    out.store([row, col], x.load([row, col]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("row, col", [(0, 0), (2, 16), (5, 48), (-3, -16), (9, 0), (0, 64)])
def test_blocks_that_a_descriptor_has_inside(dtype: torch.dtype, row: int, col: int) -> None:
    x, out = torch.randn(8, 64).mul(50).to(dtype), torch.zeros(8, 64).to(dtype)
    described_kernel[(1,)](x, out, row, col, 8, 64, 4, 32)
    expected = torch.zeros(8, 64)
    rows, cols = slice(max(row, 0), max(row + 4, 0)), slice(max(col, 0), max(col + 32, 0))
    expected[rows, cols] = x.float()[rows, cols]
    assert torch.equal(out.float(), expected)


def test_nothing_is_mended_where_the_interpreter_is_off() -> None:
    """The fixes of Triton's interpreter are not even imported, because kernels for GPUs never run in it."""
    code = "import iris, sys; assert not any(m.startswith('iris.device.interpreter.') for m in sys.modules)"
    assert fresh.run(code, TRITON_INTERPRET="0").returncode == 0


@triton.jit
def lacking_kernel(x, out):
    tl.store(out, tl.load(x))


def test_a_launch_takes_arguments_by_name_and_says_which_is_missing() -> None:
    x, out = torch.ones(1), torch.zeros(1)
    lacking_kernel[(1,)](out=out, x=x, num_warps=4)
    assert out == 1
    with pytest.raises(TypeError, match="out"):
        lacking_kernel[(1,)](x)
    with pytest.raises(TypeError):
        lacking_kernel[(1,)](x, out, out)
    with pytest.raises(TypeError, match="multiple values"):
        lacking_kernel[(1,)](x, out, x=x)
