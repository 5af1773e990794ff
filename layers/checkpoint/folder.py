"""The files of a checkpoint's folder: which hold the weights, and which others transformers would act on.

A folder is not trusted: an index names plain files of the folder, which may be links as in the hub's cache; only
regular files are opened, for a FIFO would wait for a writer; JSON has a limited size and no key twice. Files that
transformers would apply and this loader does not (an adapter, a distributed checkpoint) are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import os
from pathlib import Path
import re
import stat
from typing import Any

from iris.errors import CheckpointError

from ..together import listed, one_line, shown

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER, _CUSTOM_GENERATE = "adapter_config.json", "custom_generate/generate.py"
# One rank's file of a checkpoint by torch.distributed, which transformers reads before any other.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".ckpt")
_MOST_BYTES = 256 << 20  # of a JSON file; an index of 100,000 tensors has some 10 MB


def open_regular(path: Path) -> int:
    """Open the regular file `path` for reading, without waiting. Raises `CheckpointError` for any other file."""
    if stat.S_ISREG(os.stat(path).st_mode):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    raise CheckpointError(f"{shown(path.name)} is not a regular file: expected one, no folder, device or pipe")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` for anything else."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                raise CheckpointError(f"{path.name} has {size} bytes: expected at most {_MOST_BYTES}")
            return parse_object(file.read(_MOST_BYTES + 1), float)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {one_line(error)}") from error
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path.name}: {error}") from error


def parse_object(text: bytes, constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises `ValueError`, also where an object has a key twice.

    Python's JSON has `Infinity` and `NaN`, which configurations use: `constant` returns their values.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=constant or _no_number)
    except RecursionError:
        raise ValueError("is JSON with too many levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text: {error.reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}: expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"has {shown(name)} twice")
        members[name] = value
    return members


def _no_number(text: str) -> Any:
    raise ValueError(f"holds {text}, which is not a number")


def is_plain(name: Any) -> bool:
    """Return whether `name` is that of a file in a folder: no path, and nothing that leads out of the folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def prevailing(names: set[str]) -> str | None:
    """Return the one of a folder's files that transformers acts on before, or on top of, the model's own weights."""
    return _ADAPTER if _ADAPTER in names else next(filter(_DISTRIBUTED.fullmatch, sorted(names)), None)


def check_contents(folder: Path, trust_remote_code: bool) -> None:
    """Raise `CheckpointError` for files of `folder` that transformers would act on and this loader does not."""
    names = set(os.listdir(folder))
    first = prevailing(names)
    if first == _ADAPTER:
        merge = "merge it once with peft, PeftModel.from_pretrained(model, folder).merge_and_unload(), and save that"
        if CONFIG in names and names & {SINGLE, INDEX}:
            raise CheckpointError(
                f"the folder holds a model and an adapter ({_ADAPTER}), which is not applied: {merge}"
            )
        base = shown(repr(read_json(folder / _ADAPTER).get("base_model_name_or_path")))
        raise CheckpointError(f"the folder holds an adapter ({_ADAPTER}) of {base}, and no model: {merge}")
    if first:
        raise CheckpointError(
            f"the folder holds a checkpoint of torch.distributed ({first}), which is not read: load it with"
            " transformers and save it once without distributed_checkpoint"
        )
    if trust_remote_code and os.path.lexists(folder / _CUSTOM_GENERATE):
        raise CheckpointError(
            f"the folder holds {_CUSTOM_GENERATE}, which replaces the model's generate and cannot run on a split model:"
            " load without trust_remote_code, or from a copy without that file"
        )
    if CONFIG not in names:
        raise CheckpointError(f"the folder holds no {CONFIG}: expected the folder of a Hugging Face checkpoint")


def weight_files(folder: Path, explicit: Any = None) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the files with the weights, and the index if there is one, from tensors to these names.

    In the order of transformers: the file that the configuration names (`explicit`), one file, several by an index.
    """
    if explicit is not None:
        if not is_plain(explicit) or not explicit.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(
                f"{CONFIG} says transformers_weights: {shown(repr(explicit))}: expected the name of a safetensors file"
                " of the folder, or of an index"
            )
        chosen = explicit
    else:
        chosen = next((name for name in (SINGLE, INDEX) if os.path.lexists(folder / name)), None)
        if chosen is None:
            raise CheckpointError(_without_weights(folder))
    if not chosen.endswith(".json"):
        return [chosen], None
    return _indexed(folder / chosen)


def _indexed(path: Path) -> tuple[list[str], dict[str, str]]:
    what = f"{shown(path.name)} is not an index of safetensors files"
    try:
        index = read_json(path).get("weight_map")
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{what}: weight_map names no file: expected a file for each tensor")
    if strange := sorted({repr(name) for name in index.values() if not is_plain(name)}):
        raise CheckpointError(f"{what}: weight_map names {listed(strange)}, expected names of files in the folder")
    return sorted(set(index.values())), index


def _without_weights(folder: Path) -> str:
    other_weights = sorted(name for name in os.listdir(folder) if name.endswith(WEIGHTS))
    remedy = (
        f"; {listed(other_weights)}: load with transformers (variant=, gguf_file=) and save once"
        if other_weights
        else ""
    )
    return f"{folder} holds neither {SINGLE} nor {INDEX}: only safetensors are read{remedy}"
