"""Find the outputs of a rank's heads in projections that hold q, k and v in one weight.

    layout       outputs, one after the other                                 used by
    by head      q, k and v of a head, then those of the next                 GPT-NeoX, BLOOM, Falcon RW
    blocks       q of all heads, k of all kv heads, v of all kv heads         GPT-2, MPT; Falcon 7B, StarCoder, DBRX
    by group     the query heads of a kv head, its k, its v, the next group   Falcon 40B
    by shard     for each of `mp_num` parts of the heads, q, then v, then k    CodeGen

A rank's part has the layout that the module expects once its numbers of heads are local; CodeGen's then has one part.

The names of the module and its projection determine the layout, and other families may use them otherwise. So the proof
of a split checks how a forward divides the projection's outputs (`Taken`), which shows whether heads come first.

Where the model computes a bias or a mask for each head (ALiBi) and passes it to its attentions, a hook before an
attention keeps the entries of the rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import inspect
from typing import Any

import torch

from ..shard import HeadSplit, Range, Shard

BY_HEAD, BLOCKS, BY_GROUP, BY_SHARD = "by head", "blocks", "by group", "by shard"
_SHARDS = "mp_num"
_SIZED = "Wqkv"  # DBRX's module takes `hidden_size` of its outputs for the queries
# Arguments of an attention's forward that have entries for each head.
_BIASES = ("alibi", "position_bias")
_MASK = "attention_mask"


def layout_of(module: Any, child: str) -> str | None:
    """Return the layout of q, k, v in projection `child` of attention `module`; None if it may not hold all three."""
    several = getattr(module, "multi_query", None)  # query heads with one k and v
    if child == "query_key_value":
        return BY_GROUP if getattr(module, "new_decoder_architecture", False) else BLOCKS if several else BY_HEAD
    if child == "c_attn":
        return BY_HEAD if several is False else BLOCKS
    if child == _SIZED and hasattr(module, "clip_qkv"):
        return BLOCKS
    return BY_SHARD if child == "qkv_proj" and isinstance(getattr(module, _SHARDS, None), int) else None


@dataclass(frozen=True)
class Taken:
    """The expected division of a rank's outputs of a fused projection."""

    layout: str
    heads: HeadSplit

    def wrong(self, before: Sequence[int], after: Sequence[int]) -> str | None:
        """Return the error in a view of outputs [..., n] as [..., first, ..]; None if none is known."""
        inner = len(before) - 1
        if len(after) <= len(before) or tuple(after[:inner]) != tuple(before[:inner]):
            return None
        first, heads, groups = after[inner], self.heads.num_local_heads, self.heads.num_local_kv_heads
        expected = {BY_HEAD: heads, BY_GROUP: groups}.get(self.layout)
        # blocks are three of equally many heads, or all heads in a row; three heads look alike either way
        otherwise = self.layout == BLOCKS and first == heads != 3
        if not otherwise and expected in (None, first):
            return None
        view = " x ".join(map(str, after[inner:]))
        return f"takes its {before[-1]} outputs as {view}, which are no {heads} query heads {self.layout}"


def fused_kv_heads(outputs: int, heads: int, head_dim: int) -> int:
    """Return the number of kv heads next to `heads` query heads in `outputs`; 0 if these are not whole heads."""
    count, rest = divmod(outputs, head_dim)
    return (count - heads) // 2 if not rest and (count - heads) % 2 == 0 else 0


def fused_parts(module: Any, child: str, outputs: int, heads: HeadSplit) -> tuple[Shard, ...]:
    """Return the part of fused projection `child`, with `outputs` outputs, that holds `heads`."""
    layout, width = layout_of(module, child), outputs // (heads.num_heads + 2 * heads.num_kv_heads)
    if layout == BY_HEAD:
        return (heads.q_shard(3 * width),)
    if layout == BLOCKS:
        return (heads.q_shard(width), heads.kv_shard(width), heads.kv_shard(width))
    ranges = _by_group(heads, width) if layout == BY_GROUP else _by_shard(heads, width, getattr(module, _SHARDS))
    return (Shard(outputs, tuple(ranges)),)


def _by_group(heads: HeadSplit, width: int) -> list[Range]:
    group, ranges = heads.num_heads // heads.num_kv_heads, []
    for kv in range(*heads.kv):
        begin, (first, last) = kv * (group + 2), (edge - kv * group for edge in heads.q)
        ranges += [(begin + max(first, 0), begin + min(last, group)), (begin + group, begin + group + 2)]
    return [(start * width, stop * width) for start, stop in ranges]


def _by_shard(heads: HeadSplit, width: int, shards: int) -> list[Range]:
    size, (first, last) = heads.num_heads * width // shards, (edge * width for edge in heads.q)
    ranges = []
    for which in range(3):  # q, v, k
        for shard in range(shards):
            start, stop = (min(max(edge - shard * size, 0), size) for edge in (first, last))
            begin = (3 * shard + which) * size
            ranges += [(begin + start, begin + stop)] if start < stop else []
    return ranges


def keep_own_heads(module: Any, heads: HeadSplit) -> None:
    """Make attention `module` run on `heads`: on their part of its one projection, and their entries of biases."""
    if isinstance(getattr(module, _SHARDS, None), int):
        setattr(module, _SHARDS, 1)
    if hasattr(module, _SIZED) and isinstance(getattr(module, "hidden_size", None), int):
        module.hidden_size = module.hidden_size // heads.num_heads * heads.num_local_heads
    takes = inspect.signature(type(module).forward).parameters
    if heads.num_local_heads < heads.num_heads and any(name in takes for name in _BIASES):
        module.register_forward_pre_hook(_OwnHeads(heads), with_kwargs=True)


class _OwnHeads:
    """A forward pre-hook that cuts biases [heads, ...], [B*heads, ...] or [B, heads, T, L], and masks like the last.

    A bias [B, heads, T, L] of fewer heads is this rank's already: an attention with a separate table computed it.
    """

    def __init__(self, heads: HeadSplit) -> None:
        self._count, (self._start, stop) = heads.num_heads, heads.q
        self._own = stop - self._start

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {name: kwargs[name] for name in _BIASES if isinstance(kwargs.get(name), torch.Tensor)}
        if isinstance(mask := kwargs.get(_MASK), torch.Tensor) and mask.dim() == 4:
            given[_MASK] = mask
        return args, {**kwargs, **{name: self._of(each) for name, each in given.items()}}

    def _of(self, bias: torch.Tensor) -> torch.Tensor:
        if bias.dim() == 4:
            return bias.narrow(1, self._start, self._own) if bias.shape[1] == self._count else bias
        by_head = bias.unflatten(0, (-1, self._count))
        return by_head.narrow(1, self._start, self._own).flatten(0, 1)
