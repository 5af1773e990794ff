"""Split a Hugging Face model over ranks, in place: `parallelize(model, ctx)`.

The model's own plan decides how (see `styles`). Instances of torch.nn.Linear are swapped for split ones: no class is
patched and no forward rewritten. Attention modules are split by whole heads, and each instance gets its number of
heads (`heads`).

1. The plan is resolved and checked (`resolve`).
2. The split is carried out on a copy of the model without weights and verified there (`layers/verify`).
3. It is carried out on the model. After each of these two steps the ranks exchange its outcome: if one of them failed,
   all raise, and the model is restored (`snapshot`). So until the end it keeps its full weights as well as the shards;
   `from_pretrained` has only shards.

Tied embeddings: the embedding is replicated, and the head multiplies by a view of its rows (see `tied`), so tying costs
no memory. The view is by rows of this rank's chunk of the vocabulary, which the world size need not divide.

Works on a model with weights, whose slices are copied to the context's device, and on an empty one on meta, which
`from_pretrained` then fills. The result is for inference: it is in eval mode and stays there, for ranks that draw their
own dropout would diverge, and no parameter keeps a gradient (see `guards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iris.all_hosts import AllHosts
from iris.errors import ArgumentError
from torch import nn

from ..checkpoint.composed import Source
from ..checkpoint.save import wrap_save_pretrained
from ..digests import watch_inputs
from ..experts import SplitExperts
from ..linear import ColumnParallelLinear, RowParallelLinear
from ..merged_linear import MergedColumnParallelLinear
from ..pipeline.cut import Part, cut
from ..pipeline.mesh import facts_of, place_in
from ..pipeline.stage import connect
from ..shard import Shard, in_units
from ..sharded import ShardedLinear, ranks_of, split_parameter
from ..together import run_together
from ..verify import verify
from . import recurrent_heads, sequence
from . import styles as styles_of
from .fused_heads import Taken, layout_of
from .gated_mlp import fuse_gates
from .generation import agree_on_samples
from .group_cuts import cut_size, units_of
from .guards import guard
from .heads import head_parameters, head_parts, head_split, output_of, set_local_heads
from .linear_like import as_linear
from .merge import merge_siblings
from .mixture import split_experts
from .norms import fuse_norms
from .options import Options
from .report import Report, make_report, unconverted
from .resolve import Split, at_level, resolve
from .routers import fuse_routers
from .shared_experts import join_shared
from .snapshot import Snapshot
from .stored import FORMS, group_made, store_weights
from .tied import TiedColumnParallelLinear, retie
from .whole_products import keep_rows_alike
from .without_kernels import drop_kernels

if TYPE_CHECKING:
    from iris.context import Iris
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module,
    ctx: Iris,
    *,
    plan: str | dict[str, str] = "auto",
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    fuse: bool = True,
    weights: str | None = None,
    sequence_parallel: bool | int | str = "auto",
    partial: bool = False,
    mesh: DeviceMesh | None = None,
) -> Report:
    """Split the linears of `model` over the ranks of `ctx`, in place. Collective: every rank passes the same model.

    Args:
        model: a Hugging Face model whose weights are plain tensors.
        ctx: the context; one with `across` splits over the ranks of all hosts.
        plan: "auto", the model's own tensor-parallel plan or a built-in one, or a dict from module names (`*` for
            numbers) to styles.
        filter_fn: a function of a name and a module; where it returns False, the module stays unsplit.
        fuse: whether linears that share an input become one product, plain norms one kernel, and gates part of the
            product before them, where the model's forward allows it.
        weights: "fp8" rounds the weights of column-parallel linears, except the head, to fp8; "fp8_all", "fp8_block",
            "int4" and "mxfp4" round those of row-parallel linears too. None and "widened" keep the model's dtype.
        sequence_parallel: which calls run sequence parallel, so that each rank holds a part of the tokens between the
            products. True: calls of at least 2048 tokens. A number: calls of at least that many. False: none. "auto":
            long calls of tested families with their own plan, `fuse` and no `weights`; for eager calls the limit is
            higher than for calls that an engine replays from a graph.
        partial: whether to accept a model whose own plan splits no layer, or only the head.
        mesh: a DeviceMesh of `("pp", "tp")` or `("dp", "tp")` for several hosts; "tp" is the context's group.

    Returns:
        A report with one row for each module.

    Raises:
        ArgumentError: for bad arguments.
        DtypeError: for weights of a dtype that no op supports.
        StyleError: for styles that no layer supports, for forwards that would fail or be wrong, and for weights that
            are not plain tensors; it names the module and the style.

    Errors are raised on every rank, and leave the model unchanged.
    """
    ctx = ranks_of(ctx)
    options = Options(plan, filter_fn, fuse, weights, sequence_parallel, partial)
    place = place_in(mesh, ctx)
    if place is None:
        return split_layers(model, ctx, options)

    def split_stage() -> tuple[Part | None, Report]:
        part = run_together(ctx, lambda: cut(model, place.stage, place.stages)) if place.stages > 1 else None
        return part, split_layers(model, ctx, options if part is None else part.served(options))

    before = Snapshot(model) if isinstance(model, nn.Module) else None
    try:
        part, report = place.run("parallelize", split_stage, lambda _: facts_of(model, options))
        connect(model, place, part)
    except BaseException:
        if before is not None:
            before.restore()
        raise
    return report


def split_layers(model: nn.Module, ctx: Iris, options: Options, files: Mapping[str, Source] | None = None) -> Report:
    """Do what `parallelize` does without a mesh, on the layers that `model` has.

    `files`: by name the sources that the model will be filled from.
    """

    over_hosts = isinstance(ctx, AllHosts)

    def prove() -> Split:
        options.check()
        chosen = options.with_whole_rows("with a context with across") if over_hosts else options
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
        split = at_level(resolve(model, chosen, files or {}), ctx.level, chosen.sequence_parallel)

        def apply(skeleton: nn.Module, inside: Split, alone: bool) -> None:
            _carry_out(skeleton, inside, _Alone(ctx) if alone else ctx)
            drop_kernels(skeleton)

        untried = verify(model, split, apply)
        if untried and ctx.cur_rank == 0:
            ctx.warning(
                f"{type(model).__name__} cannot be run without weights: that {', '.join(untried[:4])}"
                f"{' and others' if len(untried) > 4 else ''} can be split so was not tried"
            )
        return split

    split = run_together(ctx, prove, lambda split: split.digest(model))
    before = Snapshot(model)
    try:
        return run_together(ctx, lambda: _finish(model, split, _carry_out(model, split, ctx), ctx))
    except BaseException:
        before.restore()
        raise


class _Alone:
    """A context of one rank, as far as splitting reads one: modules that are split over it keep their sizes."""

    num_ranks, cur_rank = 1, 0

    def __init__(self, ctx: Iris) -> None:
        self.device, self.level = ctx.device, ctx.level

    def check(self) -> None:
        """Do nothing: the context was checked."""


def _carry_out(model: nn.Module, split: Split, ctx: Any) -> dict[str, str]:
    """Swap the modules of `model` and return the styles of its modules now."""
    styles, heads = split.styles, _split_heads(model, split.linears, ctx)
    by_head = [of for name, held in heads.items() for of in head_parameters(name, model, styles, held)]
    outputs = {output_of(name, split.linears): name for name in heads}
    embeddings = {id(m.weight): f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    units = units_of(model, split.linears, ctx, group_made(split.weights)) if split.by_groups else {}
    for name, style in split.linears.items():
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        as_stored = as_linear(getattr(parent, child))
        assert as_stored is not None, name
        linear, transposed = as_stored
        attention = outputs.get(name, parent_name if parent_name in heads else None)
        parts = layout = None
        if style in styles_of.LINKED and attention is not None:
            around, held = model.get_submodule(attention), heads[attention]
            parts, layout = head_parts(around, child, linear, style, held), layout_of(around, child)
        elif (unit := units.get((parent_name, cut_size(linear, style)))) is not None:
            half = (in_units(cut_size(linear, style), ctx.num_ranks, ctx.cur_rank, unit),)
            parts = half * 2 if style in styles_of.PACKED else half
        tied = embeddings.get(id(linear.weight))
        layer = _split(linear, style, parts, tied, ctx, split.shares_tokens)
        layer.stored_transposed = transposed
        if layout is not None and style in styles_of.COLUMN:
            projection: Any = layer
            projection.taken = Taken(layout, held)
        setattr(parent, child, layer)
    for owner, key, part, dim in by_head:
        split_parameter(owner, key, part, dim)
    for name in split.recurrent:
        module = model.get_submodule(name)
        styles = styles | dict.fromkeys(recurrent_heads.modules_of(name, module), recurrent_heads.STYLE)
        recurrent_heads.split_recurrent(module, ctx)
    for name, form in split.experts.items():
        parent_name, _, child = name.rpartition(".")
        split_experts(model.get_submodule(parent_name), child, form, ctx, group_made(split.weights))
    for name, held in heads.items():
        set_local_heads(model.get_submodule(name), held)
    if split.shares_tokens:
        styles = styles | merge_siblings(model, styles, sequence.SequenceProduct)
        sequence.share_tokens(model, styles, ctx, split.least)
    elif split.fuse:
        styles = styles | merge_siblings(model, styles)
    if split.fuse:
        fuse_gates(model)
        fuse_norms(model, ctx.level.rows_alike)
    store_weights(model, split.codings, split.weights, ctx)
    for name in split.experts:
        module = model.get_submodule(name)
        if isinstance(module, SplitExperts):
            before = f"{name}."
            own = {key.removeprefix(before): each for key, each in split.codings.items() if key.startswith(before)}
            module.store(own, split.weights)
    retie(model)
    return styles


def _finish(model: nn.Module, split: Split, styles: dict[str, str], ctx: Iris) -> Report:
    empty = any(parameter.is_meta for parameter in model.parameters())
    model.requires_grad_(False)
    if split.fuse:
        join_shared(model)
        fuse_routers(model)
    if ctx.level.rows_alike:
        keep_rows_alike(model, ctx)
    if not empty:
        model.to(ctx.device)
        retie(model)
    guard(model, ctx)
    if split.by_own_plan and hasattr(model, "tp_plan"):
        holder: Any = model
        holder._tp_size = ctx.num_ranks  # by it and tp_plan, generate() sizes the static caches that it allocates early
    agree_on_samples(model, ctx)
    watch_inputs(model, ctx)
    wrap_save_pretrained(model, ctx)
    if split.weights in FORMS and ctx.cur_rank == 0 and (names := unconverted(model, split.styles)):
        ctx.warning(
            f"weights={split.weights!r} converts linears only: {', '.join(names[:2])}"
            f"{f' and {len(names) - 2} others' if len(names) > 2 else ''} (experts or recurrent states) keep"
            f" {str(next(model.get_submodule(names[0]).parameters()).dtype).removeprefix('torch.')} weights"
        )
    return make_report(model, styles, ctx, split.plan, split.weights)


def _split_heads(model: nn.Module, styles: dict[str, str], ctx: Any) -> dict:
    """Return the heads of this rank in each attention module whose projections are split."""
    names = {name.rpartition(".")[0]: None for name, style in styles.items() if style in styles_of.LINKED}
    return {
        name: head_split(name, model, styles, ctx.num_ranks, ctx.cur_rank)
        for name in names
        if styles_of.is_attention(model.get_submodule(name))
    }


def _split(
    linear: nn.Linear, style: str, parts: tuple[Shard, ...] | None, tied: str | None, ctx: Any, sequential: bool
) -> ShardedLinear:
    gather = style in styles_of.GATHERED
    if style in styles_of.ROW | styles_of.ROW_SPLIT:
        kind = sequence.ScatteringRow if sequential and style in styles_of.ROW else RowParallelLinear
        layer = kind.from_linear(linear, input_is_parallel=style in styles_of.ROW, ctx=ctx, parts=parts)
    elif style in styles_of.PACKED:
        half = linear.out_features // 2
        if parts is not None:
            layer = ColumnParallelLinear.from_linear(linear, ctx=ctx, parts=parts)
        else:
            layer = MergedColumnParallelLinear.from_linear(linear, [half, half], ctx=ctx)
    elif tied is None:
        kind = sequence.GatheringColumn if sequential and not gather else ColumnParallelLinear
        layer = kind.from_linear(linear, gather, ctx=ctx, parts=parts)
    else:
        layer = TiedColumnParallelLinear(linear, tied, gather, ctx=ctx, parts=parts)
    return layer.train(linear.training)
