"""Split the projections of a Hugging Face attention module so that heads stay whole.

The module reshapes its projections to [..., heads, head_dim] with any number of heads, and repeats each
kv head `num_key_value_groups` times. So it runs unchanged on this rank's heads once that number is right on the
instance. The number of heads follows from the module and its weights; layers may differ from the configuration.

    projection                             rows of a head               split with
    q_proj, and any other (a gate, say)    its outputs / query heads    the query heads
    k_proj, v_proj                         its outputs / kv heads       the kv heads
    one for q, k and v, alone              as in `fused_heads`          the heads
    kv_b_proj, of a latent attention       its outputs / heads          the heads; all before it is replicated
    a norm or a sink of [heads, ...]       one entry                    the heads that it counts
    an embedding of [positions, heads]     one column                   the heads, if the plan names its weight

Other families have other names (`_NAMES`), and some have the output projection in a module next to the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iris.errors import StyleError
from torch import nn

from ..shard import HeadSplit, Shard, split_heads
from .caches import remember_heads
from .fused_heads import BY_GROUP, BY_HEAD, fused_kv_heads, fused_parts, keep_own_heads, layout_of
from .linear_like import as_linear
from .styles import COLUMN, PACKED, ROW

_LATENT = "kv_b_proj"
_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"),
          ("q", "k", "v"))  # fmt: skip
_OF_KV = {name for names in _NAMES for name in names[1:]}
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "attn_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
# Sizes of all heads together that a forward reads from its module.
_TOGETHER = ("all_head_size", "split_size", "embed_dim", "inner_dim")


def output_of(name: str, styles: dict[str, str]) -> str | None:
    """Return the name of the linear that takes the heads of attention `name`: inside of it, or next to it."""
    for around in (name, name.rpartition(".")[0]):
        outputs = [each for each, style in styles.items() if style in ROW and each.startswith(f"{around}.")]
        outputs = [each for each in outputs if around != name or each.rpartition(".")[0] == name]
        if outputs:
            return outputs[0] if len(outputs) == 1 else None
    return None


def head_split(name: str, model: nn.Module, styles: dict[str, str], world: int, rank: int) -> HeadSplit:
    """Return the heads of attention `name` that this rank holds; `styles` are the model's."""
    module: Any = model.get_submodule(name)
    own = {each.rpartition(".")[2]: style for each, style in styles.items() if each.rpartition(".")[0] == name}
    column = {child for child, style in own.items() if style in COLUMN | PACKED}
    output = output_of(name, styles)
    head_dim: Any = next((getattr(module, key) for key in _HEAD_DIM if hasattr(module, key)), None)
    names = next((each for each in _NAMES if each[0] in column), None)
    needed = {child for child in names or () if child == (names or "")[0] or hasattr(module, child)}
    fused = next(iter(column)) if len(column) == 1 and layout_of(module, next(iter(column))) else None
    known = needed <= column if names else fused is not None
    latent = _LATENT in column
    counts = isinstance(head_dim, int) or latent or any(hasattr(module, key) for key in _HEADS)
    if not (known or latent) or output is None or not counts or set(own.values()) & PACKED:
        raise StyleError(
            f"{name} is a {type(module).__name__} with {dict(sorted(own.items()))}: heads stay whole only in an"
            " attention with head_dim, colwise q_proj, k_proj (and v_proj) or one projection of a known layout for all"
            " three, and one rowwise output projection"
        )
    linears = {child: _linear(module, child) for child in sorted(own)}
    if head_dim is None and not latent:
        count = next(getattr(module, key) for key in _HEADS if hasattr(module, key))
        head_dim = _linear(model, output).in_features // count
    if latent:
        kv_heads = heads = next((getattr(module, key) for key in _HEADS if hasattr(module, key)), 0)
    elif fused is not None:
        heads = _linear(model, output).in_features // head_dim
        kv_heads = fused_kv_heads(linears[fused].out_features, heads, head_dim)
    else:
        assert names is not None  # the only case left
        query, key = linears[names[0]], linears.get(names[1])
        groups = getattr(module, "num_key_value_groups", None)
        if key is None:  # it attends to another layer's keys
            heads = query.out_features // head_dim
            kv_heads = heads // int(groups or 1)
        else:
            kv_heads = key.out_features // head_dim
            heads = kv_heads * int(groups or query.out_features // key.out_features)
    features = {child: _features(linears[child], style) for child, style in sorted(own.items())}
    divides = heads and kv_heads and heads % kv_heads == 0
    if not divides or any(size % _count(child, heads, kv_heads) for child, size in features.items() if child != fused):
        raise StyleError(
            f"{name} has projections of {features} features and head_dim {head_dim}: expected multiples of its {heads}"
            f" query heads, and of its {kv_heads} kv heads for k_proj and v_proj"
        )
    for child, of in module.named_modules():
        if isinstance(of, nn.ModuleList) and len(of) in (heads, kv_heads):
            raise StyleError(
                f"{name}.{child} holds {len(of)} modules, one for each head: such a list is not split; leave {name}"
                " whole, by filter_fn"
            )
    return split_heads(heads, kv_heads, world, rank)


def head_parts(
    module: nn.Module, child: str, linear: nn.Linear, style: str, heads: HeadSplit
) -> tuple[Shard, ...]:  # fmt: skip
    """Return the part of projection `child` of attention `module` that holds `heads`."""
    if style not in ROW and layout_of(module, child):
        return fused_parts(module, child, linear.out_features, heads)
    width = _features(linear, style) // _count(child, heads.num_heads, heads.num_kv_heads)
    if style in ROW:
        return (heads.o_shard(width),)
    return (heads.kv_shard(width) if child in _OF_KV else heads.q_shard(width),)


def head_parameters(
    name: str, model: nn.Module, styles: dict[str, str], heads: HeadSplit
) -> Iterator[tuple[nn.Module, str, Shard, int]]:
    """Yield other tensors of attention `name` that count heads, as (module, key, part, dim).

    These are its own parameters and the columns of its embeddings, where the plan names them, and norms by head.
    """
    module = model.get_submodule(name)
    owners = {name: module} | {f"{name}.{child}": each for child, each in module.named_children()}
    for path, owner in owners.items():
        is_table = isinstance(owner, nn.Embedding)
        for key, parameter in owner.named_parameters(recurse=False):
            style = styles.get(f"{path}.{key}")
            by_shape = owner is not module and not is_table and not isinstance(owner, nn.Linear)
            if style is None and not (by_shape and parameter.dim() == 2):
                continue
            dim = int(is_table)
            entries = parameter.shape[dim] if parameter.dim() else 1
            if entries == heads.num_heads:
                yield owner, key, heads.q_shard(1), dim
            elif entries == heads.num_kv_heads:
                yield owner, key, heads.kv_shard(1), dim
            elif style in COLUMN:
                raise StyleError(
                    f"{path}.{key} is a parameter of {tuple(parameter.shape)}: style {style!r} expects one"
                    f" {'column' if is_table else 'entry'} for each of the {heads.num_heads} query heads or"
                    f" {heads.num_kv_heads} kv heads"
                )


def cuts_its_output(name: str, module: nn.Module, styles: dict[str, str]) -> bool:
    """Return whether attention `name` cuts one projection's outputs into those of q, k and v, which are adjacent."""
    layouts = [layout_of(module, child) for child, _ in module.named_children() if f"{name}.{child}" in styles]
    return any(layout not in (None, BY_HEAD) for layout in layouts)


def set_local_heads(module: Any, heads: HeadSplit) -> None:
    """Set the attention instance's numbers of heads to this rank's."""
    keep_own_heads(module, heads)
    remember_heads(module, heads, any(layout_of(module, child) == BY_GROUP for child, _ in module.named_children()))
    module.num_key_value_groups = heads.groups
    local = {heads.num_heads: heads.num_local_heads, heads.num_kv_heads: heads.num_local_kv_heads}
    for attribute in _TOGETHER:
        size = getattr(module, attribute, None)
        if isinstance(size, int):
            setattr(module, attribute, size // heads.num_heads * heads.num_local_heads)
    for attribute in (*_HEADS, "num_key_value_heads", "num_kv_heads"):
        whole = heads.num_kv_heads if "k" in attribute else heads.num_heads
        if getattr(module, attribute, None) == whole:
            setattr(module, attribute, local[whole])


def _linear(module: nn.Module, name: str) -> nn.Linear:
    as_linear_pair = as_linear(module.get_submodule(name))
    assert as_linear_pair is not None, name
    return as_linear_pair[0]


def _features(linear: nn.Linear, style: str) -> int:
    return linear.in_features if style in ROW else linear.out_features


def _count(child: str, heads: int, kv_heads: int) -> int:
    return kv_heads if child in _OF_KV else heads
