"""A folder of safetensors files, as one mapping from stored names to tensors that are read by parts.

Opening reads headers only, and checks that they are the format's: tensors lie one after another without a gap and fill
the file. Of several files, the index decides which holds a tensor. A `StoredTensor` is a place in a file: it copies a
part of itself into a tensor, or a tensor into that part, through `Staging`, and touches no other byte. So loading a
slice and saving one are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

from iris.errors import CheckpointError
import torch

from ..together import listed, one_line, shown
from .buffers import Staging
from .folder import open_regular, parse_object, weight_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_HEADER = 100_000_000  # bytes, as the format says
_MOST_DIMENSIONS = 64  # torch's own limit
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor:
    """A tensor in an open file. `stored[2:5]` reads those rows; `copy_to` and `copy_from` move a part."""

    def __init__(self, file: int, start: int, dtype: torch.dtype, shape: Iterable[int], staging: Staging):
        self.file, self.start, self.dtype, self.shape, self.staging = file, start, dtype, tuple(shape), staging

    def get_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[int, int]:
        """Return the file, and the byte at which the tensor starts there."""
        return self.file, self.start

    def entry(self, at: int) -> StoredTensor:
        """Return `self[at]`, one entry of the first dimension."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        return StoredTensor(self.file, self.start + at * size, self.dtype, self.shape[1:], self.staging)

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """Return the same bytes in another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.shape, shape)
        return StoredTensor(self.file, self.start, self.dtype, shape, self.staging)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        shape = [stop - start for start, stop in self._bounds(index)]
        out = torch.empty(shape, dtype=self.dtype, device=self.staging.device)
        self.copy_to(out, index)
        return out

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        """Fill `local` with `self[index]`, converted to its dtype; `index` slices rows, columns, or both.

        It may slice the third dimension instead, with all of the first two.
        """
        if len(index) > 2:
            self._flat(index).copy_to(local.flatten(0, 1), (slice(None), *index[2:]))
            return
        self.staging.read(self.file, *self._place(index), local, self.dtype)

    def copy_from(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        """Store `local` as `self[index]`."""
        if len(index) > 2:
            self._flat(index).copy_from(local.flatten(0, 1), (slice(None), *index[2:]))
            return
        self.staging.write(self.file, *self._place(index), local, self.dtype)

    def _flat(self, index: tuple[slice, ...]) -> StoredTensor:
        """Return the tensor with its first two dimensions, of which `index` takes all, flattened into one."""
        assert index[:2] == (slice(None), slice(None)), index
        shape = (self.shape[0] * self.shape[1], *self.shape[2:])
        return StoredTensor(self.file, self.start, self.dtype, shape, self.staging)

    def _place(self, index: tuple[slice, ...]) -> tuple[int, int]:
        """Return the byte at which `self[index]` starts, and the bytes from one of its rows to the next."""
        bounds = self._bounds(index)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        start = self.start + (bounds[0][0] * row if bounds else 0)
        if len(bounds) > 1:
            start += bounds[1][0] * math.prod(self.shape[2:]) * self.dtype.itemsize
        return start, row

    def _bounds(self, index: tuple[slice, ...]) -> list[tuple[int, int]]:
        assert len(index) <= 2 and all(isinstance(each, slice) for each in index), index
        padded = (*index, *[slice(None)] * len(self.shape))[: len(self.shape)]
        return [each.indices(size)[:2] for each, size in zip(padded, self.shape, strict=True)]


class Checkpoint(Mapping[str, StoredTensor]):
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names, in `folder`.

    `explicit` names another file or another index, as a configuration may.
    """

    def __init__(self, folder: str | Path, staging: Staging, explicit: Any = None):
        self.folder = Path(folder)
        self._tensors: dict[str, StoredTensor] = {}
        self._files: list[int] = []
        names, index = weight_files(self.folder, explicit)
        problems: list[str] = []
        elsewhere: dict[str, str] = {}
        for name in names:
            try:
                tensors = self._open(self.folder / name, staging)
            except (OSError, ValueError) as error:  # CheckpointError is a ValueError
                problems.append(f"{shown(name)}: {one_line(error)}")
                continue
            for tensor in tensors:
                listed_in = name if index is None else index.get(tensor)
                if listed_in is None:
                    problems.append(f"{shown(tensor)} is stored in {shown(name)}, and the index does not list it")
                elif listed_in == name:
                    self._tensors[tensor] = tensors[tensor]
                else:
                    elsewhere[tensor] = name
        if index is not None and not problems:
            for tensor in index.keys() - self._tensors.keys():
                place = f"in {shown(elsewhere[tensor])}" if tensor in elsewhere else "nowhere"
                problems.append(f"{shown(tensor)} is stored {place}, and the index says in {shown(index[tensor])}")
        if problems:
            self.close()
            raise CheckpointError(f"{shown(str(self.folder))} cannot be read: {listed(problems)}")

    def _open(self, path: Path, staging: Staging) -> dict[str, StoredTensor]:
        file = open_regular(path)
        self._files.append(file)
        return {
            name: StoredTensor(file, start, dtype, shape, staging)
            for name, (start, dtype, shape) in _read_header(file).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.values())

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the first floating-point tensor of 16 bits or more, in the order of files and names."""
        ordered = sorted(self.items(), key=lambda item: (self._files.index(item[1].file), item[0]))
        kinds = (stored.dtype for _, stored in ordered)
        return next((kind for kind in kinds if kind.is_floating_point and kind.itemsize > 1), None)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(file: int) -> dict[str, tuple[int, torch.dtype, list[int]]]:
    """Return start, dtype and shape of each tensor of an open safetensors file. Raises `CheckpointError`."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        raise CheckpointError(f"has {size} bytes and says that its header has {length}: expected a safetensors file")
    try:
        header = parse_object(os.pread(file, length, 8))
    except ValueError as error:
        raise CheckpointError(f"the header {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"__metadata__ is {shown(repr(metadata))}: expected texts by name")
    places = sorted((*_checked(name, entry), name) for name, entry in header.items())
    end = 0
    for start, stop, name in places:
        if start != end:
            raise CheckpointError(
                f"{shown(name)} starts at byte {start} of the data: expected {end}, where the one before ends"
            )
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(f"has {size} bytes: expected {8 + length + end}, as its header says")
    return {
        name: (8 + length + start, DTYPES[header[name]["dtype"]], header[name]["shape"]) for start, _, name in places
    }


def _checked(name: str, entry: Any) -> tuple[int, int]:
    """Return where the tensor of a header's `entry` starts and ends in the data."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{shown(name)} is {shown(repr(entry))}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{shown(name)} is stored as {shown(str(dtype))}: expected one of {list(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{shown(name)} has shape {shown(repr(shape))}: expected sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{shown(name)} has data_offsets {shown(repr(offsets))}: expected where it starts and ends"
        )
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{shown(name)} lies at {shown(repr(offsets))}: expected {shown(str(nbytes))} bytes, of {dtype}"
            f" {shown(repr(shape))}"
        )
    return offsets[0], offsets[1]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of `tensors`, and the byte at which each starts."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):  # so that every tensor is aligned
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    starts = {name: base + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, starts
