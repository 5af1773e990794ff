"""Words that say themselves whether they have arrived are never empty, and mean what was sealed."""

from __future__ import annotations

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris.device.exchange import seal
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def seal_kernel(x, out, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, seal(tl.load(x + i).to(tl.float32), DTYPE))


@pytest.mark.skipif(ON_GPU, reason="needs no ranks")
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_sealed_words_are_not_empty(dtype: torch.dtype) -> None:
    """NaNs stay NaNs, those of all ones too, and all else, signs and infinities included, its own bits."""
    empty = torch.full((4,), -1, dtype=WORDS[dtype]).view(dtype)
    others = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), float("nan"), 7e4, -1e-3], dtype=dtype)
    x = torch.cat((empty, others, torch.randn(19, dtype=dtype)))
    out = torch.full((32,), -1, dtype=WORDS[dtype])
    seal_kernel[(1,)](x, out, 32, TYPES[dtype])
    assert (out != -1).all()
    sealed, numbers = out.view(dtype), ~x.isnan()
    assert sealed[~numbers].isnan().all() and torch.equal(out[numbers], x.view(WORDS[dtype])[numbers])
