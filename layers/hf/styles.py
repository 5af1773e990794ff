"""Resolve a Hugging Face tensor-parallel plan to the style of each module. Reads the model, changes nothing.

A plan maps names, with `*` for layer numbers, to the names of styles. The supported styles, and their layers:

    colwise                        ColumnParallelLinear; whole heads in an attention module (see `heads`), and there
                                   also a parameter of one entry a head, or an embedding's of one column a head
    colwise_gather_output, _rep    ColumnParallelLinear(gather_output=True)
    packed_colwise                 MergedColumnParallelLinear of two equal outputs (a fused gate and up)
    rowwise                        RowParallelLinear
    rowwise_split_input, _rep      RowParallelLinear(input_is_parallel=False)
    replicate, replicated_...      replicated (the second sums gradients, of which there are none here)
    local_params                   no effect here: the parameters of the module are local tensors
    embedding_rowwise, _colwise    replicated: a lookup has no product to fuse an exchange with, and a head that is tied
                                   to the embedding shares its memory
    mla_kv_a_proj                  replicated: all heads of a latent attention share it
    moe_tp_experts                 each expert's intermediate size is split (`mixture`); the styles of its parameters
                                   give its dimension, if transformers has not marked the module
    moe_identity_expert            the identity inside of experts: on the first rank only
    recurrent_heads                ours, of a module that keeps a state for each head: whole heads (`recurrent_heads`)
    all_reduce                     a module of such parameters whose output is summed over the ranks

Every other style is refused by name with the reason (`REFUSED`), as is every quantised model, before anything is
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
import re
import sys
from typing import Any

from iris.errors import ArgumentError, DtypeError, PlatformError, StyleError
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..sharded import ShardedLinear
from .adapters import refuse_adapters
from .linear_like import as_linear
from .mixture import EXPERTS, IDENTITY, PARAMETERS
from .plans import built_in
from .recurrent_heads import STYLE as RECURRENT
from .recurrent_heads import is_recurrent, linears_of

COLUMN = {"colwise"}
GATHERED = {"colwise_gather_output", "colwise_rep"}
PACKED = {"packed_colwise"}
ROW = {"rowwise"}
ROW_SPLIT = {"rowwise_split_input", "rowwise_rep"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params",
         "mla_kv_a_proj"} | IDENTITY  # fmt: skip
SPLIT = COLUMN | GATHERED | PACKED | ROW | ROW_SPLIT
_BY_EXPERT = (
    "it gives whole experts to ranks, whose work is then as uneven as the router's choice; here every expert is"
)
_BY_EXPERT += " split over all ranks, by the style 'moe_tp_experts'"
# Styles of transformers that are not supported, and the reason.
REFUSED = {
    **dict.fromkeys(("grouped_gemm", "ep_dispatch_experts", "ep_router", "gather", "megablocks"), _BY_EXPERT),
    "sequence_parallel": "attention takes its shape from hidden states, which would be a part of the sequence; pass"
    " sequence_parallel=True to share tokens between the products",
}
# Styles with a split activation in between: splitting one without its siblings changes their input.
LINKED = COLUMN | PACKED | ROW

_LEAST = (5, 15)  # of transformers: older ones tie and cache otherwise, and would load wrong weights
_HEAD_ATTRIBUTES = ("head_dim", "head_size", "num_heads", "num_attention_heads", "num_key_value_groups", "n_head",
                    "n_heads")  # fmt: skip


def is_attention(module: nn.Module) -> bool:
    """Return whether a split of `module`'s children must keep heads whole."""
    return any(hasattr(module, attribute) for attribute in _HEAD_ATTRIBUTES)


def is_hooked(module: object) -> bool:
    """Return whether a call of it, a module or a function, is more than that of its class."""
    hooks = (getattr(module, key, None) for key in ("_forward_pre_hooks", "_forward_hooks"))
    return any(hooks) or (isinstance(module, nn.Module) and "forward" in vars(module))


def check_version(model: nn.Module) -> None:
    """Raise `PlatformError` for a model of a transformers that is too old."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return
    if tuple(map(int, re.findall(r"\d+", library.__version__)[:2])) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise PlatformError(f"transformers is {library.__version__}: expected {least} or newer")


def check_plan(plan: object) -> None:
    """Raise `ArgumentError` for an invalid plan, whatever the model."""
    named = isinstance(plan, dict) and all(isinstance(each, str) for pair in plan.items() for each in pair)
    if not named and not (isinstance(plan, str) and plan == "auto"):
        raise ArgumentError(f"plan is {plan!r}: expected 'auto' or a dict from module names to styles")


def resolve_plan(
    model: nn.Module, plan: Any, filter_fn: Callable[[str, nn.Module], bool] | None = None
) -> dict[str, str]:
    """Return full module names to styles, for every module of the plan that exists, checked to be supported."""
    check_plan(plan)
    check_version(model)
    automatic = plan == "auto"
    refuse_adapters(model)
    _, rules = rules_of(model, plan)
    _refuse_quantised(model)
    _refuse_split(model)
    _refuse_lazy(model)
    modules = dict(model.named_modules())
    names = list(modules) + [name for name, _ in model.named_parameters()]
    elsewhere = {name for name, module in modules.items() if getattr(module, "is_elsewhere", False)}  # another stage's
    styles: dict[str, str] = {}
    for pattern, style in rules.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if regex.fullmatch(name)]
        if not matches and not automatic:  # a model's own plan may name modules that this configuration does not have
            raise StyleError(f"{pattern!r} of the plan matches no module of {type(model).__name__}")
        styles.update((name, style) for name in matches if name not in elsewhere)
    styles = _by_recurrence(styles, modules, automatic)
    for name in sorted(
        styles, key=lambda name: styles[name] in SPLIT | WHOLE | EXPERTS | {RECURRENT}
    ):  # first styles that no layer supports
        _check(name, styles, modules)
    styles = styles if filter_fn is None else _filtered(styles, modules, filter_fn)
    _check_places(model, styles, modules)
    _check_halves(styles, modules, automatic)
    return styles


def _by_recurrence(styles: dict[str, str], modules: dict[str, nn.Module], automatic: bool) -> dict[str, str]:
    """Return `styles` without those inside of a module that keeps a state, which is split as a whole.

    Families have modules of several kinds under one name: a module without a state keeps the styles inside of it.
    """
    recurrent = {name for name, style in styles.items() if style == RECURRENT and name in modules}
    if automatic:
        stateless = {name for name in recurrent if not is_recurrent(modules[name])}
        styles = {name: style for name, style in styles.items() if name not in stateless}
        recurrent -= stateless
    inside = {name for name in styles for net in recurrent if name.startswith(f"{net}.")}
    return {name: style for name, style in styles.items() if name not in inside}


def rules_of(model: nn.Module, plan: Any) -> tuple[str, dict[str, str]]:
    """Return the plan's origin, in words, and its rules: the given plan, else a built-in one, else the model's own."""
    if plan != "auto":
        if not plan:
            raise StyleError("the plan is empty: pass plan={name: style}")
        return "the plan that was given", plan
    if (plan_of_family := built_in(model)) is not None:
        kind, rules = plan_of_family
        return f"the built-in plan of {kind}", rules
    rules = dict(getattr(model, "tp_plan", None) or {})
    if not rules:
        raise StyleError(
            f"{type(model).__name__} has no tensor-parallel plan, and none is built in: pass plan={{name: style}}"
        )
    return "the model's own plan", rules


def _refuse_quantised(model: nn.Module) -> None:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None or getattr(model, "hf_quantizer", None) is not None:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        raise StyleError(
            f"{type(model).__name__} is quantised ({getattr(method, 'value', method)}): expected bfloat16, float16 or"
            " float32 weights; load it dequantised"
        )


def _refuse_split(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ShardedLinear):
            raise StyleError(
                f"{name or 'model'} is a {type(module).__name__} over {module.ctx.num_ranks} ranks: expected a model"
                " that is not split yet; split it once, with a plan of all that is to be split"
            )


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} has no size yet: expected a model whose lazy modules have been called once")


def _check(name: str, styles: dict[str, str], modules: dict[str, Any]) -> None:
    style = styles[name]
    known = SPLIT | WHOLE | EXPERTS | set(PARAMETERS) | {RECURRENT}
    if style not in known:
        reason = f": {REFUSED[style]}" if style in REFUSED else f": expected one of {sorted(known)}"
        raise StyleError(f"style {style!r} of {name} is not supported{reason}")
    if style in EXPERTS if name in modules else is_of_experts(name, styles):
        return
    if style == RECURRENT and name in modules:
        for linear in linears_of(name, modules[name]):
            _check_tensors(linear, modules[linear])
        return
    by_head = style in COLUMN and name not in modules and _is_in_attention(name.rpartition(".")[0], modules)
    if style in WHOLE or by_head:
        return
    if not name:
        raise StyleError(f"the plan gives the model itself style {style!r}: expected names of modules inside of it")
    kind = "parameter, not a module"
    if name in modules:
        own = type(modules[name])
        kind = own.__name__ if own.__name__ != nn.Linear.__name__ else f"{own.__module__}.{own.__name__}"
    linear = as_linear(modules[name]) if name in modules else None
    if linear is None:
        raise StyleError(f"{name} is a {kind}: style {style!r} splits a torch.nn.Linear only")
    if style in PACKED and linear[0].out_features % 2:
        raise StyleError(f"{name} has {linear[0].out_features} outputs: style {style!r} expects two equal halves")


def _is_in_attention(name: str, modules: dict[str, Any]) -> bool:
    """Return whether `name` is an attention module, or an embedding in one, whose columns may count heads."""
    around = name.rpartition(".")[0] if isinstance(modules[name], nn.Embedding) else name
    return is_attention(modules[around])


def is_of_experts(name: str, styles: dict[str, str]) -> bool:
    """Return whether `name` is a parameter of an experts module, whose style decides for it."""
    return styles.get(name.rpartition(".")[0]) in EXPERTS and styles[name] in PARAMETERS


def check_layers(model: nn.Module, linears: Iterable[str], filtered: bool) -> None:
    """Raise for a split of `linears`, by the model's own plan, that replicates all layers on every rank.

    The plans of some state-space families do, as they split the head only, and those of models inside of a wrapper,
    whose names they do not match.
    """
    head, linears = _head(model), list(linears)
    inside = [name for name in linears if model.get_submodule(name) is not head]
    stacks = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and _holds_linears(module)
    ]
    if stacks:
        inside = [name for name in inside if any(name.startswith(f"{stack}.") for stack in stacks)]
    if inside:
        return
    if linears:
        what = f"splits {', '.join(linears)} only: each rank would hold and compute all layers, whole"
        remedy = "pass plan={name: style} to split them, or partial=True to have it so"
    else:
        what = f"names no linear that {type(model).__name__} has: each rank would hold all of it, whole"
        remedy = "pass the model that is inside if this one wraps it, plan={name: style}, or partial=True to have it so"
    by = "own plan, as filter_fn leaves it," if filtered else "own plan"
    raise StyleError(f"{type(model).__name__}'s {by} {what}; {remedy}")


def _holds_linears(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Linear) for each in module.modules())


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _check_places(model: nn.Module, styles: dict[str, str], modules: dict[str, Any]) -> None:
    """Raise where a split would lose a linear's attributes, or leave a rank without data that all of them need."""
    head = _head(model)
    holders = Counter(id(child) for module in model.modules() for child in module._modules.values())
    attributes = [value for module in model.modules() for key, value in vars(module).items() if key != "_modules"]
    listed = {id(each) for value in attributes for each in _contents(value)}
    for name, style in styles.items():
        if name not in modules and style in COLUMN and not is_of_experts(name, styles):  # one entry a head
            _check_tensor(name, model.get_parameter(name))
    linears = [name for name, style in styles.items() if style in SPLIT and name in modules]
    empty = [name for name in linears if modules[name].weight.is_meta]
    if 0 < len(empty) < len(linears):
        raise ArgumentError(
            f"{empty[0]}.weight is on the meta device, and other weights are not: expected all weights there, or none"
        )
    for name in linears:
        _check_tensors(name, modules[name])
        if is_hooked(modules[name]):
            raise StyleError(
                f"{name} has a hook or its own forward, which would be lost: expected none before the split, after"
                " which hooks see this rank's part"
            )
        if modules[name] is head and styles[name] in COLUMN | PACKED:
            raise StyleError(
                f"{name} has style {styles[name]!r}, with which each rank has only its part of the logits: expected"
                " 'colwise_gather_output'"
            )
        if id(modules[name]) in listed:
            raise StyleError(
                f"{name} is held also in a list, tuple or dict of a module, which would still call the unsplit one:"
                " expected only as a child of its parent"
            )
        if holders[id(modules[name])] > 1:
            raise StyleError(
                f"{name} is a child of several modules: expected a separate linear for each, which may share the weight"
            )


def _contents(value: object) -> Iterable:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def _check_tensors(name: str, linear: nn.Linear) -> None:
    """Raise unless a linear holds a weight, perhaps a bias, and nothing else, of kinds that layers can split."""
    for key, tensor in (*linear.named_parameters(recurse=False), *linear.named_buffers(recurse=False)):
        if key not in ("weight", "bias"):
            raise StyleError(
                f"{name} holds {key} in addition to its weight, which a split would lose: expected a plain linear"
            )
        _check_tensor(f"{name}.{key}", tensor)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if tensor.layout is torch.strided else f"{tensor.layout} tensor"
        raise StyleError(
            f"{name} is a {kind}: expected a plain torch.Tensor; split the model before it is quantised, sharded or"
            " wrapped, or leave it whole"
        )
    if tensor.dtype not in DTYPES:
        raise DtypeError(f"{name} is {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")


def _check_halves(styles: dict[str, str], modules: dict[str, nn.Module], automatic: bool) -> None:
    """Raise where one linear produces or takes a split activation and no other of the same parent matches it.

    In a user's plan also where a linear stays whole next to a split one of its sizes, such as up and gate.
    """
    linked: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style in LINKED and name in modules:
            linked.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in linked.items():
        if is_attention(modules[parent]):
            continue
        before = f"{parent}." if parent else ""
        linears = [before + key for key, child in modules[parent].named_children() if isinstance(child, nn.Linear)]
        whole = [name for name in linears if styles.get(name, "replicate") in WHOLE]
        if len({styles[name] in ROW for name in names}) == 1:
            if whole:  # else its counterpart may be elsewhere
                expected = "colwise" if styles[names[0]] in ROW else "rowwise"
                raise StyleError(
                    f"{names[0]} has style {styles[names[0]]!r} and {', '.join(whole)} stays whole, but a split"
                    f" activation passes between them: expected style {expected!r} for {whole[0]}"
                )
        elif not automatic:
            for name, other in product(names, whole):
                if styles[name] in COLUMN and modules[name].weight.shape == modules[other].weight.shape:
                    raise StyleError(
                        f"{name} has style {styles[name]!r} and {other}, of the same sizes, stays whole: expected"
                        " both split, because their outputs are combined"
                    )


def _filtered(
    styles: dict[str, str], modules: dict[str, nn.Module], filter_fn: Callable[[str, nn.Module], bool]
) -> dict[str, str]:
    selected = {name: style for name, style in styles.items() if name not in modules or filter_fn(name, modules[name])}
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        linked = [each for each in selected if each in modules and selected[each] in LINKED]
        mates = [each for each in linked if each.rpartition(".")[0] == parent]
        if style in LINKED and name not in selected and mates:
            raise StyleError(
                f"filter_fn drops {name} ({style}) and keeps {mates[0]}: a split activation passes between them, so"
                " keep or drop them together"
            )
    return selected
