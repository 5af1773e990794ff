"""Device functions of an `Activation` (`iris_ops/activation.py`), in fp32, for kernels of Triton and of Gluon."""

from iris.device import arch
from iris.device.function import device_function
import triton.language as tl


@device_function
def _applied(x, activation: tl.constexpr):
    """Apply the function that `Activation.kind` names to fp32 x."""
    if activation.kind == "silu":
        if activation.alpha == 1.0:
            return x / (1.0 + tl.exp(-x))
        else:
            return x / (1.0 + tl.exp(-activation.alpha * x))
    elif activation.kind == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation.kind == "gelu_tanh":  # x * (1 + tanh(u)) / 2 = x * sigmoid(2 u)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(activation.kind == "relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive


@device_function
def activated(x, activation: tl.constexpr):
    """Apply an `Activation` to the product by one matrix. NaN stays NaN."""
    if activation.limit is not None:
        x = tl.minimum(x, activation.limit, propagate_nan=tl.PropagateNan.ALL)
    return _applied(x, activation)


@device_function
def joined(first, second, activation: tl.constexpr):
    """Join the products by two matrices, the gate's first, by an `Activation`. NaN stays NaN."""
    if activation.limit is not None:
        second = tl.clamp(second, -activation.limit, activation.limit, propagate_nan=tl.PropagateNan.ALL)
    if activation.shift != 0.0:
        second += activation.shift
    return activated(first, activation) * second


@device_function
def joined_tiles(first, second, activation: tl.constexpr):
    """Join two rounded tiles; the result is rounded to their dtype."""
    return arch.round_to(joined(first.to(tl.float32), second.to(tl.float32), activation), first.dtype)
