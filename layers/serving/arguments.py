"""Check an engine's arguments on the host, before anything is allocated and before a GPU sees a token."""

from __future__ import annotations

from numbers import Real
import os
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
import torch
from torch import nn

from ..autocast import current_autocast
from ..hf.positions import count_from_zero, positions_known
from ..sharded import is_dtensor, positive
from .cache import cache_bytes
from .served import check_padding, check_served

if TYPE_CHECKING:
    from iris.across import Across
    from iris.context import Iris


def check_model(model: Any, device: torch.device) -> None:
    """Raise `ArgumentError` unless `model` is a decoder on `device`, whose prompts begin at position 0."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(f"model is a {type(model).__name__}: expected a Hugging Face model")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ArgumentError(f"model is a {type(model).__name__}: expected a decoder without an encoder")
    check_served(model)
    elsewhere = {str(each.device) for each in model.parameters()} - {str(device)}
    if elsewhere and not hasattr(model, "hf_device_map"):  # whose hooks move them
        raise ArgumentError(f"model has parameters on {', '.join(sorted(elsewhere))}: expected all on {device}")
    if not count_from_zero(model, device):
        raise ArgumentError(f"model is a {type(model).__name__}, whose positions do not begin at 0: use its generate()")


def check_sizes(model: nn.Module, ctx: Iris, batch_size: int, max_length: int) -> None:
    """Raise for sizes beyond the model's positions, or beyond the device's memory even if all of it is free."""
    positive(batch_size=batch_size, max_length=max_length)
    if (known := positions_known(model)) is not None and max_length > known:
        raise ArgumentError(
            f"max_length is {max_length}: expected at most {known}, the positions that {type(model).__name__} has"
        )
    check_memory(model, ctx, batch_size, max_length, "batch_size, max_length")


def check_memory(model: nn.Module, ctx: Iris, rows: int, length: int, names: str) -> None:
    """Raise where a static cache of `rows` and `length` cannot be allocated; `names`: the arguments' names."""
    tokens = torch.long.itemsize + torch.bool.itemsize  # of an engine's `output` and `mask`
    needed = cache_bytes(model, ctx.num_ranks, rows, length) + tokens * rows * length
    memory = total_memory(ctx.device)
    if needed > memory:
        raise ArgumentError(
            f"{names} are {rows}, {length}, for which a cache takes {needed >> 30} GiB: expected at most the"
            f" {memory >> 30} GiB of {ctx.device}"
        )


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of `device`: the same at any time, and so on all ranks of like devices."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_options(prompt_graphs: Any, compile: Any) -> None:
    """Raise for an invalid number of graphs, or an invalid way to compile."""
    if isinstance(prompt_graphs, bool) or not isinstance(prompt_graphs, int) or prompt_graphs < 0:
        raise ArgumentError(f"prompt_graphs is {prompt_graphs!r}: expected 0 or a positive integer")
    if not isinstance(compile, (bool, str)) or compile == "":
        raise ArgumentError(f"compile is {compile!r}: expected a bool, or the name of a backend of torch.compile")


def check_sampling(temperature: Any, top_p: Any, seed: Any) -> None:
    """Raise for invalid sampling parameters."""
    numbers = isinstance(temperature, Real) and isinstance(top_p, Real)
    if not numbers or not temperature >= 0 or not 0 < top_p <= 1:
        raise ArgumentError(
            f"temperature, top_p are {temperature!r}, {top_p!r}: expected 0 or more, and 0 < top_p <= 1"
        )
    if isinstance(seed, bool):
        raise ArgumentError(f"seed is {seed!r}: expected None or an integer of 64 bits")


def words_of(model: Any) -> int:
    """Return the vocabulary size of `model`: the rows of its embedding."""
    return model.get_input_embeddings().weight.shape[0]


def check_tokens(name: str, tokens: torch.Tensor, words: int, known: str = "the vocabulary") -> None:
    """Raise for tokens outside a vocabulary of `words` tokens. The host waits for tokens on a GPU."""
    if tokens.numel():
        lowest, highest = torch.stack(torch.aminmax(tokens)).tolist()
        if lowest < 0 or highest >= words:
            raise ArgumentError(f"{name} have tokens from {lowest} to {highest}: expected 0 to {words - 1}, {known}")


def check_prompts(model: Any, prompts: Any, mask: Any, rows: int, max_length: int, device: torch.device) -> None:
    """Raise unless both are [rows, 1 to max_length] on `device`, tokens of the vocabulary, left-padded."""
    integers = torch.long, torch.int
    for name, given, dtypes in (("prompts", prompts, integers), ("mask", mask, (torch.bool, *integers))):
        if given is None and name == "mask":
            continue
        if not isinstance(given, torch.Tensor) or is_dtensor(given):
            raise ArgumentError(f"{name} is a {type(given).__name__}: expected a tensor of {dtypes[0]}")
        is_sized = given.dim() == 2 and given.shape[0] == rows and 0 < given.shape[1] <= max_length
        if given.dtype not in dtypes or given.device != device or not is_sized or given.shape != prompts.shape:
            length = f"1 to {max_length}" if given is prompts else prompts.shape[1]
            raise ArgumentError(
                f"{name} is {list(given.shape)} of {given.dtype} on {given.device}: expected [{rows}, {length}] of"
                f" {dtypes[0]} on {device}"
            )
    check_tokens("prompts", prompts, words_of(model))
    check_padding(model, mask, max_length)
    if mask is not None and not mask[:, -1].all():  # whose logits would be those of padding
        raise ArgumentError("mask is False at the end of a row: expected padding in front of the prompts")


def check_logits(logits: Any, shape: torch.Size, device: torch.device) -> None:
    """Raise unless `logits` is a tensor of this shape on `device`."""
    if not isinstance(logits, torch.Tensor):
        raise ArgumentError(f"logits is a {type(logits).__name__}: expected a tensor")
    if logits.shape != shape or logits.device != device:
        raise ArgumentError(f"logits is {list(logits.shape)} on {logits.device}: expected {list(shape)} on {device}")
    if not logits.is_floating_point() or logits.layout is not torch.strided:
        raise ArgumentError(f"logits is {logits.layout} of {logits.dtype}: expected a strided tensor of floats")


def check_no_autocast(device_type: str) -> None:
    """Raise `ArgumentError` inside `torch.autocast`, where an engine's graphs and its cache would be of two dtypes."""
    if (dtype := current_autocast(device_type)) is not None:
        raise ArgumentError(
            f"autocast to {dtype} is enabled: expected none around an engine; to compute in this dtype, convert the "
            f"model before, with model.to({dtype})"
        )


def checked_graphs(graphs: bool | None, device: torch.device, line: Across | None) -> bool:
    """Return whether steps are captured, by default on GPUs. Raises `ArgumentError` where they cannot.

    `line`: the hosts over which the model's sums run.
    """
    capturable = line is None or line.capturable
    if graphs is None:
        return device.type == "cuda" and capturable
    if graphs and line is not None and not capturable:
        raise ArgumentError(
            f"graphs is True, and the group across hosts is one of {line.backend}: expected False, or a group of NCCL, "
            "whose calls a CUDA graph can hold"
        )
    if graphs and device.type != "cuda":
        raise ArgumentError(f"graphs is True: expected False on {device.type}, which has no CUDA graphs")
    return graphs
