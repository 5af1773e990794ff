"""Split a Hugging Face model over ranks, in place: `parallelize(model, ctx)`.

The model's own plan decides how (see `styles`). Instances of torch.nn.Linear are swapped for split ones: no class is
patched and no forward rewritten. Attention modules are split by whole heads, and each instance gets its number of
heads (`heads`).

1. The plan is resolved and checked.
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
from dataclasses import dataclass, replace
import hashlib
from typing import TYPE_CHECKING, Any, TypedDict

from iris.errors import ArgumentError, StyleError
from iris.invariance import RANKS
from torch import nn

from ..checkpoint.composed import Source
from ..checkpoint.save import wrap_save_pretrained
from ..digests import watch_inputs
from ..expert_storage import coding_of_experts
from ..experts import Form as ExpertsForm
from ..experts import SplitExperts
from ..formats.coded import coding_of
from ..formats.weight_format import Coding, quantised_weights
from ..linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from ..pipeline.cut import Part, cut
from ..pipeline.mesh import place_in
from ..pipeline.stage import connect
from ..shard import Shard, in_units
from ..sharded import ShardedLinear, check_context, flags, split_parameter
from ..together import run_together
from ..verify import verify
from ..verify.skeleton import kind_of
from . import recurrent_heads, sequence
from . import styles as styles_of
from .fused_heads import Taken, layout_of
from .gated_mlp import fuse_gates
from .generation import agree_on_samples
from .group_cuts import cut_size, units_of
from .guards import guard
from .heads import cuts_its_output, head_parameters, head_parts, head_split, output_of, set_local_heads
from .linear_like import as_linear
from .merge import merge_siblings
from .mixture import EXPERTS, form_of, split_experts
from .norms import fuse_norms
from .plans import built_in
from .report import Report, make_report, unconverted
from .shared_experts import join_shared
from .snapshot import Snapshot
from .stored import FORMS, WEIGHTS, WIDENED, group_made, store_weights
from .tied import TiedColumnParallelLinear, retie
from .whole_products import keep_rows_alike
from .without_kernels import drop_kernels

if TYPE_CHECKING:
    from iris.context import Iris
    from torch.distributed.device_mesh import DeviceMesh


class Options(TypedDict, total=False):
    """The options of `parallelize`, for functions that pass them on."""

    plan: str | dict[str, str]
    filter_fn: Callable[[str, nn.Module], bool] | None
    fuse: bool
    weights: str | None
    sequence_parallel: bool | int | str
    partial: bool


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
    """Split the Linears of `model` over the ranks of `ctx` and return a report of each module. Collective.

    `plan` is "auto", the model's own tensor-parallel plan, or a dict from module names (`*` for numbers) to styles.
    `filter_fn(name, module)` keeps a module unsplit by returning False. `fuse`: linears that share an input become one
    product where the model's forward allows it (see `merge`), plain norms one kernel (see `norms`), and gates part of
    the product before them (see `gated_mlp`). `weights`: "fp8" rounds the weights of column-parallel linears, but
    the head's, to fp8; "fp8_all", "fp8_block", "int4" and "mxfp4" round those of row-parallel ones too (see
    `stored`). None and "widened" keep the model's dtype. `sequence_parallel`: whether ranks
    share the tokens between the products (see `sequence`) where a call has 2048 or more, or another number if one is
    given. "auto" is for the families that are tested with it, split by their own plan, with `fuse` and without
    `weights`; there it takes more tokens unless an engine replays them from a graph. `partial` allows a plan of the
    model's own that splits none of its layers, the head at most. Every rank calls this with the same model.

    Raises on every rank `ArgumentError` for bad arguments, `DtypeError` for weights that no op takes, and `StyleError`,
    with the names of module and style, for styles that no layer supports, for forwards that would fail or be wrong, and
    for weights that are no plain tensors. After any error the model is unchanged.
    """
    check_context(ctx)
    options: dict[str, Any] = dict(plan=plan, filter_fn=filter_fn, fuse=fuse, weights=weights)
    options |= dict(sequence_parallel=sequence_parallel, partial=partial)
    place = place_in(mesh, ctx)
    if place is None:
        return split_layers(model, ctx, **options)

    def split_stage() -> tuple[Part | None, Report]:
        part = run_together(ctx, lambda: cut(model, place.stage, place.stages)) if place.stages > 1 else None
        return part, split_layers(model, ctx, **(options if part is None else part.served(options)))

    before = Snapshot(model) if isinstance(model, nn.Module) else None
    try:
        part, report = place.run("parallelize", split_stage)
        connect(model, place, part)
    except BaseException:
        if before is not None:
            before.restore()
        raise
    return report


def split_layers(
    model: nn.Module, ctx: Iris, *, plan: str | dict[str, str] = "auto",
    filter_fn: Callable[[str, nn.Module], bool] | None = None, fuse: bool = True, weights: str | None = None,
    sequence_parallel: bool | int | str = "auto", partial: bool = False, files: Mapping[str, Source] | None = None,
) -> Report:  # fmt: skip
    """Do what `parallelize` does without a mesh, on the layers that `model` has.

    `files`: by name the sources that the model will be filled from.
    """

    def prove() -> _Split:
        options: dict[str, Any] = dict(fuse=fuse, weights=weights, sequence_parallel=sequence_parallel, partial=partial)
        check_options(plan=plan, filter_fn=filter_fn, **options)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
        split = _resolve(model, plan, filter_fn, files or {}, **options)
        split = _on_any_ranks(split, sequence_parallel) if ctx.invariant == RANKS else split

        def apply(skeleton: nn.Module, inside: _Split, alone: bool) -> None:
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


def check_options(
    *, plan: str | dict[str, str] = "auto", filter_fn: Callable[[str, nn.Module], bool] | None = None,
    fuse: bool = True, weights: str | None = None, sequence_parallel: bool | int | str = "auto",
    partial: bool = False,
) -> None:  # fmt: skip
    """Raise `ArgumentError` for options of `parallelize` that cannot split any model."""
    styles_of.check_plan(plan)
    flags(fuse=fuse, partial=partial)
    if weights not in WEIGHTS:
        raise ArgumentError(f"weights is {weights!r}: expected {', '.join(map(repr, WEIGHTS[:-1]))} or {WEIGHTS[-1]!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise ArgumentError(f"filter_fn is {filter_fn!r}: expected None or a function of a name and a module")
    counts = isinstance(sequence_parallel, int) and (isinstance(sequence_parallel, bool) or sequence_parallel > 0)
    if not counts and sequence_parallel != "auto":
        raise ArgumentError(
            f"sequence_parallel is {sequence_parallel!r}: expected 'auto', a bool or a positive integer"
        )


@dataclass(frozen=True)
class _Split:
    """The state of one split of a model."""

    styles: dict[str, str]  # of all modules and parameters that the plan names
    linears: dict[str, str]  # styles of the linears that are split
    recurrent: list[str]  # modules that keep a state for each head
    experts: dict[str, Any]  # forms of experts, by the module that holds them
    by_own_plan: bool
    plan: str  # its origin, for the report
    fuse: bool
    weights: str | None
    codings: dict[str, Coding | str]  # of what the files have quantised, by module: codes, or why they are widened
    shares_tokens: bool
    least: int | None  # tokens of the shortest call that shares them; None: the measured break-even

    def within(self, skeleton: nn.Module) -> _Split:
        """Return the split of a skeleton, in which one layer represents all that are alike."""
        names = {name for name, _ in skeleton.named_modules()}
        linears = {name: style for name, style in self.linears.items() if name in names}
        experts = {name: form for name, form in self.experts.items() if name in names}
        nets = [name for name in self.recurrent if name in names]
        return replace(self, linears=linears, experts=experts, recurrent=nets)

    def parents(self, kinds: set[str]) -> list[str]:
        """Return the modules of which a linear has one of the styles `kinds`."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name, style in self.linears.items() if style in kinds))

    def joined(self) -> list[str]:
        """Return the modules that return whole tensors: they sum or gather what is split inside."""
        return self.parents(styles_of.ROW) + self.recurrent

    def cutting(self, model: nn.Module) -> list[str]:
        """Return the modules that cut a rank's outputs as they would cut all: gate and up, or q, k and v."""
        column = self.parents(styles_of.COLUMN)
        column = [name for name in column if cuts_its_output(name, model.get_submodule(name), self.linears)]
        return self.parents(styles_of.PACKED) + column + self.recurrent

    def digest(self, model: nn.Module) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks."""
        sizes = [(name, tuple(each.shape), each.dtype) for name, each in model.named_parameters()]
        return {
            "model": f"a {type(model).__name__} ({_digest(sizes)})",
            "plan": f"one of {len(self.styles)} modules ({_digest(sorted(self.styles.items()))})",
            "fuse": self.fuse,
            "weights": self.weights,
            "files": f"one of {len(self.codings)} quantised linears ({_digest(sorted(self.codings.items()))})",
            "sequence_parallel": (self.shares_tokens, self.least),
        }


class _Alone:
    """A context of one rank, as far as splitting reads one: modules that are split over it keep their sizes."""

    num_ranks, cur_rank = 1, 0

    def __init__(self, ctx: Iris) -> None:
        self.device, self.invariant = ctx.device, ctx.invariant

    def check(self) -> None:
        """Do nothing: the context was checked."""


def _resolve(
    model: nn.Module, plan: str | dict[str, str], filter_fn: Callable[[str, nn.Module], bool] | None,
    files: Mapping[str, Source], *, fuse: bool, weights: str | None, sequence_parallel: bool | int | str, partial: bool,
) -> _Split:  # fmt: skip
    styles = styles_of.resolve_plan(model, plan, filter_fn)
    automatic = plan == "auto"
    by_default = sequence_parallel == "auto"
    modules = dict(model.named_modules())
    linears = {name: style for name, style in styles.items() if style in styles_of.SPLIT and name in modules}
    codings = {
        name: coding_of(source)
        for name in modules
        if (source := files.get(f"{name}.weight")) is not None and quantised_weights(source)
    }
    if by_default:
        plainly = weights in (None, WIDENED) and (weights or not codings)
        sequence_parallel = automatic and fuse and bool(plainly) and sequence.is_known(model, styles)
    elif sequence_parallel:
        sequence.check(model, styles)
    experts = _experts(modules, styles)
    for name, form in experts.items():
        for key in (form.first, form.second) if isinstance(form, ExpertsForm) else ():
            source = files.get(f"{name}.{key}")
            if source is not None and quantised_weights(source):
                codings[f"{name}.{key}"] = coding_of_experts(source)
    recurrent = [name for name, style in styles.items() if style == recurrent_heads.STYLE and name in modules]
    if automatic and not partial:
        styles_of.check_layers(model, [*linears, *experts, *recurrent], filter_fn is not None)
    stored = styles_of.COLUMN | styles_of.PACKED
    if weights != "fp8":
        stored |= styles_of.ROW | styles_of.ROW_SPLIT
    by_ops = any(isinstance(form, ExpertsForm) for form in experts.values())
    if weights in FORMS and not set(linears.values()) & stored and not by_ops:
        missing = "colwise product without an exchange" if weights == "fp8" else "product"
        raise ArgumentError(f"weights is {weights!r}, but {type(model).__name__}'s plan leaves no {missing}")
    least = None if by_default else sequence.LEAST if sequence_parallel is True else int(sequence_parallel)
    source, _ = styles_of.rules_of(model, plan)
    own = automatic and filter_fn is None and built_in(model) is None
    return _Split(
        styles, linears, recurrent, experts, own, source, fuse, weights, codings, bool(sequence_parallel), least
    )


def _on_any_ranks(split: _Split, sequence_parallel: bool | int | str) -> _Split:
    """Return the variant of `split` with the same bits on any number of ranks. Raises where there is none."""
    if split.weights in FORMS:
        raise ArgumentError(f"weights is {split.weights!r}: expected None or {WIDENED!r} with invariant='ranks'")
    for names, what in ((split.experts, "the sums over its experts"), (split.recurrent, "its state's sums")):
        if names:
            name = next(iter(names))
            raise StyleError(
                f"{name}: {what} are rounded on each rank before ranks add them, so they differ by the number of ranks;"
                " with invariant='ranks' expected a model of attention and dense products. Another context, with"
                f" invariant='batch' or None, splits it; a filter_fn that is False for {name!r} keeps it whole"
            )
    if split.shares_tokens and sequence_parallel != "auto":
        raise ArgumentError(
            f"sequence_parallel is {sequence_parallel!r}: expected 'auto' or False with invariant='ranks', for one rank"
            " shares no tokens"
        )
    return replace(split, shares_tokens=False)


def _experts(modules: dict[str, nn.Module], styles: dict[str, str]) -> dict[str, Any]:
    """Return the form of the experts of each module that holds some."""
    kinds: dict[Any, Any] = {}
    forms = {}
    for name, style in styles.items():
        if style in EXPERTS and name in modules:
            before = f"{name}."
            own = {each.removeprefix(before): of for each, of in styles.items() if each.startswith(before)}
            kind = kind_of(modules[name]), *sorted(own.items())
            if kind not in kinds:
                kinds[kind] = form_of(name, modules[name], own)
            forms[name] = kinds[kind]
    return forms


def _carry_out(model: nn.Module, split: _Split, ctx: Any) -> dict[str, str]:
    """Swap the modules of `model` and return the styles of its modules now."""
    styles, heads = split.styles, _split_heads(model, split.linears, ctx)
    by_head = [of for name, held in heads.items() for of in head_parameters(name, model, styles, held)]
    outputs = {output_of(name, split.linears): name for name in heads}
    embeddings = {id(m.weight): f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    units = units_of(model, split.linears, ctx, group_made(split.weights))
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
        fuse_norms(model, ctx.invariant)
    store_weights(model, split.codings, split.weights, ctx)
    for name in split.experts:
        module = model.get_submodule(name)
        if isinstance(module, SplitExperts):
            before = f"{name}."
            own = {key.removeprefix(before): each for key, each in split.codings.items() if key.startswith(before)}
            module.store(own, split.weights)
    retie(model)
    return styles


def _finish(model: nn.Module, split: _Split, styles: dict[str, str], ctx: Iris) -> Report:
    empty = any(parameter.is_meta for parameter in model.parameters())
    model.requires_grad_(False)
    if split.fuse:
        join_shared(model)
    if ctx.invariant:
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


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


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
