"""Which products a program computes (`mma.py`, `scaled_mma.py`, `widened_mma.py`), by its arguments."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mma import Mma
from .scaled_mma import ScaledMma
from .widened_mma import Codes, WidenedMma


@gluon.jit
def mma_of(a, b, epilogue, tile: gl.constexpr, pipeline: gl.constexpr, N, K):
    """Return the products of a program by B in A's dtype, with scales of blocks along K, or as codes."""
    last = gl.cdiv(K, tile.BLOCK_K) - 1
    if pipeline.WIDENING is not None:
        codes = Codes(
            epilogue.block_scales, epilogue.block_stride, N, last, pipeline.GROUPS, pipeline.ZEROS, pipeline.WIDENING,
            pipeline.SCALES, pipeline.WORDS,
        )  # fmt: skip
        return WidenedMma(codes, tile, pipeline)
    elif epilogue.block_scales is not None:
        return ScaledMma(a, b, epilogue.block_scales, epilogue.block_stride, N, last, tile, pipeline)
    else:
        return Mma(a, b, tile, pipeline)
