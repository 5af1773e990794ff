"""A folder of safetensors files, as one mapping from stored names to tensors that are read by parts.

Opening reads headers only; safetensors checks them. A `StoredTensor` is a place in a file: it copies a part of itself
into a tensor, or a tensor into that part, through `Staging`, and touches no other byte. So loading a slice and saving
one are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import json
import math
import os
from pathlib import Path

from iris.errors import CheckpointError
from safetensors import SafetensorError, safe_open
import torch

from .staging import Staging

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
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

    def __getitem__(self, index) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        shape = [stop - start for start, stop in self._bounds(index)]
        out = torch.empty(shape, dtype=self.dtype, device=self.staging.device)
        self.copy_to(out, index)
        return out

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        """Fills `local` with `self[index]`, converted to its dtype; `index` slices rows, columns, or both."""
        self.staging.read(self.file, *self._place(index), local, self.dtype)

    def copy_from(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        """Stores `local` as `self[index]`."""
        self.staging.write(self.file, *self._place(index), local, self.dtype)

    def _place(self, index: tuple[slice, ...]) -> tuple[int, int]:
        """The byte at which `self[index]` starts, and the bytes from one of its rows to the next."""
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
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names, in `folder`."""

    def __init__(self, folder: str | Path, staging: Staging):
        self.folder, self._tensors, self._files = Path(folder), {}, []
        problems = []
        for path in _files(self.folder):
            try:
                with safe_open(path, framework="pt"):
                    pass  # that its header and its length are right
                self._open(path, staging)
            except (OSError, SafetensorError, CheckpointError) as error:
                problems.append(f"{path.name}: {error}")
        if problems:
            self.close()
            raise CheckpointError(f"{self.folder} cannot be read: " + "; ".join(problems))

    def _open(self, path: Path, staging: Staging) -> None:
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, length, 8))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{name} is stored as {entry['dtype']}: expected one of {list(DTYPES)}")
            start = 8 + length + entry["data_offsets"][0]
            self._tensors[name] = StoredTensor(file, start, DTYPES[entry["dtype"]], entry["shape"], staging)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file of `tensors`, and the byte at which each starts."""
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


def _files(folder: Path) -> Iterable[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}: only safetensors are read")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"weight_map names {names or 'no file'}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    return [folder / name for name in names]
