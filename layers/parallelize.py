"""Splits a Hugging Face model over ranks, in place: `parallelize(model, ctx)`.

The model's own plan says how (see `plan`). Instances of torch.nn.Linear are swapped for split ones: no class is patched
and no forward rewritten. In attention modules heads stay whole, and the instance is told how many it has (`attention`).
Everything is checked before the first swap, so a refused model is left as it was.

Tied embeddings: the embedding stays whole on every rank, and the head's part is a view of its rows, so tying costs no
memory. The view is by rows of this rank's chunk of the vocabulary, which the world size need not divide.

Works on a model with weights, whose slices are copied to the context's device, and on an empty one on meta, which
`from_pretrained` then fills. The result is for inference: it is in eval mode and stays there, for ranks that draw what
they drop out by themselves would part ways, and no parameter keeps a gradient.
"""

from __future__ import annotations

from types import MethodType

from iris.errors import ArgumentError
from torch import nn

from . import plan as styles_of
from . import sequence
from .attention import head_parameters, head_parts, head_split, set_local_heads
from .fused import merge_siblings
from .gated import fuse_gates
from .generation import agree_on_samples
from .linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from .norms import fuse_norms
from .report import Report, make_report
from .saving import wrap_save_pretrained
from .sharded import GATHERED, LOCAL, REDUCED, ShardedLinear, check_context, flags, split_parameter

# the ops of linears whose weights are stored so
_FP8 = {"fp8": (LOCAL, GATHERED), "fp8_all": (LOCAL, GATHERED, REDUCED)}


def parallelize(
    model: nn.Module,
    ctx,
    *,
    plan="auto",
    filter_fn=None,
    fuse: bool = True,
    weights: str | None = None,
    sequence_parallel: bool | int | str = "auto",
) -> Report:
    """Splits the Linears of `model` over the ranks of `ctx` and says what became of each module.

    `plan` is "auto", the model's own tensor-parallel plan, or a dict from module names (`*` for numbers) to styles.
    `filter_fn(name, module)` keeps a module whole by returning False. `fuse`: linears that share an input become one
    product where the model's forward allows it (see `fused`), plain norms one kernel (see `norms`), and gates part of
    the product before them (see `gated`). `weights="fp8"` keeps the weights of column-parallel linears, but the head's,
    in eight bits, `"fp8_all"` those of row-parallel ones too (see `fp8`). `sequence_parallel`: whether ranks share the
    tokens between the products (see `sequence`) where a call has 2048 or more, or another number if one is given.
    "auto" is for the families that are tested with it, split by their own plan, with `fuse` and without `weights`;
    there it takes more tokens unless an engine replays them from a graph. Every rank calls this with the same model.

    Raises `ArgumentError` for bad arguments, and `StyleError`, with the names of module and style, for what the plan
    asks and no layer serves; the model is then as it was. Warns, on rank 0, where the model's own plan splits none of
    its layers.
    """
    check_options(plan=plan, filter_fn=filter_fn, fuse=fuse, weights=weights, sequence_parallel=sequence_parallel)
    check_context(ctx)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    styles = styles_of.resolve_plan(model, plan, filter_fn)
    by_default = sequence_parallel == "auto"
    if by_default:
        sequence_parallel = plan == "auto" and fuse and weights is None and sequence.is_known(model, styles)
    elif sequence_parallel:
        sequence.check(model, styles)
    modules = dict(model.named_modules())
    linears = {name: style for name, style in styles.items() if style in styles_of.SPLIT and name in modules}
    served = styles_of.COLUMN | styles_of.PACKED
    only_head = plan == "auto" and filter_fn is None and styles_of.leaves_layers_whole(model, linears)
    if weights == "fp8_all":
        served |= styles_of.ROW | styles_of.ROW_SPLIT
    if weights and not set(linears.values()) & served:
        wanted = "product" if weights == "fp8_all" else "colwise product without an exchange"
        raise ArgumentError(f"weights is {weights!r}, but {type(model).__name__}'s plan leaves no {wanted}")
    heads = _split_heads(model, linears, ctx)
    by_head = [of for name, split in heads.items() for of in head_parameters(name, model, styles, split)]
    empty = any(parameter.is_meta for parameter in model.parameters())
    embeddings = {id(m.weight): f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, style in linears.items():
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = getattr(parent, child)
        linked = style in styles_of.LINKED and parent_name in heads
        parts = head_parts(child, linear, style, heads[parent_name]) if linked else None
        tied = embeddings.get(id(linear.weight))
        setattr(parent, child, _split(linear, style, parts, tied, ctx, bool(sequence_parallel)))
    for owner, key, part in by_head:
        split_parameter(owner, key, part)
    for name, split in heads.items():
        set_local_heads(model.get_submodule(name), split)
    if sequence_parallel:
        styles = styles | merge_siblings(model, styles, sequence.SequenceProduct)
        least = sequence.LEAST if sequence_parallel is True else sequence_parallel
        sequence.share_tokens(model, styles, ctx, None if by_default else least)
    elif fuse:
        styles = styles | merge_siblings(model, styles)
    if fuse:
        fuse_gates(model)
        fuse_norms(model)
    if weights:
        for module in list(model.modules()):
            if isinstance(module, ShardedLinear) and module.op in _FP8[weights]:
                module.store_as_fp8()
    model.requires_grad_(False)
    _keep_in_eval_mode(model)
    _keep_tied(model)
    retie(model)
    if not empty:
        model.to(ctx.device)
    if plan == "auto" and filter_fn is None and hasattr(model, "tp_plan"):
        model._tp_size = ctx.num_ranks  # by it and tp_plan, generate() sizes the static caches that it allocates early
    agree_on_samples(model, ctx)
    wrap_save_pretrained(model, ctx)
    if only_head and ctx.cur_rank == 0:
        ctx.warning(
            f"{type(model).__name__}'s own plan splits {', '.join(linears) or 'no linear'} only: each rank computes all"
            " of its layers, whole; pass plan={name: style} to split them"
        )
    return make_report(model, styles, ctx)


def check_options(*, plan="auto", filter_fn=None, fuse=True, weights=None, sequence_parallel="auto") -> None:
    """Raises `ArgumentError` for options of `parallelize` that no model could be split by."""
    styles_of.check_plan(plan)
    flags(fuse=fuse)
    if weights not in (None, *_FP8):
        raise ArgumentError(f"weights is {weights!r}: expected None, 'fp8' or 'fp8_all'")
    if filter_fn is not None and not callable(filter_fn):
        raise ArgumentError(f"filter_fn is {filter_fn!r}: expected None or a function of a name and a module")
    counts = isinstance(sequence_parallel, int) and (isinstance(sequence_parallel, bool) or sequence_parallel > 0)
    if not counts and sequence_parallel != "auto":
        raise ArgumentError(
            f"sequence_parallel is {sequence_parallel!r}: expected 'auto', a bool or a positive integer"
        )


def retie(model: nn.Module) -> None:
    """Makes the weight of each tied head a view of its embedding's rows (again, once those are loaded or moved)."""
    for module in model.modules():
        if isinstance(module, ShardedLinear) and (source := getattr(module, "tied_to", None)):
            rows = module.parts[0].view(model.get_parameter(source), dim=0)
            module.weight = nn.Parameter(rows, requires_grad=False)


def _keep_in_eval_mode(model: nn.Module) -> None:
    def train(self, mode: bool = True):
        if mode:
            raise ArgumentError("mode is True: expected False, a split model is for inference; train it unsplit")
        return type(self).train(self, mode)

    model.train = MethodType(train, model)
    model.eval()


def _keep_tied(model: nn.Module) -> None:
    def _apply(self, *args, **kwargs):
        type(self)._apply(self, *args, **kwargs)
        retie(self)  # a move or a conversion copies a view
        return self

    model._apply = MethodType(_apply, model)


def _split_heads(model: nn.Module, styles: dict[str, str], ctx) -> dict:
    """The heads of this rank in each attention module whose projections are split."""
    children: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        if style in styles_of.LINKED and styles_of.is_attention(model.get_submodule(parent)):
            children.setdefault(parent, {})[child] = style
    return {
        name: head_split(name, model.get_submodule(name), of_children, ctx.num_ranks, ctx.cur_rank)
        for name, of_children in children.items()
    }


def _split(linear: nn.Linear, style: str, parts, tied: str | None, ctx, sequential: bool) -> ShardedLinear:
    gather = style in styles_of.GATHERED
    if style in styles_of.ROW | styles_of.ROW_SPLIT:
        kind = sequence.ScatteringRow if sequential and style in styles_of.ROW else RowParallelLinear
        layer = kind.from_linear(linear, input_is_parallel=style in styles_of.ROW, ctx=ctx, parts=parts)
    elif style in styles_of.PACKED:
        half = linear.out_features // 2
        layer = MergedColumnParallelLinear.from_linear(linear, [half, half], ctx=ctx)
    elif tied is None:
        kind = sequence.GatheringColumn if sequential and not gather else ColumnParallelLinear
        layer = kind.from_linear(linear, gather, ctx=ctx, parts=parts)
    else:
        sizes = (linear.in_features, linear.out_features)
        layer = ColumnParallelLinear(*sizes, linear.bias is not None, gather, ctx=ctx, parts=parts,
                                     dtype=linear.weight.dtype, device="meta")  # fmt: skip
        layer.tied_to = tied
        if linear.bias is not None and not linear.bias.is_meta:
            layer.load_shard("bias", linear.bias)
    return layer.train(linear.training)
