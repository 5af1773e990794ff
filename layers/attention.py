"""Heads of a Hugging Face attention module: how its projections are split so that heads stay whole.

The module reshapes its projections to [..., heads, head_dim] with whatever number of heads there is, and repeats each
kv head `num_key_value_groups` times. So it runs unchanged on this rank's heads once that number is right on the
instance. How many heads there are is read off the module and its weights; layers may differ from the configuration.
"""

from __future__ import annotations

from iris.errors import StyleError
from torch import nn

from .plan import COLUMN, PACKED, ROW
from .shard import HeadSplit, Shard, split_heads

_HEAD_ATTRIBUTES = ("head_dim", "head_size", "num_heads", "num_attention_heads", "num_key_value_groups")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def is_attention(module: nn.Module) -> bool:
    """Whether a split of `module`'s children must keep heads whole."""
    return any(hasattr(module, attribute) for attribute in _HEAD_ATTRIBUTES)


def head_split(name: str, module: nn.Module, styles: dict[str, str], world: int, rank: int) -> HeadSplit:
    """Which heads of attention `module` this rank holds; `styles` are those of its children."""
    column = {child for child, style in styles.items() if style in COLUMN | PACKED}
    row = [child for child, style in styles.items() if style in ROW]
    known = column <= set(_PROJECTIONS) and {"q_proj", "k_proj"} <= column and len(row) == 1
    if not known or not isinstance(getattr(module, "head_dim", None), int):
        raise StyleError(
            f"{name} is a {type(module).__name__} with {dict(sorted(styles.items()))}: heads stay whole only in an"
            " attention with head_dim, colwise q_proj, k_proj (and v_proj), and one rowwise output projection"
        )
    q, k, out = module.q_proj, module.k_proj, getattr(module, row[0])
    kv_heads = k.out_features // module.head_dim
    groups = getattr(module, "num_key_value_groups", q.out_features // k.out_features)
    heads = kv_heads * int(groups)
    if k.out_features % module.head_dim or not heads or q.out_features % heads or out.in_features % heads:
        raise StyleError(
            f"{name} has q_proj, k_proj of {q.out_features}, {k.out_features} outputs and {row[0]} of {out.in_features}"
            f" inputs: expected multiples of its {heads} query heads and of head_dim {module.head_dim}"
        )
    return split_heads(heads, kv_heads, world, rank)


def head_parts(child: str, linear: nn.Linear, style: str, heads: HeadSplit) -> tuple[Shard, ...]:
    """The part of one projection of an attention that holds `heads`."""
    if style in ROW:
        return (heads.o_shard(linear.in_features // heads.num_heads),)
    if child == "q_proj":
        return (heads.q_shard(linear.out_features // heads.num_heads),)
    return (heads.kv_shard(linear.out_features // heads.num_kv_heads),)


def set_local_heads(module: nn.Module, heads: HeadSplit) -> None:
    """Tells the attention instance how many heads it has now."""
    module.num_key_value_groups = heads.groups
    local = {heads.num_heads: heads.num_local_heads, heads.num_kv_heads: heads.num_local_kv_heads}
    for attribute in ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads"):
        whole = heads.num_kv_heads if "k" in attribute else heads.num_heads
        if getattr(module, attribute, None) == whole:
            setattr(module, attribute, local[whole])
