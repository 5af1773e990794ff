"""Layers that keep a state for each head, with whole heads on each rank.

    gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid)     value heads; each key head is a group of them
    Kimi delta attention (Kimi Linear, Bailing Hybrid)     heads; each is a group
    Mamba-2 (Bamba, Falcon-H1, Granite 4, Nemotron-H, ..)  heads of the state space; a group of them shares B and C

Heads and groups are distributed like query and kv heads (`shard.split_heads`): where there are fewer groups than
ranks, several ranks hold the same group and share its heads. The module runs unchanged on a rank's heads once its
numbers of heads are local. A form describes each tensor, as blocks of entries for each head or group.

Mamba-2 has an RMSNorm over a group's channels before its last product. `gated_norm` replaces it by one of ours,
which adds up the ranks' sums of squares where they share a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from iris.errors import StyleError
import torch
from torch import nn

from ..linear import ColumnParallelLinear, RowParallelLinear
from ..shard import HeadSplit, Range, Shard, split_heads
from ..sharded import split_parameter
from .gated_norm import GatedNorm, computes_gated_norm

STYLE = "recurrent_heads"
_HEAD, _GROUP = "head", "group"
# Numbers of a module, and of its submodule for decays, by what they count.
_SCALED = {
    **dict.fromkeys(("num_heads", "num_v_heads", "value_dim", "intermediate_size", "qkv_dim"), _HEAD),
    **dict.fromkeys(("num_k_heads", "key_dim", "n_groups", "groups_time_state_size"), _GROUP),
}
_DECAY = "forget_gate"


@dataclass(frozen=True)
class _Layout:
    """The entries along a dimension: blocks of `width` entries for each head, or for each group."""

    blocks: tuple[tuple[str, int], ...]
    by_group: bool = False  # group after group, not block after block

    def total(self, heads: int, groups: int) -> int:
        return sum(width * (heads if per == _HEAD else groups) for per, width in self.blocks)

    def shard(self, held: HeadSplit) -> Shard:
        ranges = self._by_group(held) if self.by_group else self._side_by_side(held)
        return Shard(self.total(held.num_heads, held.num_kv_heads), tuple(ranges))

    def _side_by_side(self, held: HeadSplit) -> list[Range]:
        ranges, offset = [], 0
        for per, width in self.blocks:
            (start, stop), count = (held.q, held.num_heads) if per == _HEAD else (held.kv, held.num_kv_heads)
            ranges.append((offset + start * width, offset + stop * width))
            offset += count * width
        return ranges

    def _by_group(self, held: HeadSplit) -> list[Range]:
        of_group, ranges = held.num_heads // held.num_kv_heads, []
        offset = held.kv[0] * self.total(of_group, 1)
        for group in range(*held.kv):
            own = tuple(min(max(edge - group * of_group, 0), of_group) for edge in held.q)
            for per, width in self.blocks:
                start, stop = own if per == _HEAD else (0, 1)
                ranges.append((offset + start * width, offset + stop * width))
                offset += width * (of_group if per == _HEAD else 1)
        return ranges


@dataclass(frozen=True)
class _Form:
    """A kind of module: its heads and groups, and the layout of each tensor that counts them."""

    heads: int
    groups: int
    out: str  # the linear that takes the heads' outputs, `width` entries each
    width: int
    outputs: dict[str, _Layout]  # of linears
    tensors: dict[str, _Layout] = field(default_factory=dict)  # parameters and buffers, along the first such dimension
    norm: bool = False  # whether its `norm` is over the channels of a group

    def matches(self, module: nn.Module) -> bool:
        """Return whether the sizes of `module` are those of the layouts."""
        if self.groups < 1 or self.heads % self.groups:
            return False
        sizes = [(_tensor(module, f"{self.out}.weight").shape[1], self.heads * self.width)]
        for name, layout in self.outputs.items():
            sizes.append((_tensor(module, f"{name}.weight").shape[0], layout.total(self.heads, self.groups)))
        long = [
            layout.total(self.heads, self.groups) in _tensor(module, name).shape
            for name, layout in self.tensors.items()
        ]
        return all(own == expected for own, expected in sizes) and all(long)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether `module` is of a kind that is split here."""
    return _form_of(module) is not None


def linears_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of the split linears of recurrent module `name`. Raise `StyleError` for another module."""
    form = _form_of(module)
    if form is None:
        raise StyleError(
            f"{name} is a {type(module).__name__} with {', '.join(sorted(_linears(module))) or 'no linears'}: {STYLE!r}"
            " expects a gated delta net, a Kimi delta attention or a Mamba-2 mixer"
        )
    return [f"{name}.{child}" for child in (*form.outputs, form.out)]


def modules_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of all that is split of recurrent module `name`: itself, its linears and others inside."""
    form = _form_of(module)
    assert form is not None, name
    inside = dict.fromkeys(of.rpartition(".")[0] for of in form.tensors)
    return [name, *linears_of(name, module), *(f"{name}.{of}" for of in inside if of)]


def split_recurrent(module: Any, ctx: Any) -> None:
    """Carry the split out: `module` has this rank's heads after it."""
    form = _form_of(module)
    assert form is not None, type(module)
    held = split_heads(form.heads, form.groups, ctx.num_ranks, ctx.cur_rank)
    for name, layout in form.outputs.items():
        linear: Any = module.get_submodule(name)
        split: nn.Module = ColumnParallelLinear.from_linear(linear, ctx=ctx, parts=(layout.shard(held),))
        _replace(module, name, split.train(linear.training))
    last: Any = module.get_submodule(form.out)
    split = RowParallelLinear.from_linear(last, ctx=ctx, parts=(held.o_shard(form.width),))
    _replace(module, form.out, split.train(last.training))
    for name, layout in form.tensors.items():
        owner, key = _owner(module, name)
        part = layout.shard(held)
        split_parameter(owner, key, part, getattr(owner, key).shape.index(part.total))
    if form.norm:
        module.norm = GatedNorm(module.norm, held, form.heads * form.width // form.groups, ctx)
    channels = module.conv1d.weight.shape[0]
    module.conv1d.in_channels = module.conv1d.out_channels = module.conv1d.groups = module.conv_dim = channels
    for each in (module, getattr(module, _DECAY, None)):
        _count(each, held)


def _count(module: Any, held: HeadSplit) -> None:
    """Set the numbers of heads and groups of `module` to this rank's."""
    for attribute, per in _SCALED.items():
        size = getattr(module, attribute, None)
        if isinstance(size, int):
            whole, local = held.num_heads, held.num_local_heads
            if per == _GROUP:
                whole, local = held.num_kv_heads, held.num_local_kv_heads
            setattr(module, attribute, size // whole * local)


def _form_of(module: Any) -> _Form | None:
    """Return how `module` is split; None if it is of no known kind, or of other sizes."""
    own = _linears(module)
    if not isinstance(getattr(module, "conv1d", None), nn.Conv1d):
        return None
    try:
        form = _delta_net(module, own) or _kimi_delta(module, own) or _mamba2(module, own)
        return form if form is not None and form.matches(module) else None
    except (AttributeError, TypeError):  # a module of the same name without these attributes
        return None


def _delta_net(module: Any, own: set[str]) -> _Form | None:
    if not hasattr(module, "num_v_heads"):
        return None
    key, value, one = (_GROUP, module.head_k_dim), (_HEAD, module.head_v_dim), (_HEAD, 1)
    mixed = _Layout((key, key, value))
    known: list[dict[str, _Layout]] = [
        {"in_proj_qkvz": _Layout((key, key, value, value), True), "in_proj_ba": _Layout((one, one), True)},
        {"in_proj_qkv": mixed, **_of((value,), "in_proj_z"), **_of((one,), "in_proj_b", "in_proj_a")},
        {**_of((key,), "q_proj", "k_proj"), **_of((value,), "v_proj", "g_proj"), **_of((one,), "a_proj", "b_proj")},
    ]
    out = "o_proj" if "o_proj" in own else "out_proj"
    outputs = next((each for each in known if {*each, out} == own), None)
    if outputs is None:
        return None
    tensors = {**_of((one,), "A_log", "dt_bias"), **_convolution(module, mixed)}
    return _Form(module.num_v_heads, module.num_k_heads, out, module.head_v_dim, outputs, tensors)


def _kimi_delta(module: Any, own: set[str]) -> _Form | None:
    whole = {"g_a_proj", f"{_DECAY}.f_a_proj"}  # to a few entries, of which all heads take theirs
    by_head = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", f"{_DECAY}.f_proj", f"{_DECAY}.f_b_proj")
    if not {"q_proj", "k_proj", "v_proj", "b_proj", "o_proj"} <= own or own - whole - {*by_head, "b_proj", "o_proj"}:
        return None
    channel, one = (_HEAD, module.head_dim), (_HEAD, 1)
    outputs = {**_of((channel,), *(name for name in by_head if name in own)), **_of((one,), "b_proj")}
    tensors = {
        **_of((channel,), f"{_DECAY}.dt_bias"),
        **_of((one,), f"{_DECAY}.A_log"),
        **_convolution(module, _Layout((channel,) * 3)),
    }
    return _Form(module.num_heads, module.num_heads, "o_proj", module.head_dim, outputs, tensors)


def _mamba2(module: Any, own: set[str]) -> _Form | None:
    if own != {"in_proj", "out_proj"} or not hasattr(module, "n_groups"):
        return None
    channel, state, one = (_HEAD, module.head_dim), (_GROUP, module.ssm_state_size), (_HEAD, 1)
    into = _Layout((channel, channel, state, state, one))
    tensors = {**_of((one,), "A_log", "D", "dt_bias"), **_convolution(module, _Layout((channel, state, state)))}
    if getattr(module, "mup_vector", None) is not None:  # a factor for each output of in_proj
        tensors["mup_vector"] = into
    norm = not isinstance(module.norm, nn.Identity)
    if norm and not computes_gated_norm(module.norm, module.n_groups):
        return None
    return _Form(module.num_heads, module.n_groups, "out_proj", module.head_dim, {"in_proj": into}, tensors, norm)


def _of(blocks: tuple[tuple[str, int], ...], *names: str) -> dict[str, _Layout]:
    return dict.fromkeys(names, _Layout(blocks))


def _convolution(module: Any, channels: _Layout) -> dict[str, _Layout]:
    """Return the layouts of a convolution that mixes no channels."""
    if module.conv1d.groups != module.conv1d.out_channels:
        raise TypeError("its channels are mixed")
    return {f"conv1d.{key}": channels for key, own in module.conv1d.named_parameters() if own is not None}


def _linears(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_modules() if type(each) is nn.Linear}


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    parent, _, key = name.rpartition(".")
    return module.get_submodule(parent), key


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    owner, key = _owner(module, name)
    return getattr(owner, key)


def _replace(module: nn.Module, name: str, by: nn.Module) -> None:
    owner, key = _owner(module, name)
    setattr(owner, key, by)
