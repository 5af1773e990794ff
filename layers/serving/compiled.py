"""A model's decoder layers under torch.compile: one code for all of them, with few kernels between the products.

Layers are compiled one by one, not the whole model, so that compiling takes as long as for one layer. Layers share
compiled code only if nothing that differs between them is looked at while it is traced, except tensors:

- Each layer is a call of one function, with the layer and its part of the cache as arguments.
- The cache that a layer sees, `_LayerCache`, holds that part only and passes over the layer's index.
- `detach` leaves behind torch's own marks on a static cache, which tie code to one address.

A layer ends with a sum that the next one begins to norm. For one kernel to do both, what is compiled ends with the next
layer's `input_layernorm`, where there is one. It begins with a `_Normed` in place of its own, which knows the result
already. In bf16 steps of few rows that norm comes in two halves (`step_norms`). Where a hook exchanges what a layer
returns, or changes it in place, the norm is computed anew. torch's inference mode counts no changes, so there a change
in place would go unseen. A norm with hooks is called as it is.

A step has a fixed shape. A prompt's length is dynamic, so that another one compiles nothing anew; with sequence
parallelism a rank's rows are dynamic, too. Layers that truly differ (of Gemma, some with a sliding window) are compiled
apart, and so are prompts with and without padding. The rotary embedding before the layers of a step is compiled, too:
some ten kernels on a few numbers.

Layers are compiled inside `with compiled.serving(...)` only. There an instance's `forward` is the compiled one, and the
hooks around it run as they are. Outside, the model's `generate()` runs eagerly as before. Each layer would add to its
length in the cache by one small kernel; here the lengths of all layers advance at once when the block ends.

Code is compiled for one engine. Another one, of other sizes or on another context, has its own, and none of theirs
count as recompilations of another's. A context that is exchanged in the layers is seen by its name (`iris.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

from iris import platform
from iris.errors import ArgumentError
from iris_ops.local import skinny_matmul
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..hf.gated_mlp import GatedMLP
from ..hf.norms import RMSNorm
from ..hf.styles import is_hooked
from ..sharded import ShardedLinear
from . import step_norms, whole_norms
from .prefill_attention import is_places

if TYPE_CHECKING:
    from transformers import StaticCache

_NORM = "input_layernorm"
# Kinds of layers times kinds of calls: steps, prompts with and without padding, those that fill the cache. Of dense
# layers and mixtures, with windows and without, there are more than torch's 8.
_MOST_KINDS = 64
_CONTEXT = "Developer debug context:"  # of torch's errors, whose first line may name no culprit


class CompiledLayers:
    """The decoder `layers` of `model` over a static `cache`, compiled by `backend` when they are first used.

    The cache is allocated already. A layer that cannot be compiled as a whole raises `ArgumentError` then.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], cache: StaticCache, backend: str):
        self.layers, self.cache, self.backend = layers, cache, backend
        norms = [getattr(layer, _NORM, None) for layer in layers]
        self._norms: list[Any] = [] if None in norms else norms
        self._known: tuple = None, None  # what the last layer returned, and what the next one's norm makes of that
        self._version: int | None = None  # of what it returned
        self._caches = [tuple(t.detach() for t in (c.keys, c.values, c.cumulative_length)) for c in cache.layers]
        self._lengths = [each.cumulative_length for each in cache.layers]
        step_norms.keep_in_graphs()
        self._backend = _Backend(backend, self._lengths[0].device)
        self._compiled = self._compile(_run)
        inside = {module for layer in layers for module in layer.modules()}
        self._rotary = [module for module in model.modules() if _rotates(module) and module not in inside]
        self._rotate, self._halve = self._compile(_rotate), self._compile(_first_half)
        suited = all(type(norm) is RMSNorm and norm.weight.dtype == torch.bfloat16 for norm in norms)
        # whose products torch's are leave second halves alone
        split = [each for each in inside if isinstance(each, ShardedLinear)]
        served = all(each.own_steps for each in split)
        gated = {each.merged for each in inside if isinstance(each, GatedMLP)}
        self._few_rows = min((each.few_rows(each in gated) for each in split if each.dim == 0), default=0)
        self._halved = len(layers) if suited and served else 0  # so many layers, the first, have norms in two halves

    def _compile(self, function: Any) -> Callable:
        own = types.FunctionType(function.__code__.replace(), globals())  # torch keeps what is compiled by code object
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)

    @contextmanager
    def serving(self, length: int) -> Iterator[None]:
        """For one call of the model on rows of `length` tokens."""
        for index, layer in enumerate(self.layers):
            vars(layer)["forward"] = functools.partial(self._forward, index, length)
            if self._norms:
                vars(layer)[_NORM] = _Normed(self._norms[index])  # comes before the child of that name
        rotary = self._rotary if length == 1 else []
        for module in rotary:
            vars(module)["forward"] = functools.partial(self._rotate, module)
        try:
            # One layer's hooks are not another's, though torch asks by default for hooks that were there first only.
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=_MOST_KINDS):
                yield
        finally:
            for module in [*self.layers, *rotary]:
                vars(module).pop("forward")
            for layer in self.layers:
                vars(layer).pop(_NORM, None)
            self._known = None, None
        torch._foreach_add_(self._lengths, length)

    def _forward(self, index: int, length: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[index]
        if any(each is self.cache for each in args):  # GPT-2's: all but hidden states by their names
            names = list(inspect.signature(type(layer).forward).parameters)[2:]
            args, kwargs = args[:1], {**dict(zip(names, args[1:], strict=False)), **kwargs}
        given = {key: value for key, value in kwargs.items() if value is not self.cache}
        if len(given) + 1 != len(kwargs) or not args:
            raise self._refusal(layer, "it is not called with hidden states first, and the cache after them")
        name = next(iter(kwargs.keys() - given.keys()))
        following, normed = None, None
        if self._norms:
            following = self._norms[(index + 1) % len(self.layers)]  # after the last of no use, but all are alike so
            normed = self._normed(index, length, args[0])
        shared = args[0].dim() == 2  # this rank's rows of all tokens, see `sequence`
        alone = shared and len(args[0]) == 1  # torch holds a size of 1 for fixed, and with it the length
        if 1 < length < self._caches[index][0].shape[2] and not alone:  # one that fills the cache is compiled apart
            for each in (args[0], normed) if shared else ():
                torch._dynamo.mark_dynamic(each, 0)
            for each in tree_leaves((args[shared:], given, None if shared else normed)):
                for dim in _length_dims(each) if isinstance(each, torch.Tensor) else ():
                    if each.shape[dim] == length:
                        torch._dynamo.mark_dynamic(each, dim)
        self._backend.left = False
        try:
            made, *known = self._compiled(layer, following, normed, name, *self._caches[index], args, given)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            said = lines[: 1 + lines[0].endswith(":")]  # who raised what
            said += [line.partition(_CONTEXT)[2] for line in lines if _CONTEXT in line]
            raise self._refusal(layer, " ".join(said)) from error
        if self._backend.left:  # compiled just now, with a half that found nobody to take it: whole norms are faster
            self._halved = index + 1  # but this one stays: the next step may be captured, and must not compile
        self._known = tuple(known)
        self._version = _version(known[0])
        return made

    def _normed(self, index: int, length: int, hidden: torch.Tensor) -> Any:
        """What the norm of layer `index` makes of its input: of a step of few rows in two halves (`step_norms`)."""
        norm = self._norms[index]
        known = self._known[1] if hidden is self._known[0] and _version(hidden) == self._version else None
        if is_hooked(norm):
            return norm(hidden)
        halves = index < self._halved and length == 1 and skinny_matmul.suits(hidden, self._few_rows)
        if known is None or isinstance(known, tuple) != halves:
            known = self._halve(hidden, norm.weight) if halves else norm(hidden)
        return known

    def _refusal(self, layer: nn.Module, reason: str) -> ArgumentError:
        return ArgumentError(
            f"compile is {self.backend!r}: expected False for layers of type {type(layer).__name__}, which cannot be"
            f" compiled: {reason}"
        )


def _run(
    layer: Any, following: Any, normed: Any, name: str, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor,
    args: tuple, kwargs: dict,
) -> tuple[Any, torch.Tensor, Any]:  # fmt: skip
    """What is compiled: a layer's forward, with its part of the cache as argument `name`, and the norm that follows.

    Gives what the layer returns, the hidden states, which some return first in a tuple, and their norm.
    """
    kwargs = {name: _LayerCache(keys, values, start), **kwargs}
    if following is None:
        made = type(layer).forward(layer, *args, **kwargs)
        return made, _hidden_of(made), None
    halves = isinstance(normed, tuple)
    own = layer.input_layernorm
    own.known = args[0], step_norms.second_half(normed[0], normed[1], own.norm.eps) if halves else normed
    made = type(layer).forward(layer, *args, **kwargs)
    hidden = _hidden_of(made)
    own.known = None, None
    # by its class, for hooks are not what is guarded
    ahead = step_norms.first_half(hidden, following.weight) if halves else type(following).forward(following, hidden)
    return made, hidden, ahead


def _hidden_of(made: Any) -> torch.Tensor:
    return made[0] if isinstance(made, tuple) else made


def _length_dims(of: torch.Tensor) -> tuple[int, ...]:
    """Which may be a prompt's length: of positions [T], [B, T], states [B, T, H], masks [B, 1, T, T or L], places."""
    if of.dim() == 4:
        return (3,) if is_places(of) else (2, 3) if of.dtype == torch.bool else (2,)
    return {1: (0,), 2: (1,), 3: (1,)}.get(of.dim(), ())


def _version(hidden: torch.Tensor) -> int | None:
    """How often it was changed in place, as far as torch counts that."""
    return None if hidden.is_inference() else hidden._version


def _first_half(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return step_norms.first_half(hidden, weight)


def _rotate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _rotates(module: nn.Module) -> bool:
    """Whether `module` is a rotary embedding whose frequencies do not depend on how long the text is."""
    fixed = ("default", "linear", "llama3", "yarn")
    return type(module).__name__.endswith("RotaryEmbedding") and getattr(module, "rope_type", None) in fixed


class _Backend:
    """A backend of torch.compile, and what is done to graphs before. `left`: whether a half of a norm stayed in one."""

    def __init__(self, name: str, device: torch.device):
        self.__name__, self.left = name, False  # by which torch calls it when it fails
        self.options: dict[str, dict] = {}
        try:
            self._compile = torch._dynamo.lookup_backend(name)
        except torch._dynamo.exc.InvalidBackend:
            known = ", ".join(torch._dynamo.list_backends())
            raise ArgumentError(f"compile is {name!r}: expected a bool or a backend of torch: {known}") from None
        if name == "inductor":
            # What rotates the query, and what writes keys and values, becomes one kernel of three.
            self.options["config_patches"] = {"combo_kernels": True}
            if platform.beside(device):
                from . import inductor_waits  # it imports inductor

                self.options["config_patches"] |= inductor_waits.patches()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.left = not step_norms.fold(graph.graph)
        whole_norms.fold(graph.graph)
        graph.recompile()
        return self._compile(graph, inputs, **self.options)


class _Normed:
    """A layer's norm, of which one result is known."""

    def __init__(self, norm: nn.Module):
        self.norm, self.known = norm, (None, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.known[1] if x is self.known[0] else self.norm(x)


class _LayerCache:
    """One layer's cache [B, heads, L, D], filled to `start`."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor):
        self.keys, self.values, self.start = keys, values, start

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes what is new, [B, heads, T, D], behind; all that there is then."""
        at = self.start + torch.arange(keys.shape[2], device=keys.device)
        self.keys.index_copy_(2, at, keys)
        self.values.index_copy_(2, at, values)
        return self.keys, self.values

    def get_seq_length(self, *_: object) -> torch.Tensor:
        """How many tokens there are before those that are new."""
        return self.start


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The list of the model's `count` decoder layers, of which the attention of each knows its index in the cache."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == count:
            indices = [{getattr(m, "layer_idx", None) for m in layer.modules()} - {None} for layer in stack]
            if indices == [{index} for index in range(count)] and not any("forward" in vars(each) for each in stack):
                return list(stack)
    raise ArgumentError(
        f"compile is set for a {type(model).__name__}: expected False, for it has no list of {count} decoder layers"
        " with one index each"
    )
