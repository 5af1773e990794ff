"""Group stored tensors into weights by a scheme, and list the others that a checkpoint holds.

    stored                                            as a mapping for the loader
    model.layers.0.mlp.up_proj.weight          e4m3   model.layers.0.mlp.up_proj.weight   a QuantisedWeight
    model.layers.0.mlp.up_proj.weight_scale_inv       (a part of it)
    model.layers.0.mlp.up_proj.input_scale            (not needed: activations are not quantised)
    model.norm.weight                          bf16   model.norm.weight                   as it is

The tensors say whether a weight is quantised, the configuration says how. Where the two contradict each other, where a
scale has no weight, and where the file has scales of a quantised KV cache, the loader reports it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
import math

from iris.errors import CheckpointError
import torch

from ..checkpoint.composed import Source, Stack
from ..checkpoint.files import StoredTensor
from ..together import listed, one_line, shown
from .weight_format import QuantisedWeight, quantised_weights

Roles = Mapping[str, StoredTensor]
# Scales of a quantised KV cache, and of attention on one.
_CACHE = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".attn_output_scale", ".k_zero_point",
    ".v_zero_point", ".k_global_scale", ".v_global_scale", ".q_global_scale", ".k_bmm_quantizer._amax",
    ".v_bmm_quantizer._amax", ".k_proj.output_scale", ".v_proj.output_scale", ".kv_b_proj.output_scale",
)  # fmt: skip
# Ends of the names of scales, in place of ".weight".
_SCALES = ".weight_scale", ".weight_scale_inv", ".scale", ".qscale_weight", "_scale", "_scale_inv", "_weight_scale"
_WEIGHTS = "weight", "packed", "blocks"  # the roles of codes
PACKED_DTYPES = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's configuration stores its weights."""

    method: str  # its name in the configuration
    suffixes: Mapping[str, tuple[str, str]]
    """By the end of a stored name: the role of the tensor, and the end of the weight's name in place of it."""
    build: Callable[[str, Roles], QuantisedWeight]
    """What makes a weight of a matrix's tensors; it raises `CheckpointError` where it cannot."""
    leaves_out: Callable[[str], bool]
    """Whether the configuration says that a module is not quantised."""


@dataclass
class Contents:
    """The contents of a checkpoint: `sources` by name, quantised weights as one each, and `problems` by name."""

    sources: dict[str, Source]
    problems: list[str] = field(default_factory=list)
    activation_scales: int = 0

    @property
    def quantised(self) -> dict[str, Source]:
        return {name: source for name, source in self.sources.items() if quantised_weights(source)}

    def line(self, dtype: torch.dtype, kept: Mapping[str, Kept]) -> str:
        """Return a line that reports how quantised weights were loaded, empty where there are none.

        `kept`: what became of each of them, by name.
        """
        name = str(dtype).removeprefix("torch.")
        parts = []
        for again in (False, True):
            some = [self.sources[key] for key, each in kept.items() if each.form and again != each.as_stored]
            forms = ", ".join(sorted({each.form for each in kept.values() if each.form and again != each.as_stored}))
            if some and again:
                parts.append(f"{len(some)} weights rounded again, to {forms}")
            elif some:
                parts.append(f"{len(some)} weights kept as stored, in {forms}: {_size(sum(_sizes(some)))}")
        by_reason: dict[str, list[QuantisedWeight]] = {}
        for key, each in kept.items():
            if not each.form:
                by_reason.setdefault(each.reason, []).extend(quantised_weights(self.sources[key]))
        for reason, widened in by_reason.items():
            kinds = ", ".join(sorted({each.format.label for each in widened}))
            now = _size(sum(math.prod(each.shape) for each in widened) * dtype.itemsize)
            before = _size(sum(_sizes(widened)))
            parts.append(f"weights in {kinds} widened to {name} ({reason}): {now} instead of {before}")
        if parts and self.activation_scales:
            parts.append(f"activations stay in {name}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Kept:
    """The outcome for a quantised weight: the form that holds it, with or without another rounding, or why none
    does."""

    form: str = ""
    as_stored: bool = False
    reason: str = ""


def contents(scheme: Scheme | None, stored: Mapping[str, StoredTensor], strict: bool) -> Contents:
    """Return the weights that `scheme` reads from `stored` tensors. Without `strict`, ignore scales of a KV cache."""
    if scheme is None:
        reason = "config.json has no quantization_config that says how"
        return Contents(dict(stored), _unexplained(stored, stored, reason))
    result = Contents({})
    cache: list[str] = []
    groups: dict[str, dict[str, str]] = {}  # names of stored tensors, by the weight and the role
    placed: dict[str, tuple[str, str]] = {}
    for name in stored:
        if name.endswith(_CACHE):
            cache.append(name)
        elif (place := _place(scheme, name, stored)) is not None:
            placed[name] = place
        else:
            result.sources[name] = stored[name]
    for name, (target, role) in placed.items():
        other = groups.setdefault(target, {}).setdefault(role, name)
        if other != name and role != "activation":
            result.problems.append(f"{shown(name)} and {shown(other)} are both the {role} of {shown(target)}")
    result.problems += _unexplained(result.sources, stored, f"{scheme.method} has no scales of these names")
    for target, names in groups.items():
        weights = [names[role] for role in _WEIGHTS if role in names] + [target] * (target in result.sources)
        if len(weights) > 1:
            result.problems.append(f"{shown(target)} is stored more than once: {listed(weights)}: expected one")
            continue
        if set(names) == {"weight"} and stored[names["weight"]].dtype not in PACKED_DTYPES[:2]:
            result.sources[target] = stored[names["weight"]]
            continue
        result.activation_scales += "activation" in names
        try:
            source = _weight(scheme, target, {role: stored[name] for role, name in names.items()})
            result.sources[target] = source
            for each in quantised_weights(source):
                each.name = target
        except CheckpointError as error:
            result.problems.append(f"{shown(target)} {one_line(error)}")
    if not result.problems and not result.quantised and not cache:  # a cache may be quantised alone
        result.problems.append(
            f"the configuration says that weights are quantised ({scheme.method}), and no stored weight is: remove"
            " quantization_config from config.json"
        )
    if cache and strict:
        result.problems.append(
            f"the files hold scales of a quantised KV cache, and the cache here is not quantised: {listed(cache)};"
            " strict=False loads the model without them"
        )
    return result


def _place(scheme: Scheme, name: str, stored: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
    """Return the name of a stored tensor's weight and its role there, None for a tensor by itself."""
    for suffix in sorted(scheme.suffixes, key=len, reverse=True):
        if name.endswith(suffix):
            role, ending = scheme.suffixes[suffix]
            target = name.removesuffix(suffix) + ending
            if suffix == ".scale" and (target not in stored or stored[target].dtype not in PACKED_DTYPES):
                return None  # a module's own parameter of that name
            return target, role
    scaled = [suffix for suffix, (_, ending) in scheme.suffixes.items() if not ending and name + suffix in stored]
    return (name, "weight") if scaled else None


def _weight(scheme: Scheme, target: str, roles: dict[str, StoredTensor]) -> Source:
    roles.pop("activation", None)
    main = next((roles[role] for role in _WEIGHTS if role in roles), None)
    if main is None:
        raise CheckpointError(
            f"has no stored weight, only its {', '.join(sorted(roles)) or 'activation scales'}: expected a weight"
        )
    if set(roles) == {"weight"} and main.dtype not in PACKED_DTYPES:
        return main
    module = target.removesuffix(".weight")
    if scheme.leaves_out(module):
        raise CheckpointError(
            f"is quantised, but the configuration ({scheme.method}) excludes {shown(module)}: expected an unquantised "
            "weight"
        )
    experts = main.shape[0] if main.shape else 0
    if len(main.shape) == (4 if "blocks" in roles else 3):
        if any(not each.shape or each.shape[0] != experts for each in roles.values()):
            shapes = {role: list(each.shape) for role, each in roles.items()}
            raise CheckpointError(f"has tensors of shapes {shapes}: expected {experts} experts in each")
        return Stack([scheme.build(target, {k: each.entry(i) for k, each in roles.items()}) for i in range(experts)])
    return scheme.build(target, roles)


def _unexplained(sources: Mapping[str, Source], stored: Mapping[str, StoredTensor], reason: str) -> list[str]:
    """Return a list with one problem if some of `sources` are in fp8 and `stored` has their scales; else an empty list.

    `reason`: why these scales are not read.
    """
    names = []
    for name, each in sources.items():
        stem = name.removesuffix(".weight")
        if each.dtype in PACKED_DTYPES[:2] and any(f"{stem}{end}" in stored for end in _SCALES):
            names.append(name)
    return [f"the weights are quantised, and {reason}: {listed(names)}"] if names else []


def needs(roles: Roles, *required: str) -> None:
    """Raise `CheckpointError` unless `roles` has each of those `required`."""
    if missing := [each for each in required if each not in roles]:
        raise CheckpointError(f"has no stored {', '.join(missing)}: expected {', '.join(required)}")


def _sizes(sources: Iterable[Source]) -> Iterator[int]:
    return (each.nbytes for each in sources)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
