"""Compare the arguments of ranks: checksums of tokens and masks, and options, before anything runs.

Ranks with different tokens of the same length make the same calls, and each would answer from a mix. So `generate` and
the engine's always compare `facts` of their arguments, in the exchange that such a call begins with anyway. A forward
exchanges nothing on the host, so it is compared in debug mode (IRIS_DEBUG=1) only; without, it has no hook. Debug mode
also compares the replicated weights (`replicas`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
import zlib

from iris import platform
from iris_ops.recording import is_recording
import torch
from torch import nn

from .replicas import Replicas
from .serving.arguments import check_tokens
from .sharded import ShardedLinear

if TYPE_CHECKING:
    from iris.context import Iris

_PLAIN = bool, int, float, str, bytes, type(None), torch.dtype, torch.device
_OWN = "streamer", "tokenizer", "assistant_tokenizer", "custom_generate"  # a process has its own
_OF_FILES = "architectures", "dtype", "torch_dtype", "transformers_version"  # saving writes them into a configuration
_BY_FIELDS = "Config", "Processor", "Criteria", "Warper"  # endings of names of classes that their fields define
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements of a tensor whose checksum is computed at a time, in some 24 bytes each
_SAMPLE = 64  # elements of a parameter
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def compare(ctx: Iris, call: str, **arguments: Any) -> None:
    """Raise `ArgumentError` on all ranks, in debug mode, where one of the named `arguments` differs between them."""
    if is_compared(ctx):
        facts: dict[str, Any] = {name: digest(each) for name, each in arguments.items() if name not in _OWN}
        ctx.compare(call, **facts)


def facts(**arguments: Any) -> dict[str, str]:
    """Return digests of a call's named `arguments`, a configuration's by field, for `checked` to compare between ranks.

    Excluded are arguments that belong to a process, such as a streamer, and the weights of models.
    """
    digests = {}
    for name, value in arguments.items():
        if name in _OWN or value is None:
            continue
        if isinstance(value, nn.Module):
            digests[name] = type(value).__name__
        elif type(value).__name__.endswith("Config"):
            members = {key: member for key, member in _fields(value).items() if key not in _OF_FILES}
            digests |= {f"{name}.{key}": digest(member) for key, member in members.items() if member is not None}
        else:
            digests[name] = digest(value)
    return digests


def is_compared(ctx: Iris) -> bool:
    """Return whether calls are compared now: in debug mode, while nothing is captured or traced."""
    if ctx.agreement is None or is_recording():
        return False
    return not platform.is_capturing(ctx.device)


def digest(value: Any, depth: int = 3) -> str:
    """Return a short text that is the same for equal values, and hardly ever for others."""
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.is_meta or value.layout is not torch.strided:
            return kind
        return f"{kind} with checksum {checksum(value):016x}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        if any(isinstance(module, ShardedLinear) for module in value.modules()):
            return f"{type(value).__name__}, split"  # each rank has weights of its own
        digests = [f"{name} {digest(member)}" for name, member in value.state_dict().items()]
        return f"{type(value).__name__} with checksum {_crc(digests)}"
    if not depth:
        return type(value).__name__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {digest(member, depth - 1)}" for key, member in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        digests = [digest(member, depth) for member in value]
        if isinstance(value, (set, frozenset)):
            digests.sort()  # its own order differs by process
        text = ", ".join(digests)
        return f"{type(value).__name__}({text})" if len(text) < 200 else f"{len(digests)} with checksum {_crc(digests)}"
    if callable(getattr(value, "get_seq_length", None)):  # a cache, whose heads are this rank's
        return f"{type(value).__name__} of {int(value.get_seq_length())} tokens"
    if any(kind.__name__.endswith(_BY_FIELDS) for kind in type(value).__mro__):
        return f"{type(value).__name__}({digest(_fields(value), depth - 1)})"
    return getattr(value, "__qualname__", type(value).__name__)


def checksum(tensor: torch.Tensor) -> int:
    """Return 64 bits that differ where two strided tensors of one dtype and shape do, computed where `tensor` lies.

    The sum, modulo 2**64, of each element's bits times an odd number that depends on its place: so one element, or the
    order of two, never differs unseen. The host waits for one number.
    """
    plain = tensor.detach().as_subclass(torch.Tensor)
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    flat = plain.contiguous().flatten()
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.long, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        places = torch.arange(start + 1, start + 1 + len(chunk), dtype=torch.long, device=bits.device) * _ODD
        total += ((places ^ (places >> 29)).bitwise_or_(1) * chunk).sum()
    return int(total) & ((1 << 64) - 1)


def sample(model: nn.Module) -> str:
    """Return a checksum of a few elements of each parameter, which differ where ranks drew or loaded other weights."""
    plain = (each.detach() for each in model.parameters() if type(each) is nn.Parameter and not each.is_meta)
    rows = (each[(0,) * (each.dim() - 1)][:_SAMPLE] for each in plain if each.dim() and each.numel())
    return _crc([digest(row) for row in rows])


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of a configuration, a processor or a criterion; private ones may differ by process."""
    return {key: member for key, member in vars(value).items() if not key.startswith("_")}


def _crc(texts: list[str]) -> str:
    return f"{zlib.crc32(repr(texts).encode()):08x}"


def watch_inputs(model: nn.Module, ctx: Iris) -> None:
    """Add hooks that compare the model's arguments, in debug mode, and check the indices into its embeddings.

    On a CPU the check of indices costs next to nothing. On a GPU the host would wait, so it runs in debug mode only;
    else the GPU's own assertion remains, as in the unsplit model.
    """
    if ctx.agreement is not None:
        model.register_forward_pre_hook(_Compare(ctx, type(model).__name__), with_kwargs=True)
    if ctx.agreement is None and ctx.device.type != "cpu":
        return
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and type(module).forward is nn.Embedding.forward
            and "forward" not in vars(module)
        ):
            module.register_forward_pre_hook(_Look(ctx, name))


class _Compare:
    def __init__(self, ctx: Iris, name: str) -> None:
        self.ctx, self.name, self.replicas = ctx, name, Replicas(digest)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if is_compared(self.ctx):
            weights: dict[str, Any] = {**self.replicas.digests(module)}
            self.ctx.compare(f"{self.name}'s weights", **weights)
        compare(self.ctx, f"{self.name}'s forward", **{f"argument {i}": each for i, each in enumerate(args)}, **kwargs)


class _Look:
    def __init__(self, ctx: Iris, name: str) -> None:
        self.ctx, self.name = ctx, name

    def __call__(self, module: Any, args: tuple) -> None:
        if is_recording() or not args or not isinstance(args[0], torch.Tensor) or args[0].is_meta:
            return
        if is_compared(self.ctx):
            compare(self.ctx, self.name, input=args[0])
        if not platform.is_capturing(self.ctx.device):
            check_tokens(f"inputs of {self.name}", args[0], module.num_embeddings, "its rows")
