"""What the interpreter does once is what it would do again: types and shapes. `test_narrow_floats.py` has numbers."""

from __future__ import annotations

import iris  # noqa: F401  (before triton: it may set up the interpreter)
import pytest
import triton.language as tl
from triton.language import core

from tests.harness import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter")


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
