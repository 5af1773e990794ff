"""Check an op's tensors: each error names the argument, what it was and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iris import platform, transforms
from iris.aliases import PAGE
from iris.errors import ArgumentError, DtypeError, ShapeError
from iris.heap import check_memory, check_tensor, check_written
import torch

from .planning import weights
from .planning.needs import WeightFormat
from .problem import DTYPES, SCALED

if TYPE_CHECKING:
    from iris.rank import Rank

_MAX_SIZE = 2**31 - 1


def check_tensors(
    op: str,
    out: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Raise a typed error for a tensor of the wrong kind, dimension, dtype, device or size."""
    if scale is not None:
        _check_scale(op, B, scale, device)
    given: tuple[tuple[str, Any], ...] = (("A", A), ("B", B), ("bias", bias), ("out", out))
    for name, t in given:
        if t is None and name == "bias":
            continue
        check_kind(op, name, t, device)
        ndim = 1 if name == "bias" else 2
        if t.ndim != ndim:
            raise ShapeError(f"{op}: {name} has {t.ndim} dimensions {tuple(t.shape)}; expected {ndim}")
        if name == "B" and scale is not None:
            pass  # its dtype is its own, and checked
        elif t.dtype not in DTYPES:
            scales = f", or {weights.dtypes()} with a scale" if name == "B" and op in SCALED else ""
            raise DtypeError(f"{op}: {name} has dtype {t.dtype}; expected one of {', '.join(map(str, DTYPES))}{scales}")
        elif t.dtype != A.dtype:
            raise DtypeError(f"{op}: {name} has dtype {t.dtype} and A has {A.dtype}; expected the same")
        if any(size > _MAX_SIZE for size in t.shape):
            raise ShapeError(f"{op}: {name} is {tuple(t.shape)}; expected sizes below 2**31")
    check_written(op, "out", out)


def _check_scale(op: str, B: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
    for name, t in (("B", B), ("scale", scale)):
        check_kind(op, name, t, device)
    stored_formats(op, B)
    if B.ndim == 2:
        scaled_format(op, B, scale)
    if not scale.is_contiguous():
        raise ArgumentError(f"{op}: scale has strides {scale.stride()}; expected a contiguous tensor")


def stored_formats(op: str, B: torch.Tensor) -> list[WeightFormat]:
    """Return the formats that have elements of B's dtype. Raises `DtypeError` if there are none."""
    stored = [each for each in weights.FORMATS if each.dtype == B.dtype]
    if not stored:
        kinds = weights.dtypes()
        raise DtypeError(f"{op}: B has dtype {B.dtype} and there is a scale; expected {kinds}, or no scale")
    return stored


def scaled_format(op: str, B: torch.Tensor, scale: torch.Tensor) -> WeightFormat:
    """Return the format of B [..., K, N] whose scales are `scale` [..., N] or [..., N, groups].

    Raises a typed error for a scale that fits no format of B's elements.
    """
    *experts, elements, columns = B.shape
    scales = [(each, *each.scale_of(columns, elements)) for each in stored_formats(op, B)]
    fitting = [(each, dtypes) for each, shape, dtypes in scales if (*experts, *shape) == tuple(scale.shape)]
    if not fitting:
        shapes = {(*experts, *shape): each.scale_text for each, shape, _ in scales}
        listed = " or ".join(f"{shape}, {text}" for shape, text in shapes.items())
        raise ShapeError(f"{op}: scale is {tuple(scale.shape)}; expected {listed}")
    for each, dtypes in fitting:  # several only for a B without rows
        if scale.dtype in dtypes:
            return each
    dtypes = dict.fromkeys(str(dtype) for _, dtypes in fitting for dtype in dtypes)
    raise DtypeError(f"{op}: scale has dtype {scale.dtype}; expected {' or '.join(dtypes)}")


def check_kind(op: str, name: str, t: torch.Tensor, device: torch.device) -> None:
    """Raise a typed error for anything but a tensor on `device` with its elements in memory and no gradient."""
    check_tensor(op, name, t, device)
    if t.is_neg():
        raise ArgumentError(f"{op}: {name} is a negated view; expected a strided tensor with its elements in memory")
    check_gradient(op, name, t)


def check_places(
    op: str, names: Sequence[str], begins: Sequence[int], spans: Sequence[int], written: Sequence[str]
) -> None:
    """Raise `ArgumentError` for a tensor without memory, and where a written one shares bytes with another.

    `begins`: addresses; `spans`: bytes of each tensor.
    """
    check_memory(op, names, begins, spans)
    places = {name: (at, at + size) for name, at, size in zip(names, begins, spans, strict=True) if size}
    for name in written:
        begin, end = places.pop(name, (0, 0))
        for other, (first, last) in places.items():
            if begin < last and first < end:
                raise ArgumentError(f"{op}: {name} overlaps {other} in memory; expected separate tensors")


def check_gradient(op: str, name: str, t: torch.Tensor) -> None:
    """Raise `ArgumentError` for a tensor through which autograd, or a transform of torch.func, differentiates."""
    transforms.check_plain(op, name, t)
    if t.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{op}: {name} requires grad, and this op has no backward; call it under torch.no_grad()")


def check_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise `ArgumentError` where one of `tensors` requires a gradient."""
    for name, t in tensors.items():
        if t is not None:
            check_gradient(op, name, t)


def warn_of_overflow(rank: Rank, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> None:
    """Log a warning if `out` has inf or nan in fp16 and this rank's A and B have none. Waits for the device."""
    if out.dtype == torch.float16 and not platform.is_capturing(out.device):
        finite = [bool(t.float().isfinite().all()) for t in (out, A, B)]
        if finite == [False, True, True]:
            rank.log.warning(
                f"{op}: out holds inf or nan though A and B do not. A rank's partial sum may exceed 65504, the largest "
                f"number of torch.float16, where the sum over ranks does not; use torch.bfloat16 or torch.float32."
            )


def check_bias(op: str, bias: torch.Tensor | None, B: torch.Tensor) -> None:
    if bias is not None and bias.shape[0] != B.shape[1]:
        raise ShapeError(
            f"{op}: bias has {bias.shape[0]} elements; expected {B.shape[1]}, the columns of B. A bias of one element "
            f"a row is added after the op: out += bias[:, None] ({PAGE})"
        )


def check_depth(op: str, A: torch.Tensor, k_per_rank: Sequence[int] | None, rank: int) -> None:
    """Raise `ShapeError` where a rank's A has other columns than `k_per_rank` gives it."""
    if k_per_rank and k_per_rank[rank] != A.shape[1]:
        raise ShapeError(
            f"{op}: A is {tuple(A.shape)} on rank {rank}, whose k_per_rank is {k_per_rank}; expected"
            f" {k_per_rank[rank]} columns"
        )
