"""Guard a split model where its class's own method would break it.

A method that a model inherits knows nothing of parts: it would draw new weights on each rank by itself, put a whole
matrix in a part's place, or train. Such methods of this instance (no class is patched) do the right thing on parts, or
raise `ArgumentError` with the remedy. Moves and conversions keep a tied head a view of its embedding, and a move to
another device than the context's, or to a dtype that no op supports, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from iris.errors import ArgumentError, DeviceError, DtypeError
from iris_ops.recording import is_recording
import torch

from ..sharded import is_dtensor
from .caches import check_caches
from .styles import DTYPES
from .tied import retie

if TYPE_CHECKING:
    from iris.context import Iris

_BEFORE = "call it on the unsplit model, and split that"
BATCHING = "each process would schedule requests by itself; use layers.Engine or generate()"
_INFERENCE = "a split model is for inference; train it unsplit"
# Methods of a Hugging Face model, and the remedy.
_REFUSED = {
    "resize_token_embeddings": _BEFORE,
    "resize_position_embeddings": _BEFORE,
    "set_input_embeddings": _BEFORE,
    "set_output_embeddings": _BEFORE,
    "set_decoder": _BEFORE,
    "set_encoder": _BEFORE,
    "init_weights": "each rank would draw different weights; " + _BEFORE,
    "initialize_weights": "each rank would draw different weights; " + _BEFORE,
    "post_init": "each rank would draw different weights; " + _BEFORE,
    "dequantize": _BEFORE,
    "add_adapter": "merge the adapter into the unsplit model, and split that",
    "load_adapter": "merge the adapter into the unsplit model, and split that",
    "gradient_checkpointing_enable": _INFERENCE,
    "activation_checkpointing_enable": _INFERENCE,
    "enable_input_require_grads": _INFERENCE,
    "generate_batch": BATCHING,
    "init_continuous_batching": BATCHING,
    "continuous_batching_context_manager": BATCHING,
    "push_to_hub": "each rank would send its own; save_pretrained(folder), and upload that folder",
}


def guard(model: Any, ctx: Iris) -> None:
    """Give this instance its own `train`, `_apply`, `tie_weights` and refusals, and put it into eval mode."""
    watch_calls(model)
    vars(model).update(train=MethodType(_train, model), _apply=MethodType(_applying(ctx), model))
    model.eval()
    if hasattr(type(model), "tie_weights"):
        model.tie_weights = MethodType(_tie_weights, model)
    for module in model.modules():
        if not hasattr(type(module), "tie_weights"):
            continue  # no Hugging Face model
        module.train = MethodType(_train, module)
        for name, remedy in _REFUSED.items():
            if hasattr(type(module), name):
                setattr(module, name, MethodType(_refusing(name, remedy), module))


def check_plain(call: str, arguments: dict[str, Any]) -> None:
    """Raise `ArgumentError` for a DTensor among the named `arguments` of a `call`."""
    for name, value in arguments.items():
        if is_dtensor(value):
            raise ArgumentError(
                f"{name} of {call} is a DTensor with placements {value.placements}: expected a plain tensor, the same"
                f" on every rank; pass {name}.full_tensor()"
            )


def watch_calls(model: Any) -> None:
    """Add a hook that refuses what a forward cannot take, DTensors and caches of other heads.

    The hook is the base model's, which gets the ids and the cache of a model with a head, too.
    """
    model = getattr(model, "base_model", model)
    if _check_call not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_call, with_kwargs=True)


def _check_call(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if is_recording():
        return
    check_plain("the forward", {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs})
    check_caches(model, kwargs)


def _train(self: Any, mode: bool = True) -> Any:
    if mode:
        raise ArgumentError(f"mode is True: expected False, {_INFERENCE}")
    return type(self).train(self, mode)


def _applying(ctx: Iris) -> Callable:
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        trial = fn(torch.empty(0, dtype=torch.float32, device=ctx.device))
        if trial.device != ctx.device:
            raise DeviceError(f"device is {trial.device}: expected {ctx.device}, the context's, for a split model")
        if trial.dtype not in DTYPES:
            raise DtypeError(f"dtype is {trial.dtype}: expected one of {', '.join(map(str, DTYPES))} for a split model")
        type(self)._apply(self, fn, recurse)
        retie(self)  # a move or a conversion may give each place of a parameter a separate copy
        return self

    return _apply


def _tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
    """Tie again: split heads to the rows of their embedding, all other weights as the class does."""
    split = {name: module for name, module in self.named_modules() if hasattr(module, "load_shard")}
    pairs = self.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in pairs.items():
        (parent, _, key), (source_parent, _, _) = target.rpartition("."), source.rpartition(".")
        if getattr(split.get(parent), "tied_to", None) != source and (parent in split or source_parent in split):
            raise ArgumentError(
                f"{target} was not tied to {source} before the split, and cannot be tied now: " + _BEFORE
            )
    for target, source in pairs.items():
        parent, _, key = target.rpartition(".")
        if parent not in split:
            setattr(self.get_submodule(parent), key, self.get_parameter_or_buffer(source))
    retie(self)


def _refusing(name: str, remedy: str) -> Callable:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(f"{name} cannot be called on a split model: {remedy}")

    return refuse
