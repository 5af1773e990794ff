"""Correct reductions and scans: types that numpy lacks, and two that Triton's interpreter does element by element."""

import numpy as np

from ...errors import DtypeError
from ...triton_private import OR, XOR, ReduceOps, ReduceScan
from . import floats

_AT_ONCE = {XOR: np.bitwise_xor, OR: np.bitwise_or}


def prepare() -> None:
    """Replace what Triton's reductions and scans call."""
    ReduceScan.to_tensor = _rounded(ReduceScan.to_tensor)
    ReduceScan.check_tensor = _refusing(ReduceScan.check_tensor)
    ReduceOps.generic_reduce = _known_at_once(ReduceOps.generic_reduce)


def _rounded(to_tensor):
    def converted(self, ret, dtype):
        tensor = to_tensor(self, ret, dtype)
        if dtype.scalar.name == "bf16":
            tensor.handle.data = floats.rounded(tensor.handle.data)
        return tensor

    return converted


def _refusing(check_tensor):
    def checked(self, operands):
        check_tensor(self, operands)
        for each in operands:
            if each.dtype.is_fp8():
                raise DtypeError(f"a reduction or scan of {each.dtype}: cast to tl.float32 first")

    return checked


def _known_at_once(generic_reduce):
    def reduced(self, operands):
        ufunc = _AT_ONCE.get(self.combine_fn)
        if ufunc is None or len(operands) > 1:
            return generic_reduce(self, operands)
        result = ufunc.reduce(operands[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(result, operands[0].dtype)

    return reduced
