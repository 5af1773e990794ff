"""Proves a split before weights move: what each rank would run is run on meta, beside the unsplit model.

Both are skeletons (see `skeleton`). The model's forward is called with tokens; of a module that takes no tokens, those
inside it are tried, each with an input of the width of its first parameter. Where the unsplit one runs and the split
one raises, or gives a tensor of another shape, the plan is refused with the name of the module. So is a forward that
reads a split weight itself. Where the unsplit one cannot run on meta, nothing is proved, and nothing refused.

The layers of a stack that are alike run once. What asks a tensor on meta for its value is told 1, or True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import inspect
import sys
from typing import Any

from iris.errors import StyleError
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import reads, sequence
from .fused import Slice
from .sharded import ShardedLinear

_BATCH, _TOKENS = 11, 13  # which no sizes of a model are multiples of
_OURS = __name__.partition(".")[0] + "."
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_VALUE = torch.ops.aten._local_scalar_dense.default


def prove(whole: nn.Module, split: nn.Module, joined: list[str]) -> None:
    """Raises `StyleError` where skeleton `split` does not run as skeleton `whole` does.

    `joined`: names of the modules out of which nothing split comes, for they sum or gather it.
    """
    sharing = sequence.sharing_of(split)
    if sharing is not None:
        sharing.world = 1  # a few tokens only, which no rank shares
    for module in split.modules():
        if isinstance(module, ShardedLinear):
            _stand_in(module)
    _prove(whole, split, "", joined, set())


def _prove(whole: nn.Module, split: nn.Module, name: str, joined: list[str], proved: set) -> None:
    inside = [each for each in joined if each == name or not name or each.startswith(f"{name}.")]
    if not inside:
        return
    for arguments in _arguments(whole):
        expected = _Run(whole, name, inside)
        if expected(arguments):
            _compare(expected, _Run(split, name, inside), arguments, split)
            return
    for child, module in whole.named_children():
        if (key := _kind(module)) not in proved:
            proved.add(key)
            _prove(module, split.get_submodule(child), f"{name}.{child}".lstrip("."), joined, proved)


def _compare(expected: _Run, run: _Run, arguments: dict[str, Any], split: nn.Module) -> None:
    passed = run(arguments)
    for name in expected.order:
        first, second = expected.shapes[name], run.shapes.get(name, [])
        if first[: len(second)] != second:
            at = next(i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
            raise StyleError(f"{name} would give {second[at]} in place of {first[at]}: {_REMEDY}")
    if isinstance(run.error, StyleError):
        raise run.error
    if not passed:
        raise StyleError(f"{run.culprit()} would fail in its forward: {_one_line(run.error)}: {_REMEDY}") from run.error
    if run.result != expected.result:
        raise StyleError(
            f"{run.name or type(split).__name__} would give {run.result} in place of {expected.result}: {_REMEDY}"
        )


_REMEDY = "the plan, on this many ranks, does not fit what the module does; leave it whole"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Run:
    """A call of the skeleton `module`, named `name` in the model, and the shapes that come out of `watched` modules."""

    def __init__(self, module: nn.Module, name: str, watched: list[str]) -> None:
        self.module, self.name, self.watched = module, name, watched
        self.error: Exception | None = None
        self.result: tuple[int, ...] | None = None
        self.shapes: dict[str, list] = {}
        self.order: list[str] = []

    def __call__(self, arguments: dict[str, Any]) -> bool:
        handles = [self._watch(name) for name in self.watched if name != self.name]
        alike = list(_run_once(self.module))
        positional = arguments.pop("", ()) if "" in (arguments := dict(arguments)) else ()
        try:
            with torch.no_grad(), torch.device("meta"), _OnMeta(self.module, self.name):
                self.result = _shape(self.module(*positional, **arguments))
        except Exception as error:
            self.error = error
        finally:
            for handle in handles:
                handle.remove()
            for module in alike:
                vars(module).pop("forward", None)
        return self.error is None

    def _watch(self, name: str):
        def look(module, args, output):
            self.shapes.setdefault(name, []).append(_shape(output))
            self.order.append(name)

        return self._submodule(name).register_forward_hook(look)

    def _submodule(self, name: str) -> nn.Module:
        return self.module.get_submodule(name.removeprefix(self.name).lstrip(".") if self.name else name)

    def culprit(self) -> str:
        """The name of the innermost module in whose call the error was raised."""
        names, found = _names(self.module, self.name), self.name
        trace = self.error.__traceback__
        while trace is not None:
            found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
            trace = trace.tb_next
        return found or type(self.module).__name__


class _OnMeta(TorchDispatchMode):
    """Gives values for those of tensors on meta, and raises where a split weight is read outside of its layer."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__()
        self._weights: dict[int, str] = {}
        for name, each in module.named_modules():
            if isinstance(each, ShardedLinear):
                path = f"{prefix}.{name}".strip(".")
                self._weights |= {id(tensor): f"{path}.{key}" for key, tensor in each.named_parameters(recurse=False)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is _VALUE and args[0].is_meta:
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        for each in (item for given in args for item in (given if isinstance(given, (tuple, list)) else (given,))):
            if id(each) in self._weights and not _by_its_layer():
                raise StyleError(reads.refusal(self._weights[id(each)]))
        return function(*args, **(kwargs or {}))


def _by_its_layer() -> bool:
    """Whether what runs now was called by one of our layers."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not (isinstance(module, Slice) and frame.f_code.co_name != "forward"):
            return type(module).__module__.startswith(_OURS)
        frame = frame.f_back
    return True


def _arguments(module: nn.Module) -> Iterator[dict[str, Any]]:
    """What the forward of `module` may be called with; under "" what goes by position."""
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return
    tokens = torch.zeros(_BATCH, _TOKENS, dtype=torch.long, device="meta")
    if "input_ids" in parameters:
        given = {"input_ids": tokens}
        if "decoder_input_ids" in parameters:
            given["decoder_input_ids"] = tokens
        yield {**given, "use_cache": False} if hasattr(module, "config") else given
        yield given
        return
    own = [each for each in list(parameters.values())[1:] if each.kind in _POSITIONAL]
    first = next((each for each in module.modules() if each._parameters), None)
    if not own or first is None:
        return
    rest = (None,) * (sum(each.default is inspect.Parameter.empty for each in own) - 1)  # a mask, say
    if isinstance(first, nn.Embedding):
        yield {"": (tokens, *rest)}
    weight = next((each for each in first._parameters.values() if each is not None and each.dim()), None)
    if weight is not None:
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        for size in ((_BATCH, _TOKENS), (_BATCH,)):
            x = torch.empty(*size, weight.shape[-1], dtype=dtype, device="meta")
            yield {"": (x, *rest)}


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor in what a forward returned: hidden states or logits. Others may count heads."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((shape for each in held if (shape := _shape(each)) is not None), None)


def _names(module: nn.Module, prefix: str) -> dict[int, str]:
    return {id(each): f"{prefix}.{name}".strip(".") for name, each in module.named_modules()}


def _stand_in(layer: ShardedLinear) -> None:
    """Makes a layer on meta give what it would, without a kernel."""
    layer.exchanged = lambda op, x, size: x.new_empty(size)
    layer.local_product = lambda x, biased=True: x.new_empty(*x.shape[:-1], layer.weight.shape[0])
    layer.gated = lambda x: x.new_empty(*x.shape[:-1], layer.weight.shape[0] // 2)


def _run_once(model: nn.Module) -> Iterator[nn.Module]:
    """Of the modules in each list, makes those that are alike give what the first of them gave; these modules."""
    for stack in [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]:
        given: dict[Any, Any] = {}
        for module in stack:
            module.forward = _remembered(module.forward, _kind(module), given)
            yield module


def _remembered(forward: Callable, kind: Any, given: dict[Any, Any]) -> Callable:
    def run(*args, **kwargs):
        key = kind, tuple(_shape(each) for each in (*args, *kwargs.values()))
        if key not in given:
            given[key] = forward(*args, **kwargs)
        return given[key]

    return run


def _kind(module: nn.Module) -> tuple:
    """What makes two modules alike: classes, sizes and settings, but for their place."""
    kind = []
    for name, each in module.named_modules():
        settings = [
            (key, value)
            for key, value in vars(each).items()
            if isinstance(value, (int, float, str, bool)) and not key.endswith(("idx", "index", "layer_id"))
        ]
        sizes = [
            (key, None if value is None else (value.shape, value.dtype)) for key, value in each._parameters.items()
        ]
        kind.append((name, type(each), tuple(settings), tuple(sizes)))
    return tuple(kind)
