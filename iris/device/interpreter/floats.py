"""Floating-point types that numpy lacks: bfloat16 as float32 numbers, and fp8 as its bits.

A bfloat16 is the upper half of a float32, so that a block of bfloat16 is kept as float32 numbers whose lower halves are
zero. An operation computes in float32 and rounds the result, as hardware does. For sums, products, quotients and square
roots both roundings together equal a single one: 24 bits are more than twice 8.
"""

import numpy as np
import torch

# Triton's names of fp8 types, with torch's type of the same bits. Torch has none like fp8e4b15.
_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_UPPER, _QUIET = np.uint32(0xFFFF0000), np.uint32(0x00400000)


def rounded(x: np.ndarray) -> np.ndarray:
    """Round float32 `x` to the nearest bfloat16, and halves to the even one. A NaN stays a NaN."""
    bits = x.view(np.uint32)
    even = (bits >> 16) & 1
    even += bits
    even += 0x7FFF
    even &= _UPPER
    lost = x != x
    if lost.any():
        even[lost] = (bits[lost] & _UPPER) | _QUIET
    return even.view(np.float32)


def truncated(x: np.ndarray) -> np.ndarray:
    """Round float32 `x` to a bfloat16 towards zero."""
    return np.where(x == x, (x.view(np.uint32) & _UPPER).view(np.float32), x)


def to_odd(x: np.ndarray) -> np.ndarray:
    """Round float64 `x` to float32 and set an inexact number's last bit: rounding again then is as rounding once."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = (near != x) & np.isfinite(near)
    return np.where(inexact, (bits - (np.abs(near) > np.abs(x))) | 1, bits).astype(np.uint32).view(np.float32)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """Return the bfloat16 numbers, as float32, whose 16 bits are given."""
    wide = bits.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def to_bits(x: np.ndarray) -> np.ndarray:
    """Return the 16 bits of each bfloat16 number, which `x` holds as float32."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def converts(name: str) -> bool:
    """Return whether torch has the fp8 type that Triton calls `name`, so that it can be converted."""
    return name in _FP8


def from_fp8(bits: np.ndarray, name: str) -> np.ndarray:
    """Convert bytes of an fp8 type to float32, which holds each exactly."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(_FP8[name]).float().numpy()[bits.view(np.uint8)]


def to_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """Round float32 `x` to the nearest number of an fp8 type, as bytes; larger ones become the largest, as on GPUs."""
    largest = torch.finfo(_FP8[name]).max
    near = torch.from_numpy(np.ascontiguousarray(x)).clamp(-largest, largest)
    return near.to(_FP8[name]).view(torch.uint8).numpy()
