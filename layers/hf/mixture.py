"""Find how the experts of a Hugging Face mixture are stored and what they compute, by trying.

transformers marks most of its experts modules with how they store their weights (`is_transposed`, `is_concatenated`,
`has_gate`, `has_bias`); any code may come between the two products. So a copy of the module with few and random
weights is called, in three steps:

1. If `moe_gate_up` and `moe_down_all_reduce` give the same with one of their activations, these ops compute it
   (`SplitExperts`).
2. Else, if the results of two copies, each with a half of the intermediate sizes, sum to that of the whole one, the
   module's own forward runs on this rank's part, and one all-reduce follows (`SumOverRanks`).
3. Else it is refused: something in it joins the intermediate entries, a norm or a softmax, say.
"""

from __future__ import annotations

from collections.abc import Iterator
import copy
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from iris.errors import StyleError
from iris_ops.activation import Activation
import torch
from torch import nn
from torch.nn import functional as F

from ..experts import Form, OnFirstRank, SplitExperts, SumOverRanks, part_of_experts
from ..shard import Shard
from ..sharded import keep_units, split_parameter, unit_of

if TYPE_CHECKING:
    pass

EXPERTS = {"moe_tp_experts", "all_reduce"}
IDENTITY = {"moe_identity_expert"}
# Dimension, from the end, that a style splits of a parameter of all experts, and whether it holds two halves.
PARAMETERS = {
    "packed_colwise": (-2, True),
    "packed_rowwise": (-1, True),
    "colwise": (-2, False),
    "rowwise": (-1, False),
}
_HIDDEN, _INTERMEDIATE, _TOKENS, _CHOSEN = 6, 4, 5, 2  # of the trial copy
_LARGE = 1e4  # scale of the trial's hidden states at which all limits apply
_SIZES = {
    _HIDDEN: ("hidden_size", "hidden_dim"),
    _INTERMEDIATE: ("intermediate_size", "intermediate_dim", "expert_dim", "ffn_hidden_size"),
}
_ALIGNED = 8  # entries, of two bytes at least
_KINDS = ("silu", "gelu", "gelu_tanh", "relu2")


def form_of(name: str, module: Any, styles: dict[str, str]) -> Form | dict[str, tuple[int, bool]]:
    """Return how experts module `name` can be split: a form of the ops, or the split dimension of each parameter.

    `styles` are those of its parameters, which are used where transformers has not marked the module. Raises
    `StyleError` for a module whose parts do not add up.
    """
    if hasattr(module, "is_transposed"):
        form = _marked(module)
        if form is None:
            raise StyleError(
                f"{name} is a {type(module).__name__} without the weights that transformers' mark promises"
            )
        if (served := _computed_by_ops(module, form)) is not None:
            return served
        dims = {key: _dim_of(part, dim, form) for key, (part, dim) in form.parts(module, 1, 0).items()}
    else:
        dims = {
            key: PARAMETERS[style]
            for key, style in styles.items()
            if style in PARAMETERS and key in dict(module.named_parameters(recurse=False))
        }
    if not dims or not _adds_up(module, dims):
        raise StyleError(
            f"{name} is a {type(module).__name__} whose parts do not add up to the whole: its experts cannot be split"
            " by their intermediate size; leave it whole"
        )
    return dims


def _dim_of(part: Shard, dim: int, form: Form) -> tuple[int, bool]:
    return dim, part.total == 2 * form.intermediate


def split_experts(
    parent: nn.Module, child: str, form: Form | dict[str, tuple[int, bool]], ctx: Any, group: int = 1
) -> None:  # fmt: skip
    """Carry the split out: `child` of `parent` becomes this rank's part.

    `group`: how many entries along K share a scale in weights that are rounded to a format; the ranks' parts end there.
    """
    module: Any = getattr(parent, child)
    if isinstance(form, Form):
        if group > unit_of(module, form.second):
            keep_units(module, form.second, group)
        setattr(parent, child, SplitExperts(module, form, ctx).train(module.training))
        return
    parts = list(_parts(module, form, ctx.num_ranks, ctx.cur_rank))
    for key, part, dim in parts:
        split_parameter(module, key, part, dim)
    for name, inside in module.named_children():
        if isinstance(inside, nn.Identity):
            setattr(module, name, OnFirstRank(ctx))
    if any(part.size % _ALIGNED for _, part, _ in parts):
        # torch's grouped product requires rows aligned to 16 bytes; the class's own code does not
        module.forward = MethodType(inspect.unwrap(type(module).forward), module)
    module._sums = SumOverRanks(ctx)
    module.register_forward_hook(module._sums)


def is_split_experts(module: nn.Module) -> bool:
    """Return whether `split_experts` has split it."""
    return isinstance(module, SplitExperts) or hasattr(module, "_sums")


def _parts(
    module: nn.Module, dims: dict[str, tuple[int, bool]], world: int, rank: int
) -> Iterator[tuple[str, Shard, int]]:
    """Yield by parameter: this rank's part, and of which dimension."""
    for key, (dim, halves) in dims.items():
        shape = module.get_parameter(key).shape
        dim %= len(shape)
        size = shape[dim] // 2 if halves else shape[dim]
        unit = max((unit_of(module, each) for each in dims), default=1)
        start, stop = part_of_experts(size, world, rank, unit)
        ranges = ((start, stop), (start + size, stop + size)) if halves else ((start, stop),)
        yield key, Shard(shape[dim], ranges), dim


def _marked(module: Any) -> Form | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights: list[Any] = [getattr(module, key, None) for key in (first, "down_proj")]
    if any(not isinstance(each, nn.Parameter) or each.dim() != 3 for each in weights):
        return None
    intermediate = weights[1].shape[1 if module.is_transposed else 2]
    whole = weights[0].shape[2 if module.is_transposed else 1]
    if whole != intermediate * (2 if module.has_gate else 1) or getattr(module, "has_post_expert_norm", False):
        return None
    return Form(
        first, "down_proj", intermediate, None, module.is_transposed, not module.is_concatenated, module.has_gate
    )


def _computed_by_ops(module: Any, form: Form) -> Form | None:
    """Return `form` with the op activation that gives the module's results, if there is one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny, arguments = _tiny(module), _arguments(module)
    if len(arguments) != 3:
        return None
    tried = [(hidden, *arguments[1:]) for hidden in (arguments[0], arguments[0] * _LARGE)]
    expected = [given for each in tried if (given := _call(tiny, each)) is not None]
    if len(expected) < len(tried):
        return None
    allowed = 1e-5, 1e-5 * float(expected[1].abs().max())  # also where large numbers cancel out
    for activation in _candidates(module):
        one = Form(form.first, form.second, _INTERMEDIATE, activation, form.transposed, form.interleaved, form.gated)
        actual = [_by_ops(tiny, one, *each) for each in tried]
        if all(torch.allclose(a, b, rtol=1e-4, atol=c) for a, b, c in zip(actual, expected, allowed, strict=True)):
            return Form(form.first, form.second, form.intermediate, activation, form.transposed, form.interleaved,
                        form.gated)  # fmt: skip
    return None


def _candidates(module: Any) -> Iterator[Activation]:
    limit = next((value for key in ("limit", "swiglu_limit") if (value := getattr(module, key, None))), None)
    alpha = next((value for key in ("alpha", "swiglu_alpha") if (value := getattr(module, key, None))), None)
    for kind in _KINDS:
        yield Activation(kind)
        if limit:
            yield Activation(kind, limit=limit)
    if alpha:
        yield Activation("silu", alpha=alpha, limit=limit, shift=1.0)


def _by_ops(
    module: nn.Module, form: Form, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the result of the two ops, in plain torch."""
    up, down = module.get_parameter(form.first), module.get_parameter(form.second)
    if not form.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    bias, last = (getattr(module, f"{key}_bias", None) for key in (form.first, form.second))
    assert form.activation is not None
    inner = _gate_up(hidden, up, experts, bias, form.activation, form.gated, form.interleaved)
    return _down(inner, down, experts, weights, last, None)


def _adds_up(module: Any, dims: dict[str, tuple[int, bool]]) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny, arguments = _tiny(module, dims), _arguments(module)
        whole = _call(tiny, arguments)
        if whole is None:
            return False
        total = torch.zeros_like(whole)
        for rank in range(2):
            half = copy.copy(tiny)
            half._parameters, half._modules = dict(tiny._parameters), dict(tiny._modules)
            for key, part, dim in _parts(tiny, dims, 2, rank):
                split_parameter(half, key, part, dim)
            for name, inside in tiny.named_children():
                if isinstance(inside, nn.Identity) and rank:
                    half._modules[name] = _Nothing()
            result = _call(half, arguments)
            if result is None or result.shape != whole.shape:
                return False
            total += result
    return torch.allclose(total, whole, rtol=1e-4, atol=1e-5)


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _tiny(module: Any, dims: dict[str, tuple[int, bool]] | None = None) -> Any:
    """Return a copy of `module`, in float32 on the CPU, with random weights of as many experts and few entries."""
    tiny = copy.copy(module)
    tiny._parameters, tiny._modules = dict(module._parameters), dict(module._modules)
    for name, child in module.named_children():
        tiny._modules[name] = copy.deepcopy(child) if not any(True for _ in child.parameters()) else child
    for size, names in _SIZES.items():
        for name in names:
            if isinstance(vars(module).get(name), int):
                setattr(tiny, name, size)
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if dims is not None and key not in dims and parameter.dim() == 3:
            return None
        tiny._parameters[key] = nn.Parameter(
            torch.randn(_tiny_shape(module, key, parameter, dims), device="cpu"), requires_grad=False
        )
    return tiny


def _tiny_shape(module: Any, key: str, parameter: torch.Tensor, dims: dict[str, tuple[int, bool]] | None) -> list[int]:
    shape = list(parameter.shape)
    if dims is not None and key in dims:
        dim, halves = dims[key]
        dim %= len(shape)
        for at in range(1, len(shape)):
            shape[at] = (2 if halves else 1) * _INTERMEDIATE if at == dim else _HIDDEN
        return shape
    gates = 2 if getattr(module, "has_gate", True) else 1
    if key.endswith("_bias"):
        return [shape[0], _HIDDEN if "down" in key else gates * _INTERMEDIATE]
    before = "down" not in key
    sizes = [_HIDDEN, gates * _INTERMEDIATE] if before else [_INTERMEDIATE, _HIDDEN]
    return [shape[0], *(sizes if module.is_transposed else sizes[::-1])]


def _arguments(module: Any) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a forward of one, two or three arguments: values at which limits apply, too."""
    count = len(inspect.signature(type(module).forward).parameters) - 1
    experts = next(each.shape[0] for each in module._parameters.values() if each is not None)
    experts = getattr(module, "total_experts", experts)  # with the identity experts
    if count == 1:
        return (torch.randn(_CHOSEN * experts, _HIDDEN, device="cpu") * 3,)
    hidden = torch.randn(_TOKENS, _HIDDEN, device="cpu") * 3
    if count == 2:
        return hidden, torch.rand(_TOKENS, experts, device="cpu")
    chosen = torch.stack([torch.randperm(experts, device="cpu")[:_CHOSEN] for _ in range(_TOKENS)])
    return hidden, chosen, torch.rand(chosen.shape, device="cpu")


def _call(module: Any, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the result of the class's own forward, not of transformers' replacement; None if it does not run so."""
    if module is None:
        return None
    try:
        with torch.no_grad():
            result = inspect.unwrap(type(module).forward)(module, *arguments)
    except Exception:  # for other arguments it needs
        return None
    return result if isinstance(result, torch.Tensor) else None


# --- the two ops in plain torch --------------------------------------------------------------------------------------


def _gate_up(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, activation: Activation,
    gated: bool, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute `moe_gate_up`."""
    rows, chosen = A.repeat_interleave(experts.shape[1], 0), experts.reshape(-1)
    y = torch.bmm(rows.unsqueeze(1).float(), B[chosen].float()).squeeze(1)
    if bias is not None:
        y = y + bias[chosen].float()
    gate: torch.Tensor = y
    up: torch.Tensor | None = None
    if gated and interleaved:
        gate, up = y[:, ::2], y[:, 1::2]
    elif gated:
        gate, up = y.chunk(2, -1)
    return _activated(activation, gate, up).to(A.dtype)


def _activated(activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        y = gate * torch.sigmoid(activation.alpha * gate)
    elif activation.kind == "relu2":
        y = F.relu(gate).square()
    else:
        y = F.gelu(gate, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    return y if up is None else y * (up + activation.shift)


def _down(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute `moe_down_all_reduce` of one rank."""
    chosen = experts.reshape(-1)
    y = torch.bmm(A.unsqueeze(1).float(), B[chosen].float()).squeeze(1)
    if bias is not None:
        y = y + bias[chosen].float()
    y = (y.view(*experts.shape, -1) * weights.unsqueeze(-1).float()).sum(1)
    if shared is not None:
        y = y + shared.float()
    return y.to(A.dtype)
