"""`from_pretrained(path, ctx)`: a split Hugging Face model, of which each rank reads only its slices from the files.

1. The model is built empty, on meta, from its configuration.
2. The files' headers are compared with it. What is missing, left over or wrongly shaped is listed in one error, and
   every rank raises the same.
3. `parallelize` swaps the Linears, still empty.
4. Parameters are allocated and filled one by one, in the order of the files: the peak is this rank's part of the model,
   and two buffers of a few rows (`staging`).
5. Buffers that no file holds (rotary frequencies) are computed by the model's own initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator
import inspect
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError, CheckpointError, PlatformError
import torch
from torch import nn

from . import names
from .checkpoint import Checkpoint, StoredTensor
from .parallelize import check_options, parallelize, retie
from .plan import check_version
from .shard import fill
from .sharded import check_context, flags, part_of
from .staging import Staging

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def from_pretrained(
    path_or_id: str | Path, ctx, *, dtype: torch.dtype | None = None, strict: bool = True, **options: Any
) -> nn.Module:
    """A causal language model, split over the ranks of `ctx` by its own tensor-parallel plan, in eval mode. Collective.

    `path_or_id` is a folder, which needs no network, or a name on the Hugging Face hub. `dtype` is the configuration's
    by default. `options` are those of `parallelize`. What became of each module is in the model's `parallel_report`.
    Raises CheckpointError on every rank, before anything is loaded, if the files do not hold what the model needs, or,
    with `strict`, if they hold more, and ArgumentError, before anything is read, for what any of them asks wrongly.
    """
    check_context(ctx)
    _check_asked(ctx, _refusal(path_or_id, dtype, strict, options), {"dtype": dtype, "strict": strict, **options})
    staging = Staging(ctx.device)
    problems, model, checkpoint, sources = [], None, None, {}
    folder = _folder(path_or_id, ctx)
    try:
        model = _empty_model(folder, dtype)
        checkpoint = Checkpoint(folder, staging)
        sources, problems = names.find(model, checkpoint, strict)
    except PlatformError:  # of what is installed, for all ranks alike
        raise
    except (OSError, ValueError) as error:  # CheckpointError is a ValueError
        problems = [str(error)]
    except Exception as error:  # of a configuration that says anything; the other ranks are waiting for a word
        problems = [f"the configuration makes no model: {type(error).__name__}: {error}"]
    try:
        raise_together(problems, f"{path_or_id} cannot be loaded", ctx)
        report = parallelize(model, ctx, **options)
        try:
            for name, stored in _progress({name: checkpoint[source] for name, source in sources.items()}, ctx):
                _load(model, name, stored, ctx.device)
            _tie(model, {name: checkpoint[source] for name, source in sources.items()}, ctx.device)
        except (OSError, RuntimeError) as error:  # a file, or memory of the device
            problems = [f"rank {ctx.cur_rank}: {error}"]
        raise_together(problems, f"{path_or_id} cannot be read", ctx)
    finally:
        if checkpoint is not None:
            checkpoint.close()
    _compute_buffers(model, ctx.device)
    retie(model)
    held = (*model.named_parameters(), *model.named_buffers())
    empty = [f"{name} has nowhere to come from" for name, tensor in held if tensor.is_meta]
    raise_together(empty, f"{path_or_id} cannot be loaded", ctx)
    model.parallel_report = report
    return model.eval()


def _refusal(path_or_id: str | Path, dtype: torch.dtype | None, strict: bool, options: dict[str, Any]) -> str | None:
    if not isinstance(path_or_id, (str, Path)):
        return f"path_or_id is a {type(path_or_id).__name__}: expected a str or a Path"
    if not str(path_or_id):
        return "path_or_id is empty: expected a folder, or a name on the hub"
    if dtype not in (None, *_DTYPES):
        return f"dtype is {dtype!r}: expected None, torch.bfloat16, torch.float16 or torch.float32"
    known = inspect.signature(check_options).parameters
    for name, value in options.items():
        if name not in known:
            return f"{name} is {value!r}: expected no option but dtype, strict, {', '.join(known)}"
    try:
        flags(strict=strict)
        check_options(**options)
    except ArgumentError as error:
        return str(error)
    return None


def _check_asked(ctx, refusal: str | None, asked: dict[str, Any]) -> None:
    """Raises on every rank if one of them refuses its arguments, or if they differ. Collective."""
    own = refusal, {name: "a function" if callable(value) else repr(value) for name, value in asked.items()}
    told = [ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)]
    for refused, _ in told:
        if refused:
            raise ArgumentError(refused)
    first = told[0][1]
    for rank, (_, said) in enumerate(told):
        for name in sorted(first.keys() | said.keys()):
            if first.get(name) != said.get(name):
                raise ArgumentError(
                    f"{name} is {first.get(name)} on rank 0 and {said.get(name)} on rank {rank}: expected the same"
                )


def _folder(path_or_id: str | Path, ctx) -> Path:
    """Where the files are. Rank 0 looks, and downloads if it must."""
    found = error = None
    if ctx.cur_rank == 0:
        found = str(path_or_id)
        try:
            if not Path(found).is_dir():
                from huggingface_hub import snapshot_download

                found = snapshot_download(found, allow_patterns=["*.json", "*.safetensors"])
        except Exception as caught:  # whatever it was, the other ranks are waiting for a word
            error = f"{found!r} is no folder, and the hub did not give a model of that name: {caught}"
    found, error = ctx.broadcast((found, error))
    if error:
        raise CheckpointError(error)
    return Path(found)


def _empty_model(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError("the weights are quantised: expected bfloat16, float16 or float32 ones")
    dtype = dtype or config.dtype or torch.float32
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"the configuration's dtype is {dtype}: pass dtype=torch.float32, or another that is served"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_version(model)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def raise_together(problems: list[str], what: str, ctx) -> None:
    """Raises on every rank if any rank has a problem. Collective."""
    told = [line for src in range(ctx.num_ranks) for line in ctx.broadcast(problems, src=src)]
    if told:
        lines = list(dict.fromkeys(told))
        raise CheckpointError(f"{what}, {len(lines)} problem(s):\n  " + "\n  ".join(lines))


def _load(model: nn.Module, name: str, source: StoredTensor, device: torch.device) -> None:
    module, key = _owner(model, name)
    if hasattr(module, "load_shard"):
        module.load_shard(key, source)
        return
    local = torch.empty_like(getattr(module, key), device=device)
    if part := part_of(module, key):
        part.fill(local, source, 0)
    else:
        fill(local, source)
    setattr(module, key, nn.Parameter(local, requires_grad=False) if key in module._parameters else local)


def _tie(model: nn.Module, stored: dict[str, StoredTensor], device: torch.device) -> None:
    """Gives each tied parameter that is not `stored` by itself what it is tied to, or if split its part of that.

    Heads that are split by rows are for `retie`.
    """
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        (module, key), (other, of) = (_owner(model, name) for name in (target, source))
        if target in stored or getattr(module, "tied_to", None):
            continue
        if hasattr(module, "load_shard") or hasattr(other, "load_shard"):
            _load(model, target, stored[source], device)
        else:
            setattr(module, key, getattr(other, of))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter or buffer `name`, and as what."""
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Fills the buffers that are not stored, as the model's class initialises them. Whatever was loaded stays."""
    computed = set()
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, torch.empty_like(buffer, device=device))
        while parent not in computed:  # a model may fill its layers' buffers
            computed.add(parent)
            parent = parent.rpartition(".")[0]
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in computed
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _progress(tensors: dict[str, StoredTensor], ctx) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in the order of the files, with a bar on rank 0 only."""
    from tqdm import tqdm

    whole = sum(stored.nbytes for stored in tensors.values())
    with tqdm(total=whole, desc="loading", unit="B", unit_scale=True, disable=ctx.cur_rank != 0) as bar:
        for name, stored in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)):
            yield name, stored
            bar.update(stored.nbytes)
