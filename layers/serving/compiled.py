"""Compile a model's decoder layers: one code for all of them, with few kernels between the products.

Layers are compiled one by one, not the whole model, so that compiling takes as long as for one layer. Layers share
compiled code only if tracing reads nothing that differs between them, except tensors:

- Each layer is a call of one function, with the layer and its part of the cache as arguments.
- The cache that a layer sees, `_LayerCache`, holds that part only and ignores the layer's index.
- `detach` drops torch's own marks on a static cache, which tie code to one address.

A layer ends with a sum that the next one begins to norm. For one kernel to do both, the compiled function ends with the
next layer's `input_layernorm`, where there is one. It begins with a `_Normed` in place of its own, which knows the
result already. In bf16 steps of few rows that norm comes in two halves (`step_norms`). Where a hook replaces the output
of a layer, or changes it in place, the norm is computed anew. torch's inference mode counts no changes, so there a
change in place would go unseen. A norm with hooks is called unchanged.

A step has a fixed shape. A prompt's length is dynamic, so that another length recompiles nothing; with sequence
parallelism a rank's rows are dynamic, too. Layers that truly differ (of Gemma, some with a sliding window) are compiled
separately, and so are prompts with and without padding. The rotary embedding before the layers of a step is compiled,
too: some ten kernels on a few numbers.

Layers are compiled inside `with compiled.serving(...)` only. There an instance's `forward` is the compiled one, and the
hooks around it run unchanged. Outside, the model's `generate()` runs eagerly as before. Each layer would add to its
length in the cache by one small kernel; here the lengths of all layers advance at once when the block ends.

Code is compiled for one engine. An engine of other sizes or on another context has its own, and its
recompilations count for itself. A context that is replaced in the layers is looked up by its name (`iris.registry`).
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
# Kinds of layers times kinds of calls: steps, prompts with and without padding, prompts that fill the cache. Dense
# layers and mixtures, with windows and without, make more than torch's limit of 8.
_MOST_KINDS = 64
_CONTEXT = "Developer debug context:"  # in torch's errors, whose first line may name no cause


class CompiledLayers:
    """The decoder `layers` of `model` over a static `cache`, compiled by `backend` at their first use.

    The cache is allocated already. A layer that cannot be compiled as one graph raises `ArgumentError` then.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], cache: StaticCache, backend: str):
        self.layers, self.cache, self.backend = layers, cache, backend
        norms = [getattr(layer, _NORM, None) for layer in layers]
        self._norms: list[Any] = [] if None in norms else norms
        self._known: tuple = None, None  # the last layer's output, and the next layer's norm of it
        self._version: int | None = None  # of that output
        self._caches = [tuple(t.detach() for t in (c.keys, c.values, c.cumulative_length)) for c in cache.layers]
        self._lengths = [each.cumulative_length for each in cache.layers]
        step_norms.keep_in_graphs()
        self._backend = _Backend(backend, self._lengths[0].device)
        self._compiled = self._compile(_run)
        inside = {module for layer in layers for module in layer.modules()}
        self._rotary = [module for module in model.modules() if _rotates(module) and module not in inside]
        self._rotate, self._halve = self._compile(_rotate), self._compile(_first_half)
        eligible = all(type(norm) is RMSNorm and norm.weight.dtype == torch.bfloat16 for norm in norms)
        # second halves need our products: torch's cannot take them
        split = [each for each in inside if isinstance(each, ShardedLinear)]
        own_steps = all(each.own_steps for each in split)
        gated = {each.merged for each in inside if isinstance(each, GatedMLP)}
        self._few_rows = min((each.storage.few_rows(each, each in gated) for each in split if each.dim == 0), default=0)
        self._halved = (
            len(layers) if eligible and own_steps else 0
        )  # the first layers, as many as this, have norms in two halves

    def _compile(self, function: Any) -> Callable:
        own = types.FunctionType(function.__code__.replace(), globals())  # torch caches compiled code by code object
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)

    @contextmanager
    def serving(self, length: int) -> Iterator[None]:
        """Run compiled layers inside the block, for one call of the model on rows of `length` tokens."""
        for index, layer in enumerate(self.layers):
            vars(layer)["forward"] = functools.partial(self._forward, index, length)
            if self._norms:
                vars(layer)[_NORM] = _Normed(self._norms[index])  # takes precedence over the child of that name
        rotary = self._rotary if length == 1 else []
        for module in rotary:
            vars(module)["forward"] = functools.partial(self._rotate, module)
        try:
            # Hooks differ by layer, though torch's default guards only on hooks that existed first.
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
        if any(each is self.cache for each in args):  # GPT-2's: name all but hidden states
            names = list(inspect.signature(type(layer).forward).parameters)[2:]
            args, kwargs = args[:1], {**dict(zip(names, args[1:], strict=False)), **kwargs}
        given = {key: value for key, value in kwargs.items() if value is not self.cache}
        if len(given) + 1 != len(kwargs) or not args:
            raise self._refusal(layer, "it is not called with hidden states first, and the cache after them")
        name = next(iter(kwargs.keys() - given.keys()))
        following, normed = None, None
        if self._norms:
            following = self._norms[(index + 1) % len(self.layers)]  # unused after the last layer, for uniformity
            normed = self._normed(index, length, args[0])
        shared = args[0].dim() == 2  # this rank's rows of all tokens, see `sequence`
        alone = shared and len(args[0]) == 1  # torch specialises on a size of 1, and with it on the length
        if 1 < length < self._caches[index][0].shape[2] and not alone:  # a full cache is compiled separately
            for each in (args[0], normed) if shared else ():
                torch._dynamo.mark_dynamic(each, 0)
            for each in tree_leaves((args[shared:], given, None if shared else normed)):
                for dim in _length_dims(each) if isinstance(each, torch.Tensor) else ():
                    if each.shape[dim] == length:
                        torch._dynamo.mark_dynamic(each, dim)
        self._backend.has_stray_half = False
        try:
            output, *known = self._compiled(layer, following, normed, name, self._caches[index], args, given)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            text = lines[: 1 + lines[0].endswith(":")]  # where torch raised, and its error
            text += [line.partition(_CONTEXT)[2] for line in lines if _CONTEXT in line]
            raise self._refusal(layer, " ".join(text)) from error
        if self._backend.has_stray_half:  # compiled just now, with a half that no product takes: whole norms are faster
            self._halved = index + 1  # this layer keeps its halves: the next step may be captured, and must not compile
        self._known = tuple(known)
        self._version = _version(known[0])
        return output

    def _normed(self, index: int, length: int, hidden: torch.Tensor) -> Any:
        """Return the norm of layer `index` of its input: in a step of few rows in two halves (`step_norms`)."""
        norm = self._norms[index]
        known = self._known[1] if hidden is self._known[0] and _version(hidden) == self._version else None
        if is_hooked(norm):
            return norm(hidden)
        halves = index < self._halved and length == 1 and skinny_matmul.is_eligible(hidden, self._few_rows)
        if known is None or isinstance(known, tuple) != halves:
            known = self._halve(hidden, norm.weight) if halves else norm(hidden)
        return known

    def _refusal(self, layer: nn.Module, reason: str) -> ArgumentError:
        return ArgumentError(
            f"compile is {self.backend!r}: expected False for layers of type {type(layer).__name__}, which cannot be"
            f" compiled: {reason}"
        )


def _run(
    layer: Any, following: Any, normed: Any, name: str, cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    args: tuple, kwargs: dict,
) -> tuple[Any, torch.Tensor, Any]:  # fmt: skip
    """Run a layer's forward, with its part of the cache as argument `name`, and the following norm: the compiled code.

    `cache`: the keys, the values, and where the step begins.

    Returns the layer's output, the hidden states (some layers return them first in a tuple), and their norm.
    """
    kwargs = {name: _LayerCache(*cache), **kwargs}
    if following is None:
        output = type(layer).forward(layer, *args, **kwargs)
        return output, _hidden_of(output), None
    halves = isinstance(normed, tuple)
    own = layer.input_layernorm
    own.known = args[0], step_norms.second_half(normed[0], normed[1], own.norm.eps) if halves else normed
    output = type(layer).forward(layer, *args, **kwargs)
    hidden = _hidden_of(output)
    own.known = None, None
    # by its class: hooks are not guarded on
    normed = step_norms.first_half(hidden, following.weight) if halves else type(following).forward(following, hidden)
    return output, hidden, normed


def _hidden_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _length_dims(of: torch.Tensor) -> tuple[int, ...]:
    """Return dims that may be a prompt's length: positions [T], [B, T], states [B, T, H], masks [B, 1, T, T or L]."""
    if of.dim() == 4:
        return (3,) if is_places(of) else (2, 3) if of.dtype == torch.bool else (2,)
    return {1: (0,), 2: (1,), 3: (1,)}.get(of.dim(), ())


def _version(hidden: torch.Tensor) -> int | None:
    """Return how often `hidden` was changed in place, as far as torch counts that."""
    return None if hidden.is_inference() else hidden._version


def _first_half(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return step_norms.first_half(hidden, weight)


def _rotate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _rotates(module: nn.Module) -> bool:
    """Return whether `module` is a rotary embedding whose frequencies do not depend on the length of the text."""
    fixed = ("default", "linear", "llama3", "yarn")
    return type(module).__name__.endswith("RotaryEmbedding") and getattr(module, "rope_type", None) in fixed


class _Backend:
    """A backend of torch.compile after graph passes. `has_stray_half`: half of a norm was not folded into a product."""

    def __init__(self, name: str, device: torch.device):
        self.__name__, self.has_stray_half = name, False  # torch's errors name it
        self.options: dict[str, dict] = {}
        try:
            self._compile = torch._dynamo.lookup_backend(name)
        except torch._dynamo.exc.InvalidBackend:
            known = ", ".join(torch._dynamo.list_backends())
            raise ArgumentError(f"compile is {name!r}: expected a bool or a backend of torch: {known}") from None
        if name == "inductor":
            # The kernel that rotates the query and those that write keys and values become one.
            self.options["config_patches"] = {"combo_kernels": True}
            if platform.pdl_options(device):
                from . import inductor_waits  # it imports inductor

                self.options["config_patches"] |= inductor_waits.patches()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.has_stray_half = not step_norms.fold(graph.graph)
        whole_norms.fold(graph.graph)
        graph.recompile()
        return self._compile(graph, inputs, **self.options)


class _Normed:
    """A layer's norm, one of whose results is known."""

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
        """Append new keys and values, [B, heads, T, D]; return all of them."""
        at = self.start + torch.arange(keys.shape[2], device=keys.device)
        self.keys.index_copy_(2, at, keys)
        self.values.index_copy_(2, at, values)
        return self.keys, self.values

    def get_seq_length(self, *_: object) -> torch.Tensor:
        """Return how many tokens precede the new ones."""
        return self.start


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the model's list of `count` decoder layers, each with an attention that has its index in the cache."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == count:
            indices = [{getattr(m, "layer_idx", None) for m in layer.modules()} - {None} for layer in stack]
            if indices == [{index} for index in range(count)] and not any("forward" in vars(each) for each in stack):
                return list(stack)
    raise ArgumentError(
        f"compile is set for a {type(model).__name__}: expected False, because it has no list of {count} decoder layers"
        " with one index each"
    )
