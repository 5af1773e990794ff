"""`from_pretrained(path, ctx)`: a split Hugging Face model, of which each rank reads only its slices from the files.

1. The model is built empty, on meta, from its configuration.
2. The files' headers are compared with it. What is missing or wrongly shaped is listed, and every rank raises the same.
3. `parallelize` swaps the Linears, still empty.
4. Parameters are allocated and filled one by one: the peak is this rank's part of the model, and one slice.
5. Buffers that no file holds (rotary frequencies) are computed by the model's own initialisation.

A tied weight is read once, under whichever of its names is stored. If both are stored, the head is read as its own
weight: that is right whether they are equal or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
import torch
from torch import nn

from .checkpoint import Checkpoint
from .fused import Slice
from .parallelize import parallelize, retie
from .sharded import ShardedLinear, part_of


def from_pretrained(path_or_id: str | Path, ctx, *, dtype: torch.dtype | None = None) -> nn.Module:
    """A causal language model, split over the ranks of `ctx` by its own tensor-parallel plan, in eval mode. Collective.

    `path_or_id` is a folder, which needs no network, or a name on the Hugging Face hub. `dtype` is the configuration's
    by default. What became of each module is in the model's `parallel_report`. Raises CheckpointError on every rank,
    before anything is loaded, if the files do not hold what the model needs.
    """
    problems, model, sources = [], None, {}
    folder = _folder(path_or_id, ctx)
    try:
        model = _empty_model(folder, dtype)
        checkpoint = Checkpoint(folder, model.base_model_prefix)
        sources = _sources(model, checkpoint)
        problems = checkpoint.problems({stored: shape for stored, shape in sources.values()})
    except (OSError, ValueError) as error:  # CheckpointError is a ValueError
        problems = [str(error)]
    _raise_together(problems, path_or_id, ctx)

    report = parallelize(model, ctx)
    for name in _progress(sources, ctx):
        stored, _ = sources[name]
        _load(model, name, checkpoint[stored], ctx.device)
    _compute_buffers(model, ctx.device)
    retie(model)
    model.parallel_report = report
    return model.eval()


def _folder(path_or_id: str | Path, ctx) -> Path:
    """Where the files are. Rank 0 looks, and downloads if it must."""
    found = error = None
    if ctx.cur_rank == 0:
        found = str(path_or_id)
        if not Path(path_or_id).is_dir():
            from huggingface_hub import snapshot_download

            try:
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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _sources(model: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """For each parameter and stored buffer to fill: the name it is read under, and its shape."""
    sources = {name: (name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    for target, source in model.all_tied_weights_keys.items():
        if target in checkpoint and source in checkpoint:
            parent, _, key = target.rpartition(".")
            own = torch.empty_like(model.get_parameter(target))
            setattr(model.get_submodule(parent), key, nn.Parameter(own))
            continue
        _, shape = sources.pop(target)
        if target in checkpoint:
            sources[source] = (target, shape)
    return sources


def _raise_together(problems: list[str], path: str | Path, ctx) -> None:
    """Raises on every rank if any rank has a problem."""
    told = [line for src in range(ctx.num_ranks) for line in ctx.broadcast(problems, src=src)]
    if told:
        lines = list(dict.fromkeys(told))
        raise CheckpointError(f"{path} cannot be loaded, {len(lines)} problem(s):\n  " + "\n  ".join(lines))


def _load(model: nn.Module, name: str, source: Any, device: torch.device) -> None:
    parent, _, key = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(module, (ShardedLinear, Slice)):
        module.load_shard(key, source)
    elif part := part_of(module, key):
        local = torch.empty_like(getattr(module, key), device=device)
        part.fill(local, source, 0)
        setattr(module, key, nn.Parameter(local, requires_grad=False))
    elif key in module._parameters:
        whole = source[:].to(device, getattr(module, key).dtype)
        setattr(module, key, nn.Parameter(whole, requires_grad=False))
    else:
        setattr(module, key, source[:].to(device, getattr(module, key).dtype))


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Fills the buffers that are not stored, as the model's class initialises them. Whatever was loaded stays."""
    computed = set()
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, torch.empty_like(buffer, device=device))
        computed.add(parent)
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in computed
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _progress(names, ctx):
    """The names, with a bar on rank 0 only."""
    from tqdm import tqdm

    return tqdm(names, desc="loading", unit=" tensors", disable=ctx.cur_rank != 0)
