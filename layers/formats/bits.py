"""Bits of stored tensors as numbers: nibbles, e2m1, e8m0, and which block an entry belongs to."""

from __future__ import annotations

from functools import cache

import torch

Span = tuple[int, int]  # [start, stop)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes 0 to 15 [..., 2 n] in the bytes `packed` [..., n], the low nibble first."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned codes of `bits` (4 or 8) in int32 `packed` [..., n], the lowest bits first."""
    raw = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # a view of one column needs the clone
    return raw if bits == 8 else nibbles(raw)


def e2m1(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of 4-bit floating-point codes: a sign, two bits of exponent, one of mantissa."""
    table = _e2m1_table(dtype, codes.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


@cache
def _e2m1_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([*_E2M1, *(-each for each in _E2M1)], dtype=dtype, device=device)


def scales(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales as numbers in `dtype`: floating-point ones unchanged, bytes and e8m0 as powers of two."""
    if stored.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return stored.to(dtype)
    exponent = stored.view(torch.uint8).to(torch.int32)
    number = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)  # 2^-127 is subnormal
    return number.masked_fill_(exponent == 255, torch.nan).to(dtype)


def blocks(span: Span, size: int) -> Span:
    """Return the blocks of `size` entries that `span` touches."""
    return span[0] // size, -(-span[1] // size)


def block_of(span: Span, size: int, device: torch.device, step: int = 1) -> torch.Tensor:
    """Return the block of `size` entries that each `step`th entry of `span` is in, from the first that it touches."""
    return torch.arange(*span, step, device=device) // size - span[0] // size


def grouped(per_group: torch.Tensor, columns: Span, size: int) -> torch.Tensor:
    """Return `per_group` [n, groups that `columns` touch] with a column for each of `columns`."""
    return per_group.index_select(1, block_of(columns, size, per_group.device))


def window(outer: torch.Tensor, columns: Span, size: int) -> torch.Tensor:
    """Return `columns` of `outer` [n, entries of all blocks of `size` that `columns` touch]."""
    return outer.narrow(1, columns[0] % size, columns[1] - columns[0])
