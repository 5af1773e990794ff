"""Check a split before weights move: run each rank's share on meta, and compare it with a run on one rank.

Both are skeletons (see `skeleton`). The model's forward is called with tokens, then with one more and the cache. Where
a module takes no tokens, the modules inside it are tried, with inputs as wide as their parameters. The plan is refused
with the name of the module where the unsplit one runs and the split one raises, returns a tensor of another shape, or
takes a shard for the whole tensor (see `op_semantics`). So is a forward that reads a split weight itself. Modules that
cannot run on meta are not refused; their names are returned.

Equal layers of a stack run once. Code that reads the value of a tensor on meta gets 1, or True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import inspect
import sys
from types import FrameType
from typing import Any

from iris.errors import StyleError
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..linear import ColumnParallelLinear, RowParallelLinear
from ..serving.cache import cache_name
from ..sharded import ShardedLinear
from . import weight_reads
from .op_semantics import Op
from .skeleton import kind_of
from .views import WeightView

_BATCH, _TOKENS = 11, 13  # which no sizes of a model are multiples of
_WIDTHS = 4  # of inputs that are tried, of those that a module's parameters have
_OWN_PACKAGE = __name__.partition(".")[0] + "."
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_FAR, _SAME = 40, 4  # ops: between those that correspond, at most; that have to be the same to go on
_VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default
_VALUE = torch.ops.aten._local_scalar_dense.default


def prove(unsplit: nn.Module, split: nn.Module, joined: list[str], packed: list[str]) -> list[str]:
    """Raise `StyleError` where skeleton `split` does not run as skeleton `unsplit` does, which is split over one rank.

    `joined`: names of the modules that return whole tensors, for they sum or gather; `packed`: of those that cut a
    rank's outputs as they would cut all. Returns the names of the split linears that could not be tried.
    """
    proof = _Proof(joined, packed)
    proof.of(unsplit, split, "")
    linears = [name for name, module in split.named_modules() if isinstance(module, ShardedLinear)]
    return [name for name in linears if id(split.get_submodule(name)) not in proof.tried]


class _Proof:
    """The runs of a model's modules: of the model itself if it can be run, else of the modules in it."""

    def __init__(self, joined: list[str], packed: list[str]) -> None:
        self._joined, self._packed = joined, packed
        self._kinds: dict[tuple, nn.Module] = {}  # by kind, the split module that represents others
        self.tried: set[int] = set()

    def of(self, unsplit: nn.Module, split: nn.Module, name: str) -> None:
        if name and not _is_complete(split):
            return
        inside = [each for each in self._joined if each == name or not name or each.startswith(f"{name}.")]
        for arguments in _arguments(unsplit):
            expected = _Run(unsplit, name, inside, self._packed)
            if expected(arguments):
                _compare(expected, _Run(split, name, inside, self._packed), arguments, split)
                self.tried |= {id(each) for each in split.modules()}
                return
            if isinstance(expected.error, StyleError):
                raise expected.error
        for child, module in unsplit.named_children():
            shard = split.get_submodule(child)
            if (first := self._kinds.setdefault(kind_of(module), shard)) is shard:
                self.of(module, shard, f"{name}.{child}".lstrip("."))
            else:
                pairs = zip(first.modules(), shard.modules(), strict=False)
                self.tried |= {id(twin) for tried, twin in pairs if id(tried) in self.tried}


def _is_complete(module: nn.Module) -> bool:
    """Return whether linears inside are split, and a row-parallel one takes what a column-parallel one leaves split."""
    layers = [each for each in module.modules() if isinstance(each, ShardedLinear)]
    leaves = any(isinstance(each, ColumnParallelLinear) and not each.gather_output for each in layers)
    takes = any(isinstance(each, RowParallelLinear) and each.input_is_parallel for each in layers)
    return bool(layers) and leaves == takes


def _compare(expected: _Run, run: _Run, arguments: dict[str, Any], split: nn.Module) -> None:
    passed = run(arguments)
    for name in expected.order:
        first, second = expected.shapes[name], run.shapes.get(name, [])
        if first[: len(second)] != second:
            at = next(i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
            raise StyleError(f"{name} would give {second[at]} in place of {first[at]}: {_REMEDY}")
    if isinstance(run.error, StyleError):
        raise run.error
    _compare_ops(expected, run)
    if not passed:
        raise StyleError(f"{run.culprit()} would fail in its forward: {_one_line(run.error)}: {_REMEDY}") from run.error
    if run.result != expected.result:
        raise StyleError(
            f"{run.name or type(split).__name__} would give {run.result} in place of {expected.result}: {_REMEDY}"
        )


_REMEDY = "the plan, on this many ranks, does not fit what the module does; leave it whole"


def _one_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Run:
    """A call of the skeleton `module`, named `name` in the model, and the shapes that come out of `watched` modules."""

    def __init__(self, module: nn.Module, name: str, watched: list[str], packed: list[str]) -> None:
        self.module, self.name, self.watched, self.packed = module, name, watched, packed
        self.ops: list[Op] = []
        self.callers: list[tuple[str, bool]] = []  # of each op: its calling module; whether the code is ours
        self.error: Exception | None = None
        self.result: tuple[int, ...] | None = None
        self.shapes: dict[str, list] = {}
        self.order: list[str] = []

    def __call__(self, arguments: dict[str, Any]) -> bool:
        handles = [self._watch(name) for name in self.watched if name != self.name] + self._watch_fused()
        alike = _run_once(self.module)
        positional = arguments.pop("", ()) if "" in (arguments := dict(arguments)) else ()
        try:
            with torch.no_grad(), torch.device("meta"), _OnMeta(self):
                out = self.module(*positional, **arguments)
                self.result = _shape(out)
                if arguments.get("use_cache"):
                    self.module(**arguments | _next(self.module, out, arguments))
        except Exception as error:
            self.error = error
        finally:
            for handle in handles:
                handle.remove()
            for module in alike:
                vars(module).pop("forward", None)
        return self.error is None

    def _watch(self, name: str) -> RemovableHandle:
        def look(module: nn.Module, args: tuple, output: Any) -> None:
            self.shapes.setdefault(name, []).append(_shape(output))
            self.order.append(name)

        return self._submodule(name).register_forward_hook(look)

    def _watch_fused(self) -> list[RemovableHandle]:
        """Record the outputs of q, k and v projections, to see how they are taken apart."""
        self.fused: dict[int, tuple[torch.Tensor, nn.Module]] = {}

        def look(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            self.fused[id(output)] = output, module

        return [each.register_forward_hook(look) for each in self.module.modules() if hasattr(each, "taken")]

    def _submodule(self, name: str) -> nn.Module:
        return self.module.get_submodule(name.removeprefix(self.name).lstrip(".") if self.name else name)

    def culprit(self) -> str:
        """Return the name of the innermost module in whose call the error was raised."""
        names, culprit = self.names(), self.name
        trace = None if self.error is None else self.error.__traceback__
        while trace is not None:
            culprit = names.get(id(trace.tb_frame.f_locals.get("self")), culprit)
            trace = trace.tb_next
        return culprit or type(self.module).__name__

    def names(self) -> dict[int, str]:
        return {id(each): f"{self.name}.{name}".strip(".") for name, each in self.module.named_modules()}


class _OnMeta(TorchDispatchMode):
    """The interception of each op of a run: it computes those of tensors on meta, and records the ops to compare them.

    Raises where a split weight is read outside of its layer.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run, self._names = run, run.names()
        self._weights: dict[int, str] = {}
        self._tied: set[int] = set()  # embeddings, which their own modules may read
        for each in run.module.modules():
            if isinstance(each, WeightView):
                self._tied |= {id(tensor) for tensor in each._parameters.values()}
            elif isinstance(each, ShardedLinear):
                path = self._names[id(each)]
                self._weights |= {id(tensor): f"{path}.{key}" for key, tensor in each.named_parameters(recurse=False)}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _VALUE and args[0].is_meta:
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        for each in (item for given in args for item in (given if isinstance(given, (tuple, list)) else (given,))):
            if id(each) in self._weights and not _caller()[1]:
                raise StyleError(weight_reads.refusal(self._weights[id(each)]))
            if id(each) in self._tied and (head := _viewing()) is not None and not _caller()[1]:
                raise StyleError(weight_reads.refusal(f"{self._names[id(head)]}.weight"))
        out = function(*args, **(kwargs or {}))
        self._check_fused(function, args, out)
        caller, is_own = _caller()
        self._run.ops.append(Op.of(function, args, kwargs or {}, out))
        self._run.callers.append((self._names.get(id(caller), self._run.name), is_own))
        return out

    def _check_fused(self, function: Any, args: Any, out: Any) -> None:
        """Raise `StyleError` where a module divides a projection's outputs in another way than its layout does."""
        if function not in _VIEWS or id(args[0]) not in self._run.fused:
            return
        tensor, module = self._run.fused[id(args[0])]
        wrong = module.taken.wrong(tensor.shape, out.shape)  # type: ignore[union-attr,operator]
        if wrong is not None:
            raise StyleError(f"{self._names[id(module)]} would be split by heads, but its module {wrong}: {_REMEDY}")


def _compare_ops(expected: _Run, run: _Run) -> None:
    """Raise `StyleError` where an op of the split `run` means something else than the same op of the unsplit one."""
    for at, here in _pairs(expected.ops, run.ops):
        if (wrong := expected.ops[at].differs(run.ops[here])) is None:
            continue
        name, is_own = run.callers[here]
        if not (is_own or (run.ops[here].is_cut and name in run.packed)):
            raise StyleError(f"{name or type(run.module).__name__} {wrong}: {_REMEDY}")


def _pairs(first: list[Op], second: list[Op]) -> Iterator[tuple[int, int]]:
    """Yield the places of ops that correspond. Sizes decide some calls (a reshape that copies, one kv head in place of
    several): ops without a counterpart are skipped up to where the next few are the same.
    """
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i].function is second[j].function:
            yield i, j
            i, j = i + 1, j + 1
            continue
        next_pair = next(((i + skip, j + other) for total in range(1, _FAR) for skip in range(total + 1)
                      for other in (total - skip,) if _alike(first, i + skip, second, j + other)), None)  # fmt: skip
        if next_pair is None:
            return
        i, j = next_pair


def _alike(first: list[Op], i: int, second: list[Op], j: int) -> bool:
    expected, actual = first[i : i + _SAME], second[j : j + _SAME]
    return (
        len(expected) == len(actual)
        and bool(expected)
        and all(one.function is other.function for one, other in zip(expected, actual, strict=True))
    )


def _caller() -> tuple[nn.Module | None, bool]:
    """Return the innermost module whose code runs now, and whether that code is in this package.

    Of a slice whose weight is read, this is the module that reads it.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not _is_view(module, frame):
            return module, frame.f_globals.get("__name__", "").startswith(_OWN_PACKAGE)
        frame = frame.f_back
    return None, True


def _is_view(module: nn.Module, frame: FrameType) -> bool:
    """Return whether `frame` runs a property of `module` that views a part of another module's weight."""
    return isinstance(module, WeightView) and module.views_in(frame.f_code.co_name)


def _viewing() -> nn.Module | None:
    """Return the module that is computing its view of another's weight now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module if _is_view(module, frame) else None
        frame = frame.f_back
    return None


def _arguments(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments that the forward of `module` may take; those under "" are positional."""
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return
    tokens = torch.zeros(_BATCH, _TOKENS, dtype=torch.long, device="meta")
    if "input_ids" in parameters:
        given = {"input_ids": tokens}
        if "decoder_input_ids" in parameters:
            given["decoder_input_ids"] = tokens
        yield from ({**given, "use_cache": True}, {**given, "use_cache": False}, given)
        return
    own = [each for each in list(parameters.values())[1:] if each.kind in _POSITIONAL]
    many = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    first = next((each for each in module.modules() if each._parameters), None)
    if not (own or many) or first is None:
        return
    rest = (None,) * (sum(each.default is inspect.Parameter.empty for each in own) - 1)  # a mask, say
    if isinstance(first, nn.Embedding):
        yield {"": (tokens, *rest)}
    kinds = {
        (each.shape[-1], each.dtype): None for each in module.parameters() if each.dim() and each.is_floating_point()
    }
    for width, dtype in list(kinds)[:_WIDTHS]:
        for size in ((_BATCH, _TOKENS), (_BATCH,)):
            yield {"": (torch.empty(*size, width, dtype=dtype, device="meta"), *rest)}


def _next(model: nn.Module, out: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call of `model` for the next token, after one that returned `out`."""
    tokens = "decoder_input_ids" if "decoder_input_ids" in arguments else "input_ids"
    name = cache_name(model)
    return {tokens: arguments[tokens][:, :1], name: out[name]}


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of the first tensor that a forward returned, hidden states or logits. Others may count heads."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((shape for each in held if (shape := _shape(each)) is not None), None)


def _run_once(model: nn.Module) -> list[nn.Module]:
    """Make each module of a list, which represents all equal ones, run once only, and return these modules."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    modules = list({id(module): module for each in lists for module in each}.values())
    for module in modules:
        module.forward = _remembered(module.forward)
    return modules


def _remembered(forward: Callable) -> Callable:
    given: dict[tuple, Any] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        given_so = (*args, *kwargs.values())
        key = tuple(each if isinstance(each, (bool, int, float, str)) else _shape(each) for each in given_so)
        if key not in given:
            given[key] = forward(*args, **kwargs)
        return given[key]

    return run
