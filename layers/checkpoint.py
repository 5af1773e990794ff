"""A folder of safetensors files, as one mapping from tensor names to slices that are read on demand.

Opening reads headers only. A lookup gives a safetensors slice: `slice[2:5]` reads those rows from the file, and nothing
else. Checkpoints of a model and of its base model differ by a prefix of all names; a name is found with it or without.
"""

from __future__ import annotations

from collections.abc import Iterable
import json
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
from safetensors import SafetensorError, safe_open


class Checkpoint:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names, in `folder`."""

    def __init__(self, folder: str | Path, prefix: str = ""):
        self.folder, self.prefix = Path(folder), prefix and prefix + "."
        self._file_of: dict[str, Any] = {}
        problems = []
        for path in _files(self.folder):
            try:
                opened = safe_open(path, framework="pt")
                self._file_of.update(dict.fromkeys(opened.keys(), opened))
            except (OSError, SafetensorError) as error:
                problems.append(f"{path.name}: {error}")
        if problems:
            raise CheckpointError(f"{self.folder} cannot be read: " + "; ".join(problems))

    def __contains__(self, name: str) -> bool:
        return self._stored(name) is not None

    def __getitem__(self, name: str) -> Any:
        stored = self._stored(name)
        return self._file_of[stored].get_slice(stored)

    def problems(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """One line for each of the `expected` tensors that is missing or has another shape."""
        lines = []
        for name, shape in expected.items():
            if name not in self:
                lines.append(f"{name} is missing, expected {list(shape)}")
            elif (found := self[name].get_shape()) != list(shape):
                lines.append(f"{name} has shape {found}, expected {list(shape)}")
        return lines

    def _stored(self, name: str) -> str | None:
        candidates = [name]
        if self.prefix:
            candidates.append(name.removeprefix(self.prefix) if name.startswith(self.prefix) else self.prefix + name)
        return next((candidate for candidate in candidates if candidate in self._file_of), None)


def _files(folder: Path) -> Iterable[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}: only safetensors are read")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    return [folder / name for name in names]
