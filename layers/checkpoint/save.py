"""`save_pretrained(model, folder, ctx)`: a split model as a checkpoint that plain transformers reads, bit for bit.

Nothing is gathered. The headers fix where each byte of each tensor belongs, so rank 0 lays out the files, and then
every rank writes its own parts into them through `buffers`, one tensor after the other. What several ranks hold (copies
of kv heads) they write alike; what all hold whole, rank 0 writes. When all ranks are done and the bytes are on the
disk, rank 0 puts the new files in the old ones' place (`replacement`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
import copy
from dataclasses import dataclass
import math
import os
from pathlib import Path
import re
import shutil
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..expert_storage import CodedWeight, coded_weight, scale_names
from ..hf.merge import Slice
from ..pipeline.stage import save_refusal
from ..shard import Shard, concat
from ..sharded import is_dtensor, part_of, ranks_of
from ..together import agree, digest, one_line, raise_together, safe_repr, shown
from ..weight_storage import Quantised
from .buffers import Staging
from .files import StoredTensor, layout
from .replacement import PARTIAL, Replacement

if TYPE_CHECKING:
    from iris.context import Iris


_PIECE = 1 << 21  # numbers that are restored at a time


@dataclass(frozen=True)
class _Held:
    """This rank's values of one tensor of the unsplit model: `local` is its `shard` along `dim`, None for all."""

    local: torch.Tensor
    shape: tuple[int, ...]
    shard: Shard | None = None
    dim: int = 0
    layer: Any = None  # of a quantised weight: what restores its numbers, which are stored

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype if self.layer is None else self.layer.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def store(self, place: StoredTensor, rank: int) -> None:
        if isinstance(self.layer, CodedWeight):
            self._store_experts(place)
            return
        if self.shard is None:
            if rank == 0:
                place.copy_from(self.local)
            return
        at = 0
        for start, stop in self.shard.ranges:
            index = (slice(None),) * self.dim + (slice(start, stop),)
            if self.layer is None:
                place.copy_from(self.local.narrow(self.dim, at, stop - start), index)
            else:
                self._store_restored(place, at, start, stop)
            at += stop - start

    def _store_experts(self, place: StoredTensor) -> None:
        """Store the numbers of split experts that are held as codes, one expert at a time."""
        assert self.shard is not None
        for expert in range(self.shape[0]):
            numbers, at = self.layer.numbers(expert, self.dtype), 0
            for start, stop in self.shard.ranges:
                index = (slice(None),) * (self.dim - 1) + (slice(start, stop),)
                piece = numbers.narrow(self.dim - 1, at, stop - start).contiguous()
                place.entry(expert).copy_from(piece, index)
                at += stop - start

    def _store_restored(self, place: StoredTensor, at: int, start: int, stop: int) -> None:
        """Store entries `start` to `stop` of a quantised weight, which begin at local entry `at`, by rows."""
        rows, columns = self.layer.local_shape
        first, last = (at, at + stop - start) if self.dim == 0 else (0, rows)
        step = max(1, _PIECE // max(1, columns))
        for row in range(first, last, step):
            end = min(row + step, last)
            piece = self.layer.numbers(row, end, self.dtype)
            if self.dim == 0:
                place.copy_from(piece, (slice(start + row - at, start + end - at),))
            else:
                place.copy_from(piece.narrow(1, at, stop - start).contiguous(), (slice(row, end), slice(start, stop)))


def save_pretrained(model: nn.Module, folder: str | Path, ctx: Iris, *, max_shard_size: int | str = "5GB") -> None:
    """Write a split `model` and its configuration into `folder`. Collective.

    If the folder holds an earlier checkpoint, its files are removed once the new ones are in place. Whenever the
    processes end, the folder loads as the old checkpoint or as the new one.

    Args:
        model: a model that `parallelize` or `from_pretrained` has split.
        folder: a folder that every rank sees.
        ctx: the context.
        max_shard_size: the largest size of a file of weights, in bytes or as a text like "5GB"; a single tensor may be
            larger.

    Raises:
        ArgumentError: for bad arguments.
        CheckpointError: on every rank, with the failure of each, where the folder cannot be written.
    """
    ctx = ranks_of(ctx)
    _save(model, folder, ctx, max_shard_size, None)


def _save(model: Any, folder: Any, ctx: Iris, max_shard_size: Any, refusal: str | None) -> None:
    refusal = refusal or save_refusal(model) or _refusal(model, folder, max_shard_size)
    held: dict[str, _Held] = {}
    if not refusal:
        folder, most = Path(os.path.abspath(folder)), _bytes_of(max_shard_size) or 0
        try:
            held = dict(_held(model))
        except Exception as error:  # the other ranks wait in `agree`
            refusal = f"model is a {type(model).__name__}, whose tensors cannot be listed: {one_line(error)}"
    kinds = [(name, each.shape, each.dtype) for name, each in held.items()]
    requested = {"folder": str(folder), "max_shard_size": max_shard_size}
    agree(ctx, refusal, requested | {"model": f"{type(model).__name__} of {len(kinds)} tensors {digest(kinds)}"})
    shards = _shards(held, most)
    replacement = None
    try:
        problems: list[str] = []
        if ctx.cur_rank == 0:
            try:
                replacement = Replacement(folder, shards, _configurations(model, folder))
                for name, tensors in zip(replacement.names, shards, strict=True):
                    header, _, size = _places(held, tensors)
                    replacement.create(name, header, size)
            except Exception as error:  # any error: the other ranks wait in `raise_together`
                problems = [f"rank 0: {one_line(error)}"]
        raise_together(problems, f"{folder} cannot be written", ctx)
        names = ctx.broadcast(replacement and replacement.names)
        try:
            _write(folder, dict(zip(names, shards, strict=True)), held, Staging(ctx.device), ctx.cur_rank)
        except Exception as error:
            problems = [f"rank {ctx.cur_rank}: {one_line(error)}"]
        raise_together(problems, f"{folder} cannot be written", ctx)
        try:
            if replacement is not None:
                replacement.commit(sum(each.nbytes for each in held.values()))
        except Exception as error:
            problems = [f"rank 0: {one_line(error)}"]
        raise_together(problems, f"{folder} cannot be written", ctx)
    except BaseException:
        if replacement is not None:
            replacement.discard()
        raise


def _refusal(model: Any, folder: Any, max_shard_size: Any) -> str | None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return f"model is a {type(model).__name__}: expected a Hugging Face model"
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        return f"folder is {shown(safe_repr(folder))}: expected a str or a Path that names one"
    if _bytes_of(max_shard_size) is None:
        return f"max_shard_size is {shown(safe_repr(max_shard_size))}: expected bytes, at least 1, or a text like '5GB'"
    foreign = [name for name, each in model.named_parameters() if is_dtensor(each)]
    if foreign:
        return f"model has the DTensor {foreign[0]}: expected plain parameters, which fully_shard does not leave"
    return None


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _bytes_of(size: Any) -> int | None:
    """Return the bytes of a `max_shard_size`, or None where it is not a size of at least 1."""
    if type(size) is int:
        return size if size >= 1 else None
    number = r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([KMGT]B)\s*"
    match = re.fullmatch(number, size, re.IGNORECASE | re.ASCII) if isinstance(size, str) else None
    amount = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    return int(amount) if 1 <= amount < math.inf else None


# Options of transformers' `save_pretrained` with the values that request what happens here anyway.
_SAVED_SO = {"safe_serialization": [True], "is_main_process": [True, False], "push_to_hub": [False]}


def wrap_save_pretrained(model: nn.Module, ctx: Iris) -> None:
    """Replace this instance's `save_pretrained` by one that saves the unsplit model, not only rank 0's shard."""
    if hasattr(model, "save_pretrained"):

        def save(self: Any, save_directory: str | Path, *, max_shard_size: int | str = "5GB", **options: Any) -> None:
            refusal = None
            for name, value in options.items():
                if not any(value is each for each in _SAVED_SO.get(name, ())):
                    refusal = f"save_pretrained: {name} is {shown(safe_repr(value))}: expected max_shard_size only"
            _save(self, save_directory, ctx, max_shard_size, refusal)

        holder: Any = model
        holder.save_pretrained = MethodType(save, model)


def _held(model: nn.Module) -> Iterator[tuple[str, _Held]]:
    """Yield each tensor of the unsplit model under its name there, a tied weight once."""
    modules = dict(model.named_modules())
    merged = {id(module.merged) for module in modules.values() if isinstance(module, Slice)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for prefix, module in modules.items():
        if id(module) in merged:
            continue  # its slices are the model's own linears
        split = hasattr(module, "load_shard")
        keys = ["weight", "bias"] if split else [*module._parameters, *module._buffers]
        for key in keys:
            name, local = f"{prefix}.{key}".lstrip("."), getattr(module, key)
            if local is None or key in module._non_persistent_buffers_set or _is_tied(model, name, module, tied, local):
                continue
            local = local.detach()
            if split and (key == "weight" or module.dim == 0):
                shape = (module.out_features, module.in_features) if key == "weight" else (module.out_features,)
                quantised = module if key == "weight" and isinstance(module.storage, Quantised) else None
                if key == "weight" and module.stored_transposed:
                    exact = module.numbers(0, module.local_shape[0], module.dtype)
                    yield name, _Held(exact.t().contiguous(), shape[::-1], concat(module.parts), 1 - module.dim)
                    continue
                yield name, _Held(local, shape, concat(module.parts), module.dim, quantised)
            elif (coded := coded_weight(module, key)) is not None:
                part, dim = module._parts[key]
                rows, columns = coded.shape[1:][:: -1 if coded.transposed else 1]
                sizes = [coded.experts, rows, columns]
                sizes[dim] = part.total
                yield name, _Held(local, tuple(sizes), part, dim, coded)
            elif key in scale_names(module):
                continue
            elif split_by := part_of(module, key):
                part, dim = split_by
                yield name, _Held(local, (*local.shape[:dim], part.total, *local.shape[dim + 1 :]), part, dim)
            else:
                yield name, _Held(local, tuple(local.shape))


def _is_tied(model: nn.Module, name: str, module: nn.Module, tied: dict[str, str], local: torch.Tensor) -> bool:
    if name not in tied:
        return False
    if hasattr(module, "tied_to") and name.endswith(".weight"):
        return True
    source, _, key = tied[name].rpartition(".")
    return local is getattr(model.get_submodule(source), key)  # not where both are split: each has its own shard


def _shards(held: dict[str, _Held], most: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in the order of the model."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, each in held.items():
        if shards[-1] and size + each.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += each.nbytes
    return shards


def _places(held: dict[str, _Held], names: list[str]) -> tuple[bytes, dict[str, int], int]:
    header, starts = layout({name: (held[name].dtype, held[name].shape) for name in names})
    return header, starts, len(header) + sum(held[name].nbytes for name in names)


def _write(folder: Path, files: dict[str, list[str]], held: dict[str, _Held], staging: Staging, rank: int) -> None:
    for file, names in files.items():
        _, starts, _ = _places(held, names)
        out = os.open(folder / file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in names:
                each = held[name]
                each.store(StoredTensor(out, starts[name], each.dtype, each.shape, staging), rank)
            os.fsync(out)
        finally:
            os.close(out)


def _configurations(model: Any, folder: Path) -> dict[str, bytes]:
    """Return the files other than weights, by name, as transformers writes them; it refuses some configurations.

    transformers writes them into a folder inside `folder`, which the next save removes if this process is killed.
    """
    aside, is_new = folder / f".configuration{PARTIAL}", not folder.exists()
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = model.dtype, [type(model).__name__]
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        config.save_pretrained(aside)
        if getattr(model, "generation_config", None) is not None:
            generation = copy.copy(model.generation_config)
            generation.disable_compile = None  # see `generation`: it is of the split model only
            generation.save_pretrained(aside)
        return {path.name: path.read_bytes() for path in sorted(aside.iterdir()) if path.is_file()}
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # `Replacement` makes it
