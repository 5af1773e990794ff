"""With IRIS_DEBUG=1, ranks compare what they are given: a checksum of tokens, masks and options, before anything runs.

Ranks that are given different tokens of the same length make the same calls, and each would answer from a mix. Without
debug mode nothing is computed, and there is no hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
import zlib

from iris import platform
import torch
from torch import nn

from .serving.arguments import check_tokens

if TYPE_CHECKING:
    from iris.context import Iris

_PLAIN = bool, int, float, str, bytes, type(None), torch.dtype, torch.device
_OWN = "streamer", "tokenizer", "assistant_tokenizer"  # of a process: they may differ


def compare(ctx: Iris, call: str, **arguments: Any) -> None:
    """In debug mode: raises `ArgumentError` on all ranks where one of the named `arguments` differs between them."""
    if is_compared(ctx):
        facts: dict[str, Any] = {name: digest(each) for name, each in arguments.items() if name not in _OWN}
        ctx.compare(call, **facts)


def is_compared(ctx: Iris) -> bool:
    """Whether calls are compared now: in debug mode, while nothing is captured or traced."""
    if ctx.agreement is None or torch.compiler.is_compiling():
        return False
    return not platform.is_capturing(ctx.device)


def digest(value: Any, depth: int = 3) -> str:
    """A short text that is the same for the same value, and hardly ever for another."""
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.is_meta:
            return kind
        flat = value.detach().contiguous().cpu().flatten()
        return f"{kind} with checksum {zlib.crc32(flat.view(torch.uint8).numpy().data):08x}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        each = [f"{name} {digest(held)}" for name, held in value.state_dict().items()]
        return f"{type(value).__name__} with checksum {_crc(each)}"
    if not depth:
        return type(value).__name__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {digest(held, depth - 1)}" for key, held in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        each = [digest(held, depth) for held in value]
        if isinstance(value, (set, frozenset)):
            each.sort()  # its own order differs by process
        text = ", ".join(each)
        return f"{type(value).__name__}({text})" if len(text) < 200 else f"{len(each)} with checksum {_crc(each)}"
    if type(value).__name__.endswith("Config"):  # what is private there describes the process: a hash, a path
        public = {name: held for name, held in vars(value).items() if not name.startswith("_")}
        return f"{type(value).__name__}({digest(public, depth - 1)})"
    if type(value).__name__.endswith(("Processor", "Criteria", "Warper")):
        return f"{type(value).__name__}({digest(vars(value), depth - 1)})"
    return getattr(value, "__qualname__", type(value).__name__)


def _crc(texts: list[str]) -> str:
    return f"{zlib.crc32(repr(texts).encode()):08x}"


def watch_inputs(model: nn.Module, ctx: Iris) -> None:
    """Hooks that compare what the model is called with, in debug mode, and check what its tables are asked for.

    On a CPU the latter costs nothing worth saying, and on a GPU the host would wait: there it is done in debug mode
    only, and otherwise left to the GPU's own assertion, as in the unsplit model.
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
        self.ctx, self.name = ctx, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        compare(self.ctx, f"{self.name}'s forward", **{f"argument {i}": each for i, each in enumerate(args)}, **kwargs)


class _Look:
    def __init__(self, ctx: Iris, name: str) -> None:
        self.ctx, self.name = ctx, name

    def __call__(self, module: Any, args: tuple) -> None:
        if torch.compiler.is_compiling() or not args or not isinstance(args[0], torch.Tensor) or args[0].is_meta:
            return
        if is_compared(self.ctx):
            compare(self.ctx, self.name, input=args[0])
        if not platform.is_capturing(self.ctx.device):
            check_tokens(f"inputs of {self.name}", args[0], module.num_embeddings, "its rows")
