"""A model with the decoder layers of one stage only: `cut(model, stage, stages)`.

The result is a shorter model of the same class. Its layers count from 0, its configuration has as many, and what the
configuration lists for each layer is cut alike; so caches, masks and the model's own forward need no change, and none
of them holds anything for layers of other stages. The user's configuration does not change: the shorter model has its
own.

Embedding and head are replaced by empty modules on the stages that use neither: the first stage embeds, the last one
has the head, and the embedding if the two are tied. What is left, such as the final norm, is small and on every stage.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from iris.errors import ArgumentError, StyleError
from iris_ops.recording import is_recording
import torch
from torch import nn

from ..hf.options import Options
from ..serving.arguments import check_tokens
from .chain import check_chain

T = TypeVar("T")

_INDEX = "layer_idx"


@dataclass(frozen=True)
class Part:
    """The layers of the unsplit model that a stage has: those of the list `stack`, from `first` up to `end`."""

    stack: str
    first: int
    end: int

    def local(self, name: str) -> str | None:
        """Return the stage's name of the unsplit model's tensor `name`; None if it belongs to another stage's
        layers."""
        if not name.startswith(f"{self.stack}."):
            return name
        index, _, rest = name.removeprefix(f"{self.stack}.").partition(".")
        if not self.first <= int(index) < self.end:
            return None
        return f"{self.stack}.{int(index) - self.first}.{rest}"

    def here(self, model: nn.Module, tensors: dict[str, T]) -> dict[str, T]:
        """Return this stage's part of `tensors`, which fill the unsplit model, under the stage's own names."""
        held = model.state_dict(keep_vars=True)
        renamed = ((self.local(name), each) for name, each in tensors.items())
        return {name: each for name, each in renamed if name is not None and name in held}

    def whole(self, name: str) -> str:
        """Return the unsplit model's name of the stage's module or tensor `name`."""
        if not name.startswith(f"{self.stack}."):
            return name
        index, dot, rest = name.removeprefix(f"{self.stack}.").partition(".")
        return f"{self.stack}.{int(index) + self.first}{dot}{rest}"

    def served(self, options: Options) -> Options:
        """Return the options of `parallelize`, given by names of the unsplit model, as they apply to this stage.

        Raises `ArgumentError` for an option that is not supported between stages.
        """
        options = options.with_whole_rows("where mesh has a 'pp', because all tokens cross the border of a stage")
        plan, keep = options.plan, options.filter_fn
        if isinstance(plan, dict):
            styles = {self._pattern(name): style for name, style in plan.items()}
            plan = {name: style for name, style in styles.items() if name is not None}
        whole = self.whole
        kept = None if keep is None else lambda name, module: keep(whole(name), module)
        return replace(options, plan=plan, filter_fn=kept)

    def _pattern(self, name: str) -> str | None:
        """Return `local` of a name in a plan, whose index may be `*`."""
        index = name.removeprefix(f"{self.stack}.").partition(".")[0]
        if not name.startswith(f"{self.stack}.") or index == "*":
            return name
        if not index.isdecimal():
            raise ArgumentError(f"plan names {name!r}: expected '*' or a number for the layer where mesh has a 'pp'")
        return self.local(name)


class NoEmbedding(nn.Module):
    """Stands for the embedding on later stages, whose hidden states come from the stage before: zeros of its shape."""

    is_elsewhere = True

    def __init__(self, words: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(words, width, dtype=dtype, device="meta")  # no parameter; its sizes are read

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return zeros [*tokens.shape, width]. Raises `ArgumentError` for tokens that the embedding would refuse."""
        words, width = self.weight.shape
        if tokens.device.type == "cpu" and not is_recording():
            check_tokens("input_ids", tokens, words)
        return torch.zeros(*tokens.shape, width, dtype=self.weight.dtype, device=tokens.device)


class NoHead(nn.Module):
    """Stands for the head on the stages before the last one, whose logits come from there (`stage`)."""

    is_elsewhere = True

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return empty logits [..., words] for hidden states [..., width]."""
        return hidden.new_empty(*hidden.shape[:-1], self.words)


def check_stages(model: Any, stages: int) -> str:
    """Return the name of the list of `model`'s decoder layers. Raises where it cannot be divided over `stages`."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not hasattr(model, "get_output_embeddings"):
        raise ArgumentError(f"model is a {name}: expected a Hugging Face language model where mesh has a 'pp'")
    text = config.get_text_config()
    if config.is_encoder_decoder or text is not config:
        raise StyleError(f"a {name} is not one chain from tokens to logits: expected a text decoder with a 'pp'")
    if getattr(config, "num_kv_shared_layers", 0):
        raise StyleError(f"layers of a {name} share keys and values, so they must be on one stage")
    count = int(text.num_hidden_layers)
    if stages > count:
        raise ArgumentError(f"mesh has {stages} stages ('pp') and {name} {count} layers: expected at most {count}")
    stacks = [each for each, modules in model.named_modules() if _is_stack(modules, count)]
    if len(stacks) != 1:
        raise StyleError(f"{name} has no list of {count} decoder layers that know their index: 'pp' cannot divide it")
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise StyleError(f"{name} has no embedding of tokens: 'pp' cannot divide it")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise StyleError(f"{name} has no linear head: 'pp' cannot divide it")
    check_chain(model, stacks[0])
    return stacks[0]


def _is_stack(modules: nn.Module, count: int) -> bool:
    """Return whether `modules` is a list of `count` layers, each of which knows its index."""
    if not isinstance(modules, nn.ModuleList) or len(modules) != count:
        return False
    indices = [{getattr(each, _INDEX, None) for each in layer.modules()} - {None} for layer in modules]
    return indices == [{index} for index in range(count)]


def cut(model: Any, stage: int, stages: int) -> Part:
    """Leave `model` the layers of `stage` only, and say which those are. Raises as `check_stages`.

    Changes attributes of modules alone; no tensor is copied or freed.
    """
    stack = check_stages(model, stages)
    layers: Any = model.get_submodule(stack)
    count = len(layers)
    part = Part(stack, count * stage // stages, count * (stage + 1) // stages)
    _shorten_configuration(model, count, part)
    for layer in layers:
        for module in layer.modules():
            if hasattr(module, _INDEX):
                setattr(module, _INDEX, getattr(module, _INDEX) - part.first)
    parent, _, child = stack.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.ModuleList(layers[part.first : part.end]))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    last = stage == stages - 1
    tied = head.weight is embedding.weight or bool(getattr(model.config, "tie_word_embeddings", False))
    if not last:
        _replace(model, head, NoHead(head.out_features))
        model.all_tied_weights_keys = {}
    if stage > 0 and not (last and tied):
        words, width = embedding.weight.shape
        _replace(model, embedding, NoEmbedding(words, width, embedding.weight.dtype))
    return part


def _shorten_configuration(model: Any, count: int, part: Part) -> None:
    whole = model.config
    short = copy.deepcopy(whole)
    for key, value in list(vars(short).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            vars(short)[key] = value[part.first : part.end]
    short.num_hidden_layers = part.end - part.first
    for module in model.modules():
        if vars(module).get("config") is whole:
            module.config = short


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
