"""Heads of a Hugging Face attention module: how its projections are split so that heads stay whole.

The module reshapes its projections to [..., heads, head_dim] with whatever number of heads there is, and repeats each
kv head `num_key_value_groups` times. So it runs unchanged on this rank's heads once that number is right on the
instance. How many heads there are is read off the module and its weights; layers may differ from the configuration.

    projection                             rows of a head               split with
    q_proj, and any other (a gate, say)    its outputs / query heads    the query heads
    k_proj, v_proj                         its outputs / kv heads       the kv heads
    query_key_value, alone                 q, k and v of one head       the heads
    a norm or a sink of [heads, ...]       one entry                    the heads that it counts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iris.errors import StyleError
from torch import nn

from ..shard import HeadSplit, Shard, split_heads
from .styles import COLUMN, PACKED, ROW

_FUSED = "query_key_value"


def head_split(name: str, module: Any, styles: dict[str, str], world: int, rank: int) -> HeadSplit:
    """Which heads of attention `module` this rank holds; `styles` are those of its children."""
    column = {child for child, style in styles.items() if style in COLUMN | PACKED}
    row = [child for child, style in styles.items() if style in ROW]
    head_dim = getattr(module, "head_dim", getattr(module, "head_size", None))
    projections = {child for child in ("q_proj", "k_proj", "v_proj") if child != "v_proj" or hasattr(module, child)}
    known = projections <= column or column == {_FUSED}
    if not known or len(row) != 1 or not isinstance(head_dim, int) or set(styles.values()) & PACKED:
        raise StyleError(
            f"{name} is a {type(module).__name__} with {dict(sorted(styles.items()))}: heads stay whole only in an"
            " attention with head_dim, colwise q_proj, k_proj (and v_proj), and one rowwise output projection"
        )
    out = getattr(module, row[0])
    if column == {_FUSED}:
        kv_heads = heads = out.in_features // head_dim
    else:
        kv_heads = module.k_proj.out_features // head_dim
        groups = getattr(module, "num_key_value_groups", module.q_proj.out_features // module.k_proj.out_features)
        heads = kv_heads * int(groups)
    features = {child: _features(getattr(module, child), style) for child, style in sorted(styles.items())}
    if not heads or any(size % _count(child, heads, kv_heads) for child, size in features.items()):
        raise StyleError(
            f"{name} has projections of {features} features and head_dim {head_dim}: expected multiples of its {heads}"
            f" query heads, and of its {kv_heads} kv heads for k_proj and v_proj"
        )
    for child, of in module.named_modules():
        if isinstance(of, nn.ModuleList) and len(of) in (heads, kv_heads):
            raise StyleError(f"{name}.{child} holds {len(of)} modules, one for each head: such a list is not split")
    return split_heads(heads, kv_heads, world, rank)


def head_parts(child: str, linear: nn.Linear, style: str, heads: HeadSplit) -> tuple[Shard, ...]:
    """The part of one projection of an attention that holds `heads`."""
    width = _features(linear, style) // _count(child, heads.num_heads, heads.num_kv_heads)
    if style in ROW:
        return (heads.o_shard(width),)
    return (heads.kv_shard(width) if child in ("k_proj", "v_proj") else heads.q_shard(width),)


def head_parameters(
    name: str, model: nn.Module, styles: dict[str, str], heads: HeadSplit
) -> Iterator[tuple[nn.Module, str, Shard]]:
    """What else of attention `name` counts heads, as (module, key, part): its parameters in the plan, norms by head."""
    module = model.get_submodule(name)
    found = [(module, key, own) for key, own in module.named_parameters(recurse=False) if f"{name}.{key}" in styles]
    for child in module.children():
        if not isinstance(child, nn.Linear):
            found += [(child, key, own) for key, own in child.named_parameters(recurse=False) if own.dim() == 2]
    for owner, key, parameter in found:
        entries = parameter.shape[0] if parameter.dim() else 1
        if entries == heads.num_heads:
            yield owner, key, heads.q_shard(1)
        elif entries == heads.num_kv_heads:
            yield owner, key, heads.kv_shard(1)
        elif styles.get(f"{name}.{key}") in COLUMN:
            raise StyleError(
                f"{name}.{key} is a parameter of {tuple(parameter.shape)}: style {styles[f'{name}.{key}']!r} expects"
                f" one entry for each of the {heads.num_heads} query heads or {heads.num_kv_heads} kv heads"
            )


def set_local_heads(module: Any, heads: HeadSplit) -> None:
    """Tells the attention instance how many heads it has now."""
    module.num_key_value_groups = heads.groups
    local = {heads.num_heads: heads.num_local_heads, heads.num_kv_heads: heads.num_local_kv_heads}
    for attribute in ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads"):
        whole = heads.num_kv_heads if "k" in attribute else heads.num_heads
        if getattr(module, attribute, None) == whole:
            setattr(module, attribute, local[whole])


def _features(linear: nn.Linear, style: str) -> int:
    return linear.in_features if style in ROW else linear.out_features


def _count(child: str, heads: int, kv_heads: int) -> int:
    return kv_heads if child in ("k_proj", "v_proj") else heads
