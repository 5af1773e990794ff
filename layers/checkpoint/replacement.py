"""Replace a checkpoint by a new one, so that at every moment the folder loads: as the old or the new.

New weights are written into the same folder, under unused names, and reach the disk before any file names them.
Then one rename, or one removal, decides:

    one file, the configuration as before       `model.safetensors` is replaced
    several files, the configuration as before  the index is replaced; then an old `model.safetensors`, which is read
                                                before an index, is removed, and that decides
    another configuration                       `config.json` is replaced by one that also says which index is its own
                                                (`transformers_weights`, which transformers follows, too); once the old
                                                weights are gone and the index has its usual name, by one that does not

Only then are old files removed, and `generation_config.json` follows. A process that is killed leaves files that nobody
reads; the next save removes them.
"""

from __future__ import annotations

from contextlib import suppress
import itertools
import json
import os
from pathlib import Path
import re

from iris.errors import CheckpointError

from .folder import CONFIG, INDEX, SINGLE, WEIGHTS, prevailing, read_json

PARTIAL = ".partial"
_WRITTEN_NAMES = re.compile(
    r"(model(-\d{1,4})?-\d{5}-of-\d{5}\.safetensors|model\.safetensors|model(-\d{1,4})?\.safetensors\.index\.json)"
    rf"({re.escape(PARTIAL)})?|(generation_)?config\.json{re.escape(PARTIAL)}"
)


class Replacement:
    """The new checkpoint of `folder`: `shards` are its files' tensors, `configurations` its other files. One process.

    The caller fills the files `names`, one a shard, which `create` makes; then `commit`, or `discard`.
    """

    def __init__(self, folder: Path, shards: list[list[str]], configurations: dict[str, bytes]) -> None:
        self.folder, self.shards = folder, shards
        self.configurations, self.config = dict(configurations), configurations[CONFIG]
        del self.configurations[CONFIG]
        self._is_new_folder = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        existing = set(os.listdir(folder))
        if first := prevailing(existing):
            raise CheckpointError(f"the folder holds {first}, which transformers would load: expected none in it")
        self._replaces = CONFIG in existing and any(name.endswith(WEIGHTS) for name in existing)
        self._differs = self._replaces and not _same(folder / CONFIG, self.config)
        self._single = len(shards) == 1 and not self._differs
        self._index = INDEX
        if self._single:
            self.names = [SINGLE + PARTIAL]
        else:
            self.names, self._index = _unused(existing, len(shards))
        self._created: list[str] = []
        self._is_committed = False

    def create(self, name: str, header: bytes, size: int) -> None:
        """Create the file `name`, of `size` bytes, that begins with `header`."""
        file = self._open(name)
        try:
            os.write(file, header)
            os.truncate(file, size)
        finally:
            os.close(file)

    def commit(self, total: int) -> None:
        """Make the new files, which hold `total` bytes of tensors, the folder's checkpoint, and remove the old ones."""
        _sync(self.folder)
        if self._differs:
            self._put(self._index, self._index_of(total))
            named = json.loads(self.config) | {"transformers_weights": self._index}
            self._put(CONFIG, json.dumps(named, indent=2).encode())
            self._is_committed = True
            self._remove([SINGLE])
            self._put(INDEX, self._index_of(total))
            self._put(CONFIG, self.config)
        else:
            if not self._replaces:
                self._put(CONFIG, self.config)
            if self._single:
                os.replace(self.folder / self.names[0], self.folder / SINGLE)
                _sync(self.folder)
            else:
                self._put(INDEX, self._index_of(total))
                self._remove([SINGLE])
            self._is_committed = True
        for name, content in self.configurations.items():
            self._put(name, content)
        kept = {SINGLE} if self._single else {INDEX, *self.names}
        stale = [name for name in os.listdir(self.folder) if _WRITTEN_NAMES.fullmatch(name) and name not in kept]
        self._remove(sorted(stale, key=lambda name: (not name.startswith(INDEX), name)))  # what names files goes first

    def discard(self) -> None:
        """Remove the files that were created, unless they are the folder's checkpoint by now."""
        for name in () if self._is_committed else self._created:
            with suppress(OSError):
                os.unlink(self.folder / name)
        if self._is_new_folder:
            with suppress(OSError):
                self.folder.rmdir()  # if it is empty

    def _index_of(self, total: int) -> bytes:
        places = {tensor: name for name, tensors in zip(self.names, self.shards, strict=True) for tensor in tensors}
        return (json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n").encode()

    def _put(self, name: str, content: bytes) -> None:
        """Write the file `name` with `content` atomically."""
        file = self._open(name + PARTIAL)
        try:
            with os.fdopen(os.dup(file), "wb") as out:
                out.write(content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(self.folder / (name + PARTIAL), self.folder / name)
        _sync(self.folder)

    def _open(self, name: str) -> int:
        """Create a file and open it. One of that name is removed first, and a link of that name is not followed."""
        with suppress(FileNotFoundError):
            os.unlink(self.folder / name)
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._created.append(name)
        return file

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self.folder / name)
        _sync(self.folder)


def _same(path: Path, config: bytes) -> bool:
    try:
        return read_json(path) == json.loads(config)
    except CheckpointError:
        return False


def _unused(taken: set[str], count: int) -> tuple[list[str], str]:
    """Return names for `count` files and their index that no file has."""
    for turn in itertools.count():
        stem = f"model-{turn}" if turn else "model"
        names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        index = f"model-{turn}.safetensors.index.json"
        if not taken & {index, *names}:
            return names, index
    raise AssertionError("counting ended")


def _sync(folder: Path) -> None:
    """Write changes of names in `folder` to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
