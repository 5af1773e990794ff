"""Gated delta nets, a linear attention, with whole heads on each rank: Qwen3-Next, Qwen3.5 and their kin.

    in_proj_qkvz, in_proj_ba      rows of a key head: its q, k, values and gates; its value heads' b and a
    in_proj_qkv, conv1d.weight    all of q, all of k, all of v
    in_proj_z, _b, _a             rows of a value head
    A_log, dt_bias                an entry a value head
    out_proj                      columns of a value head; the ranks' sum

A key head and the value heads that go with it stay together. The module runs unchanged once it is told how many it has.
Where there are fewer key heads than ranks all of them compute all heads: weights are split, outputs gathered.
"""

from __future__ import annotations

from typing import Any

from iris.errors import StyleError
from torch import nn

from ..linear import ColumnParallelLinear, RowParallelLinear
from ..shard import Shard, balanced
from ..sharded import split_parameter

STYLE = "delta_heads"
_COUNTS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_BY_KEY, _MIXED, _BY_VALUE = ("in_proj_qkvz", "in_proj_ba"), "in_proj_qkv", ("in_proj_z", "in_proj_b", "in_proj_a")
_OUT = "out_proj"
_SCALED = {"num_k_heads": "k", "key_dim": "k", "num_v_heads": "v", "value_dim": "v"}


def linears_of(name: str, module: Any) -> list[str]:
    """The names of the linears of gated delta net `name`. Raises `StyleError` for another module."""
    own = {child for child, each in module.named_children() if type(each) is nn.Linear}
    known = own == {*_BY_KEY, _OUT} or own == {_MIXED, *_BY_VALUE, _OUT}
    counts = all(isinstance(getattr(module, key, None), int) for key in _COUNTS)
    if not (known and counts and {"A_log", "dt_bias"} <= set(module._parameters) and hasattr(module, "conv1d")):
        raise StyleError(
            f"{name} is a {type(module).__name__} with {', '.join(sorted(own)) or 'no linears'}: {STYLE!r} expects"
            f" a gated delta net with {', '.join(_BY_KEY)} or {_MIXED}, {', '.join(_BY_VALUE)}"
        )
    return [f"{name}.{child}" for child in sorted(own)]


def split_delta_net(module: Any, ctx: Any) -> None:
    """Carries the split out: `module` has this rank's heads after it, or parts of all of them."""
    if module.num_k_heads < ctx.num_ranks:
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                layer: nn.Module = (
                    RowParallelLinear.from_linear(linear, input_is_parallel=False, ctx=ctx)
                    if child == _OUT
                    else ColumnParallelLinear.from_linear(linear, gather_output=True, ctx=ctx)
                )
                setattr(module, child, layer.train(linear.training))
        return
    keys, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
    start, stop = balanced(keys, ctx.num_ranks, ctx.cur_rank)

    def by_key(width: int) -> Shard:
        return Shard(keys * width, ((start * width, stop * width),))

    mixed = by_key(module.head_k_dim), by_key(module.head_k_dim), by_key(group * module.head_v_dim)
    for child, linear in list(module.named_children()):
        if type(linear) is not nn.Linear:
            continue
        if child == _OUT:
            parts: tuple[Shard, ...] = (by_key(linear.in_features // keys),)
            setattr(module, child, RowParallelLinear.from_linear(linear, ctx=ctx, parts=parts).train(linear.training))
            continue
        parts = mixed if child == _MIXED else (by_key(linear.out_features // keys),)
        setattr(module, child, ColumnParallelLinear.from_linear(linear, ctx=ctx, parts=parts).train(linear.training))
    for key in ("A_log", "dt_bias"):
        split_parameter(module, key, by_key(group))
    _split_conv(module.conv1d, mixed)
    local = {"k": stop - start, "v": (stop - start) * group}
    whole = {"k": keys, "v": keys * group}
    for attribute, of in _SCALED.items():
        setattr(module, attribute, getattr(module, attribute) // whole[of] * local[of])
    module.conv_dim = 2 * module.key_dim + module.value_dim


def _split_conv(conv: Any, parts: tuple[Shard, ...]) -> None:
    """This rank's channels of a convolution that mixes none."""
    ranges, offset = [], 0
    for part in parts:
        ranges += [(start + offset, stop + offset) for start, stop in part.ranges]
        offset += part.total
    channels = Shard(offset, tuple(ranges))
    for key, parameter in conv._parameters.items():
        if parameter is not None:
            split_parameter(conv, key, channels)
    conv.in_channels = conv.out_channels = conv.groups = channels.size
