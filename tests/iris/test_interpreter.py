"""What the interpreter does once is what it would do again: types, shapes, and bfloat16 beside torch's."""

from __future__ import annotations

import iris  # noqa: F401  (before triton: it may set up the interpreter)
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from tests.harness import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")


@triton.jit
def widen_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


@triton.jit
def narrow_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


def test_every_bfloat16_is_the_same_number_as_a_float32_and_back() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide, back = torch.full((1 << 16,), torch.nan), torch.full((1 << 16,), torch.nan, dtype=torch.bfloat16)
    widen_kernel[(1,)](every, wide, 1 << 16)
    assert torch.equal(wide.view(torch.int32), every.float().view(torch.int32))
    narrow_kernel[(1,)](wide, back, 1 << 16)
    assert torch.equal(back.view(torch.int16), every.view(torch.int16))


def test_a_float32_loses_its_lower_half() -> None:
    """`arch.round_to` rounds before."""
    x = torch.randn(1024) * 10.0 ** torch.arange(-8, 8).repeat(64)
    out = torch.full((1024,), torch.nan, dtype=torch.bfloat16)
    narrow_kernel[(1,)](x, out, 1024)
    assert torch.equal(out.view(torch.int16).int() & 0xFFFF, (x.view(torch.int32) >> 16) & 0xFFFF)


def test_types_that_were_made_before_are_those_asked_for() -> None:
    kinds = [tl.int32, tl.bfloat16, core.pointer_type(tl.float32), core.pointer_type(tl.float32, const=True)]
    for _ in range(2):
        for kind in kinds:
            for shape in ([16], [2, 8], [core.constexpr(16)], [8, 2]):
                sizes = [getattr(size, "value", size) for size in shape]
                made = core.block_type(kind, shape)
                assert made.element_ty is kind and list(made.shape) == sizes and made.numel == 16
                for other in kinds:
                    assert made.with_element_ty(other) == core.block_type(other, shape)
                    assert (made == core.block_type(other, shape)) == (kind is other)
                value = core.tensor(None, made)
                assert [size.value for size in value.shape] == sizes and value.numel.value == 16
                assert value.type == made and value.dtype == kind
            alone = core.tensor(1, kind)
            assert alone.handle == 1 and alone.dtype == kind and not list(alone.shape) and alone.numel.value == 1
    with pytest.raises(TypeError):
        core.block_type(tl.int32, [])
    with pytest.raises(ValueError):
        core.block_type(tl.int32, [3])
