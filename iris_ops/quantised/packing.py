"""Store a weight [N, K] in one of the formats that kernels read: codes and scales to two tensors, and back.

    format      codes                   `weight`              `scale`
    fp8         e4m3                    e4m3 [N, K]           float32 [N]
    fp8_block   e4m3                    e4m3 [N, Kp]          float32 [N, slots]
    int4        0 to 15, value + 8      int32 [N, Kp / 8]     bfloat16, float16 or float32 [N, slots]; float32 [N]
    mxfp4       0 to 15, bits of e2m1   uint8 [N, Kp / 2]     uint8 [N, slots], the exponent + 127
    nvfp4       0 to 15, bits of e2m1   uint8 [N, Kp / 2]     float32 [N, slots], both factors multiplied
    int8        0 to 255, value + 128   int8 [N, Kp]          as int4
    int4_zeros  as int4                 int32 [N, Kp / 8]     bfloat16, float16 or float32 [N, slots, 2]
    int8_zeros  as int8                 int8 [N, Kp]          as int4_zeros

Kp is K, rounded up to whole lines of 128. A scale belongs to one row and `group` entries along K. `slots` is a row's
number of scales, rounded up to those of four lines: then rows begin at 16 bytes, as the hardware that copies blocks
needs it. Padding is zeros in both tensors. A scale with a zero point is a pair, (scale, zero): it scales value - zero.

Dim 0 is N in both tensors, so a loader fills rows of a merged weight by `narrow(0, before, size)`. A shard along N may
begin at any row. A shard along K is packed from its own codes and scales. So it must begin where a group begins:
integers, mxfp4 and nvfp4 at multiples of their group. A shard that begins or ends inside a group or a block takes
smaller groups, which repeat its scale: of at least 32 entries in 8 bits, and of 16 in 4 bits. Nothing stores a shard
whose cut is no multiple of these.

The order inside a line is what `widening.py` reads with the fewest instructions. Bytes of fp8 and of fp8_block in
groups of 128 lie in K's order. Otherwise a line is cut into 4 products (8 bits: 32 entries each) or 8 (4 bits: 16
entries each). A product's entries share a scale, and entry j of a product lies in word j, or beside the one in word
j ^ 1. So registers hold whole products, and a scale belongs to a product's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
import math
from typing import ClassVar

from iris.errors import ArgumentError, DtypeError, ShapeError
import torch

LINE = 128  # entries along K that are multiplied together
_LINES = 4  # whose scales fill whole vectors of 16 bytes
LARGEST = 448.0  # in e4m3
_E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
Stored = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


@dataclass(frozen=True)
class Packing:
    """How the weights of one format are stored. This class is `fp8`, with a scale for each row."""

    name: str = "fp8"
    dtype: torch.dtype = torch.float8_e4m3fn
    """Of the stored weight."""
    per_element: int = 1
    """Entries in an element of the stored weight."""
    groups: tuple[int | None, ...] = (None,)
    """How many entries along K may share a scale. None: all of a row."""
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """Of scales of groups below 128, the default first. A line's scales fill words of four bytes at least."""
    zeros: bool = False
    """Whether each scale has a zero point."""

    def padded(self, K: int, group: int | None) -> int:
        """Return how many entries a stored row has room for."""
        return K if group is None else -(-K // LINE) * LINE

    @property
    def zero_code(self) -> int:
        """Return the code of 0."""
        return 0

    def by_lines(self, group: int | None) -> bool:
        """Return whether an element has entries of a whole line, or lies elsewhere in it than its entry."""
        return False

    def stored(
        self, N: int, K: int, group: int | None = None, scale_dtype: torch.dtype | None = None
    ) -> tuple[Stored, Stored]:
        """Return (shape, dtype) of the stored weight and of its scale, to allocate them."""
        self._check(K, group)
        weight = (N, self.padded(K, group) // self.per_element), self.dtype
        if group is None:
            return weight, ((N,), torch.float32)
        return weight, ((N, slots(K, group), *self._pair), self._scale_dtype(scale_dtype, group))

    def pack(
        self, codes: torch.Tensor, scales: torch.Tensor, group: int | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return (weight, scale) as kernels read them.

        codes: [N, K], e4m3 or uint8, from 0 to 15 in four bits. scales: float32 [N, ceil(K / group)], or [N] where
        `group` is None; with zero points [N, ceil(K / group), 2].
        Raises `ArgumentError` where a scale is no number of `scale_dtype`.
        """
        N, K = codes.shape
        self._check(K, group)
        expected = (N,) if group is None else (N, -(-K // group), *self._pair)
        if tuple(scales.shape) != expected:
            raise ShapeError(f"scales are {tuple(scales.shape)}; expected {expected} for codes {(N, K)} in {self.name}")
        weight = self._arranged(self._filled(codes, self.padded(K, group)), group)
        if group is None:
            return weight, scales.float().contiguous()
        (_, _), (shape, dtype) = self.stored(N, K, group, scale_dtype)
        scale = torch.zeros(shape, dtype=dtype, device=scales.device)
        scale[:, : scales.shape[1]] = self._stored_scales(scales, scale.dtype)
        return weight, scale

    def unpack(
        self, weight: torch.Tensor, scale: torch.Tensor, K: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the numbers [N, K] that `weight` and `scale` represent, computed in float32, or float64 for that."""
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        group = self.group_of(weight, scale)
        numbers = self._numbers(self._in_order(weight, group)[:, :K]).to(precision)
        if group is None:
            return (numbers * scale[:, None]).to(dtype)
        by_group = self._scale_numbers(scale).to(precision)[:, : -(-K // group)].repeat_interleave(group, 1)[:, :K]
        if self.zeros:
            return ((numbers - by_group[..., 1]) * by_group[..., 0]).to(dtype)
        return (numbers * by_group).to(dtype)

    def codes(self, weight: torch.Tensor, scale: torch.Tensor, K: int) -> torch.Tensor:
        """Return the codes [N, K] that were packed."""
        return self._in_order(weight, self.group_of(weight, scale))[:, :K]

    def quantise(
        self, weight: torch.Tensor, group: int | None = None, scale_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest (codes [N, K], scales float32) of `weight` [N, K], with a scale a row and group."""
        N, K = weight.shape
        self._check(K, group)
        if group is None:
            scales = self._scales_for(weight.float().abs().amax(1) if K else weight.new_zeros(N).float(), torch.float32)
            return self._rounded(weight.float(), scales[:, None]), scales
        whole = torch.nn.functional.pad(weight.float(), (0, -K % group)).view(N, -1, group)
        scales = self._scales_for(whole.abs().amax(2), self._scale_dtype(scale_dtype, group))
        codes = self._rounded(weight.float(), scales.repeat_interleave(group, 1)[:, :K])
        return codes, torch.stack((scales, torch.zeros_like(scales)), 2) if self.zeros else scales

    def group_of(self, weight: torch.Tensor, scale: torch.Tensor) -> int | None:
        """Return how many entries along K share a scale, from the stored tensors' shapes; None for a whole row."""
        return None if scale.ndim == 1 else self.group_by(weight.shape[1], scale.shape[1])

    def group_by(self, elements: int, stored_slots: int) -> int:
        """Return the same for rows of `elements` elements and `stored_slots` scales. Raises `ShapeError` where none
        fits."""
        K = elements * self.per_element
        for group in self.groups:
            if group is not None and K % LINE == 0 and slots(K, group) == stored_slots:
                return group
        fitting = ", ".join(str(slots(K, group)) for group in self.groups if group is not None)
        raise ShapeError(f"scale has {stored_slots} columns for rows of {K} entries; expected {fitting or 'none'}")

    @property
    def _pair(self) -> tuple[int, ...]:
        return (2,) if self.zeros else ()

    def scales_in(self, group: int | None) -> tuple[torch.dtype, ...]:
        """Return which dtypes scales may have, the default first."""
        return self.scale_dtypes if group is not None and (group < LINE or self.zeros) else (torch.float32,)

    def _check(self, K: int, group: int | None) -> None:
        if group not in self.groups:
            expected = ", ".join(map(str, self.groups))
            raise ArgumentError(f"group is {group} for weights in {self.name}; expected one of {expected}")

    def _scale_dtype(self, requested: torch.dtype | None, group: int) -> torch.dtype:
        possible = self.scales_in(group)
        if requested is not None and requested not in possible:
            expected = ", ".join(map(str, possible))
            raise DtypeError(
                f"scale_dtype is {requested} for weights in {self.name}, groups of {group}; expected one of {expected}"
            )
        return requested or possible[0]

    def _filled(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """Pad `codes` with zeros to `width`."""
        if codes.dtype != self.dtype:
            raise DtypeError(f"codes have dtype {codes.dtype} for weights in {self.name}; expected {self.dtype}")
        bits = codes.contiguous().view(torch.uint8)
        return torch.nn.functional.pad(bits, (0, width - codes.shape[1])).view(self.dtype)

    def _arranged(self, codes: torch.Tensor, group: int | None) -> torch.Tensor:
        return codes

    def _in_order(self, weight: torch.Tensor, group: int | None) -> torch.Tensor:
        return weight

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float()

    def _stored_scales(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = scales.to(dtype)
        exact = (stored.to(scales.dtype) == scales) | scales.isnan()
        if not bool(exact.all()):
            raise ArgumentError(
                f"a scale is {float(scales[~exact][0])!r}, no number of {dtype}; expected one, or float32"
            )
        return stored

    def _scale_numbers(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def _scales_for(self, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the scales, of `dtype`, by which entries up to `largest` become codes.

        Here they are powers of two that map the largest entry of a row to between 224 and 448. A power of two costs a
        floating-point format no accuracy and is undone exactly. A row with a NaN or an infinity gets the scale NaN.
        """
        mantissa, exponent = torch.frexp(largest / LARGEST)  # = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-100, 100)
        exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
        scale = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)  # its bits: a power computed may be off
        return torch.where(largest.isfinite(), scale, torch.nan)

    def _rounded(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (weight / scales).clamp(-LARGEST, LARGEST).to(self.dtype)


@dataclass(frozen=True)
class BlockPacking(Packing):
    """e4m3 with a scale for each row and 128, 64 or 32 entries along K."""

    name: str = "fp8_block"
    groups: tuple[int | None, ...] = (128, 64, 32)

    def by_lines(self, group: int | None) -> bool:
        return group != LINE

    def _scales_for(self, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _some(largest / LARGEST)

    def _arranged(self, codes: torch.Tensor, group: int | None) -> torch.Tensor:
        """Arrange codes in lines: byte i of word j of a line holds entry 32 i + j."""
        return codes if group == LINE else _turned(codes, 4, 32)

    def _in_order(self, weight: torch.Tensor, group: int | None) -> torch.Tensor:
        return weight if group == LINE else _turned(weight, 32, 4)


@dataclass(frozen=True)
class FourBits(Packing):
    """Integers from -8 to 7, in words of eight.

    Word 2 m + h of a line holds entries 2 m (low half) and 2 m + 1 (high half) of products 4 h to 4 h + 3.
    """

    name: str = "int4"
    dtype: torch.dtype = torch.int32
    per_element: int = 8
    groups: tuple[int | None, ...] = (128, 64, 32, 16, None)
    scale_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)

    ZERO: ClassVar[int] = 8
    FIELDS: ClassVar[tuple] = tuple(((0, 4, 4 * n),) for n in range(4))
    """Of each of four products, in half a word: (first bit of the code, bits, where they lie)."""

    @property
    def zero_code(self) -> int:
        return self.ZERO

    def padded(self, K: int, group: int | None) -> int:
        return -(-K // LINE) * LINE

    def by_lines(self, group: int | None) -> bool:
        return True

    def _filled(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        if codes.dtype != torch.uint8:
            raise DtypeError(f"codes have dtype {codes.dtype} for weights in {self.name}; expected {torch.uint8}")
        return torch.nn.functional.pad(codes, (0, width - codes.shape[1]), value=self.ZERO)

    def _arranged(self, codes: torch.Tensor, group: int | None) -> torch.Tensor:
        N, lines = codes.shape[0], codes.shape[1] // LINE
        halves = codes.view(N, lines, 2, 4, 8, 2)  # row, line, h, product, m, low or high
        words = torch.zeros(*halves.shape[:2], 8, 2, dtype=torch.int64, device=codes.device)
        for n, fields in enumerate(self.FIELDS):
            for high in (0, 1):
                code = halves[:, :, :, n, :, high].transpose(2, 3).to(torch.int64)
                for first, bits, place in fields:
                    words |= ((code >> first) & ((1 << bits) - 1)) << (place + 16 * high)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        return words.view(N, lines * 16).view(self.dtype)

    def _in_order(self, weight: torch.Tensor, group: int | None) -> torch.Tensor:
        N, lines = weight.shape[0], weight.shape[1] * self.per_element // LINE
        words = weight.contiguous().view(torch.int32).view(N, lines, 8, 2)
        codes = torch.zeros(*words.shape[:2], 2, 4, 8, 2, dtype=torch.uint8, device=weight.device)
        for n, fields in enumerate(self.FIELDS):
            for high in (0, 1):
                for first, bits, place in fields:
                    part = (words >> (place + 16 * high)) & ((1 << bits) - 1)
                    codes[:, :, :, n, :, high] |= (part << first).transpose(2, 3).to(torch.uint8)
        return codes.view(N, lines * LINE)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float() - self.ZERO

    def _scales_for(self, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _some((largest / (self.ZERO - 0.5)).to(dtype).float())  # both ends of the range are as far

    def _rounded(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return ((weight / scales).round().clamp(-self.ZERO, self.ZERO - 1) + self.ZERO).to(torch.uint8)


@dataclass(frozen=True)
class E2m1(FourBits):
    """e2m1 with a power of two for each 32 entries. A code's bits lie where one shift makes them a bf16's."""

    name: str = "mxfp4"
    dtype: torch.dtype = torch.uint8
    per_element: int = 2
    groups: tuple[int | None, ...] = (32, 16)
    scale_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)

    ZERO: ClassVar[int] = 0
    FIELDS: ClassVar[tuple] = (
        ((0, 3, 6), (3, 1, 15)),
        ((0, 3, 3), (3, 1, 12)),
        ((0, 3, 0), (3, 1, 14)),
        ((0, 3, 9), (3, 1, 13)),
    )

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        halves = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(0, 3)).float()
        return torch.where(codes > 7, -halves, halves) * 0.5

    def _stored_scales(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mantissa, exponent = torch.frexp(scales.double())
        stored = exponent + 126
        wrong = (mantissa != 0.5) | (stored < 0) | (stored > 254)
        if bool(wrong.any()):
            raise ArgumentError(
                f"a scale is {float(scales[wrong][0])!r} for weights in {self.name}; expected a power of two from"
                " 2**-127 to 2**127"
            )
        return stored.to(dtype)

    def _scale_numbers(self, scale: torch.Tensor) -> torch.Tensor:
        return _power(scale.int() - 127)

    def _scales_for(self, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the largest powers of two that map the largest entry to at least 4 and below 8; e2m1 ends at 6."""
        exponent = torch.frexp(largest.double())[1].clamp(-100, 127) - 3
        return _power(exponent).float()

    def _rounded(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Round to the nearest representable number; of two equally near, to the one whose last bit is zero."""
        size = (weight / scales).abs()
        borders = torch.tensor([(a + b) / 2 for a, b in zip(_E2M1[:-1], _E2M1[1:], strict=True)], device=weight.device)
        down = torch.bucketize(size, borders)  # of an entry on a border the lower one
        up = torch.bucketize(size, borders, right=True)
        code = torch.where(down % 2 == 0, down, up)
        return (code + 8 * torch.signbit(weight)).to(torch.uint8)


@dataclass(frozen=True)
class Nvfp4(E2m1):
    """e2m1 with any scale for each 16 entries, which are one product."""

    name: str = "nvfp4"
    groups: tuple[int | None, ...] = (16,)
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def _stored_scales(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return Packing._stored_scales(self, scales, dtype)

    def _scale_numbers(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def _scales_for(self, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _some(largest / _E2M1[-1])


@dataclass(frozen=True)
class Int8(FourBits):
    """Integers from -128 to 127. Byte i of word j of a line holds entry 32 i + j."""

    name: str = "int8"
    dtype: torch.dtype = torch.int8
    per_element: int = 1
    groups: tuple[int | None, ...] = (128, 64, 32, None)

    ZERO: ClassVar[int] = 128

    def _arranged(self, codes: torch.Tensor, group: int | None) -> torch.Tensor:
        return _turned(codes, 4, 32).view(self.dtype)

    def _in_order(self, weight: torch.Tensor, group: int | None) -> torch.Tensor:
        return _turned(weight, 32, 4).view(torch.uint8)


FP8, FP8_BLOCK, INT4, MXFP4, NVFP4, INT8 = Packing(), BlockPacking(), FourBits(), E2m1(), Nvfp4(), Int8()
INT4_ZEROS = FourBits("int4_zeros", groups=(128, 64, 32, 16), zeros=True)
INT8_ZEROS = Int8("int8_zeros", groups=(128, 64, 32), zeros=True)
PACKINGS = {each.name: each for each in (FP8, FP8_BLOCK, INT4, MXFP4, NVFP4, INT8, INT4_ZEROS, INT8_ZEROS)}


def slots(K: int, group: int) -> int:
    """Return how many scales a stored row has for K entries."""
    return math.ceil(K / (LINE * _LINES)) * _LINES * (LINE // group)


def _some(scales: torch.Tensor) -> torch.Tensor:
    """Return `scales` with 1 for each 0, by which nothing divides."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent in float64."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _turned(codes: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return `codes` with each line of 128 bytes, as [rows, cols], transposed."""
    lines = codes.contiguous().view(torch.uint8).view(codes.shape[0], codes.shape[1] // LINE, rows, cols)
    return lines.transpose(2, 3).reshape(codes.shape).view(codes.dtype)
