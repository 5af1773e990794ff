"""`save_pretrained(model, folder, ctx)`: a split model as a checkpoint that plain transformers reads, bit for bit.

Nothing is gathered. The headers fix where each byte of each tensor belongs, so rank 0 lays out the files, and then
every rank writes its own parts into them through `staging`, one tensor after the other. What several ranks hold (copies
of kv heads) they write alike; what all hold whole, rank 0 writes. Files get their names when all ranks are done,
so a failure leaves no file that looks like a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
import copy
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import re
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

from iris.errors import ArgumentError, CheckpointError
from iris_ops.fp8 import restored
import torch
from torch import nn

from .checkpoint import StoredTensor, layout
from .fused import Slice
from .shard import Shard, concat
from .sharded import check_context, part_of
from .staging import Staging
from .together import raise_together

_PARTIAL = ".partial"


@dataclass(frozen=True)
class _Held:
    """What this rank holds of one tensor of the unsplit model: `local`, the part `shard` along `dim`; None is all."""

    local: torch.Tensor
    shape: tuple[int, ...]
    shard: Shard | None = None
    dim: int = 0
    scale: torch.Tensor | None = None  # of an fp8 weight, which is stored converted back
    stored_as: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_as or self.local.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def store(self, place: StoredTensor, rank: int) -> None:
        if self.shard is None:
            if rank == 0:
                place.copy_from(self.local)
            return
        at = 0
        for start, stop in self.shard.ranges:
            index = (slice(None),) * self.dim + (slice(start, stop),)
            piece = self.local.narrow(self.dim, at, stop - start)
            if self.scale is not None:
                rows = self.scale.narrow(0, at, stop - start) if self.dim == 0 else self.scale
                piece = restored(piece, rows, self.dtype)
            place.copy_from(piece, index)
            at += stop - start


def save_pretrained(model: nn.Module, folder: str | Path, ctx, *, max_shard_size: int | str = "5GB") -> None:
    """Writes the whole of a split `model`, its configuration too, into `folder`, which every rank must see. Collective.

    Several files of at most `max_shard_size` (bytes, or a text like "5GB"; one tensor may be larger) and an index, or
    one file. Checkpoint files from before are removed. Raises `ArgumentError` for bad arguments, and `CheckpointError`
    on every rank, with what each met, where the folder cannot be written.
    """
    check_context(ctx)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(f"model is a {type(model).__name__}: expected a Hugging Face model")
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(f"folder is {folder!r}: expected a str or a Path")
    _check_size(max_shard_size)
    folder, held = Path(folder), dict(_held(model))
    files = _files(held, max_shard_size)
    staging = Staging(ctx.device)
    try:
        for step in (_lay_out, _write, _finish):
            problems = []
            try:
                step(model, folder, held, files, ctx, staging)
            except Exception as error:  # whatever it is, the other ranks are waiting for a word
                problems = [f"rank {ctx.cur_rank}: {error}"]
            raise_together(problems, f"{folder} cannot be written", ctx)
    except CheckpointError:
        if ctx.cur_rank == 0 and step is not _finish:  # behind that they may be all there is
            for file in files:
                with suppress(OSError):
                    (folder / (file + _PARTIAL)).unlink(missing_ok=True)
        raise


def _check_size(size: Any) -> None:
    """Raises for what says no number of bytes from 1 on; what a text's unit is, the hub's library knows."""
    if isinstance(size, str):
        number = re.match(r"\s*(\d+\.?\d*|\.\d+)", size)
        valid = number is not None and float(number[1]) > 0
    else:
        valid = type(size) is int and size >= 1
    if not valid:
        raise ArgumentError(f"max_shard_size is {size!r}: expected bytes, at least 1, or a text like '5GB'")


# What transformers' own may be told, and does here anyway.
_SAVED_SO = {"safe_serialization": [True], "is_main_process": [True, False], "push_to_hub": [False]}


def wrap_save_pretrained(model: nn.Module, ctx) -> None:
    """Makes `model.save_pretrained` of this instance save the whole model: the class's own would save rank 0's part."""
    if hasattr(model, "save_pretrained"):

        def save(self, save_directory: str | Path, *, max_shard_size: int | str = "5GB", **options: Any) -> None:
            for name, value in options.items():
                if value not in _SAVED_SO.get(name, ()):
                    raise ArgumentError(f"save_pretrained: {name} is {value!r}: expected max_shard_size only")
            save_pretrained(self, save_directory, ctx, max_shard_size=max_shard_size)

        model.save_pretrained = MethodType(save, model)


def _held(model: nn.Module) -> Iterator[tuple[str, _Held]]:
    """Each tensor of the unsplit model, under its name there. A tied weight comes once."""
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
                scaled = (module.weight_scale, module.dtype) if key == "weight" else (None, None)
                yield name, _Held(local, shape, concat(module.parts), module.dim, *scaled)
            elif part := part_of(module, key):
                yield name, _Held(local, (part.total, *local.shape[1:]), part)
            else:
                yield name, _Held(local, tuple(local.shape))


def _is_tied(model: nn.Module, name: str, module: nn.Module, tied: dict[str, str], local: torch.Tensor) -> bool:
    if name not in tied:
        return False
    return (hasattr(module, "tied_to") and name.endswith(".weight")) or local is model.get_parameter(tied[name])


def _files(held: dict[str, _Held], max_shard_size: int | str) -> dict[str, list[str]]:
    """File names to the names of their tensors."""
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        split = split_state_dict_into_shards_factory(
            held,
            get_storage_size=lambda each: each.nbytes,
            filename_pattern="model{suffix}.safetensors",
            get_storage_id=lambda each: None,
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise ArgumentError(f"max_shard_size is {max_shard_size!r}: expected bytes, or a text like '5GB'") from error
    return split.filename_to_tensors


def _places(held: dict[str, _Held], names: list[str]) -> tuple[bytes, dict[str, int], int]:
    header, starts = layout({name: (held[name].dtype, held[name].shape) for name in names})
    return header, starts, len(header) + sum(held[name].nbytes for name in names)


def _lay_out(model, folder: Path, held, files, ctx, staging) -> None:
    if ctx.cur_rank:
        return
    with TemporaryDirectory() as trial:  # transformers refuses some configurations
        _save_configurations(model, Path(trial))
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        header, _, size = _places(held, names)
        with open(folder / (file + _PARTIAL), "wb") as out:
            out.write(header)
            out.truncate(size)


def _write(model, folder: Path, held, files, ctx, staging) -> None:
    for file, names in files.items():
        _, starts, _ = _places(held, names)
        out = os.open(folder / (file + _PARTIAL), os.O_WRONLY)
        try:
            for name in names:
                each = held[name]
                each.store(StoredTensor(out, starts[name], each.dtype, each.shape, staging), ctx.cur_rank)
        finally:
            os.close(out)


def _finish(model, folder: Path, held, files, ctx, staging) -> None:
    if ctx.cur_rank:
        return
    _save_configurations(model, folder)
    index = folder / "model.safetensors.index.json"
    for path in folder.iterdir():
        if path == index or re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name):
            path.unlink()
    for file in files:
        os.replace(folder / (file + _PARTIAL), folder / file)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        whole = {"total_size": sum(each.nbytes for each in held.values())}
        index.write_text(json.dumps({"metadata": whole, "weight_map": weight_map}, indent=2) + "\n")


def _save_configurations(model: nn.Module, folder: Path) -> None:
    if getattr(model, "generation_config", None) is not None:
        generation = copy.copy(model.generation_config)
        generation.disable_compile = None  # see `generation`: it is of the split model only
        generation.save_pretrained(folder)
    model.config.dtype = model.dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
