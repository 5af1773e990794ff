"""Decide how a model is split: styles of its modules by the plan, and what else the options and the files imply.

Nothing is changed here: `parallelize` verifies the result on a copy without weights, and carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
import hashlib
from typing import Any

from iris.errors import ArgumentError, StyleError
from iris_ops.planning.sums import BATCH, Level
from torch import nn

from ..checkpoint.composed import Source
from ..digests import facts, sample
from ..expert_storage import coding_of_experts
from ..experts import Form as ExpertsForm
from ..formats.coded import coding_of
from ..formats.weight_format import Coding, quantised_weights
from ..verify.skeleton import kind_of
from . import recurrent_heads, sequence
from . import styles as styles_of
from .heads import cuts_its_output
from .mixture import EXPERTS, form_of
from .options import Options
from .plans import built_in
from .stored import COLUMNS_ONLY, FORMS, WIDENED


@dataclass(frozen=True)
class Split:
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
    by_groups: bool = True  # whether linears are cut between the groups of weights that share a scale

    def within(self, skeleton: nn.Module) -> Split:
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
            "model": f"a {type(model).__name__} ({digest_of(sizes)})",
            **facts(config=getattr(model, "config", None)),
            "a sample of the model's weights": f"one with checksum {sample(model)}",
            "plan": f"one of {len(self.styles)} modules ({digest_of(sorted(self.styles.items()))})",
            "fuse": self.fuse,
            "weights": self.weights,
            "files": f"one of {len(self.codings)} quantised linears ({digest_of(sorted(self.codings.items()))})",
            "sequence_parallel": (self.shares_tokens, self.least),
        }


def resolve(model: nn.Module, options: Options, files: Mapping[str, Source]) -> Split:
    """Return how `options` split `model`. Raises a typed error where they cannot.

    `files`: by name the sources that the model will be filled from.
    """
    plan, filter_fn, weights = options.plan, options.filter_fn, options.weights
    sequence_parallel = options.sequence_parallel
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
        sequence_parallel = automatic and options.fuse and bool(plainly) and sequence.is_known(model, styles)
    elif sequence_parallel:
        sequence.check(model, styles)
    experts = _experts(modules, styles)
    for name, form in experts.items():
        for key in (form.first, form.second) if isinstance(form, ExpertsForm) else ():
            source = files.get(f"{name}.{key}")
            if source is not None and quantised_weights(source):
                codings[f"{name}.{key}"] = coding_of_experts(source)
    recurrent = [name for name, style in styles.items() if style == recurrent_heads.STYLE and name in modules]
    if automatic and not options.partial:
        styles_of.check_layers(model, [*linears, *experts, *recurrent], filter_fn is not None)
    stored = styles_of.COLUMN | styles_of.PACKED
    if weights not in COLUMNS_ONLY:
        stored |= styles_of.ROW | styles_of.ROW_SPLIT
    by_ops = any(isinstance(form, ExpertsForm) for form in experts.values())
    if weights in FORMS and not set(linears.values()) & stored and not by_ops:
        missing = "colwise product without an exchange" if weights in COLUMNS_ONLY else "product"
        raise ArgumentError(f"weights is {weights!r}, but {type(model).__name__}'s plan leaves no {missing}")
    least = None if by_default else sequence.LEAST if sequence_parallel is True else int(sequence_parallel)
    source, _ = styles_of.rules_of(model, plan)
    own = automatic and filter_fn is None and built_in(model) is None
    shares = bool(sequence_parallel)
    return Split(styles, linears, recurrent, experts, own, source, options.fuse, weights, codings, shares, least)


def at_level(split: Split, level: Level, sequence_parallel: bool | int | str) -> Split:
    """Return the variant of `split` that keeps the promise of a context's `level`. Raises where there is none."""
    if not (kept := level.unrounded_parts):
        return split
    if split.weights in FORMS:
        raise ArgumentError(f"weights is {split.weights!r}: expected None or {WIDENED!r} with {kept}")
    for names, what in ((split.experts, "the sums over its experts"), (split.recurrent, "its state's sums")):
        if names:
            name = next(iter(names))
            raise StyleError(
                f"{name}: {what} are rounded on each rank before ranks add them, so they differ by the number of ranks;"
                f" with {kept} expected a model of attention and dense products. Another context, with {BATCH.text} or"
                f" None, splits it; a filter_fn that is False for {name!r} keeps it whole"
            )
    if split.shares_tokens and sequence_parallel != "auto":
        raise ArgumentError(
            f"sequence_parallel is {sequence_parallel!r}: expected 'auto' or False with {kept}, because one rank"
            " cannot share tokens"
        )
    return replace(split, shares_tokens=False, by_groups=False)


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


def digest_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
