"""Report the fate of each module of a split model: its style, its local part, and its op."""

from __future__ import annotations

from dataclasses import dataclass, field
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from ..experts import SplitExperts
from ..sharded import ShardedLinear, part_of
from ..weight_storage import Quantised
from .mixture import is_split_experts
from .recurrent_heads import STYLE as RECURRENT
from .stored import FORMS

if TYPE_CHECKING:
    from iris.context import Iris


@dataclass(frozen=True)
class ReportRow:
    """One module that holds parameters."""

    name: str
    style: str
    shape: tuple[int, ...]  # of the local weight
    bytes: int  # allocated on this rank; 0 for a weight that shares another's memory
    op: str


@dataclass(frozen=True)
class Report:
    """Describe how a model was split: one row for each module with parameters. Printing it folds equal layers into one
    line.

    Args:
        rank: this rank.
        world: the number of ranks.
        rows: a `ReportRow` for each module: its name, style, local shape, bytes and op.
        plan: where the plan comes from.
        widened: which quantized weights were kept, and which were converted.
        verified: what `from_pretrained(..., verify=True)` compared.
    """

    rank: int
    world: int
    rows: list[ReportRow] = field(default_factory=list)
    plan: str = ""  # its origin, in words
    widened: str = ""  # what quantised weights in the files became, in words
    verified: tuple = ()  # what `from_pretrained(..., verify=True)` compared, see `checkpoint.verify`

    @property
    def bytes(self) -> int:
        """Return the bytes of parameters on this rank."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        folded: dict[tuple, list[ReportRow]] = {}
        for row in self.rows:
            pattern = re.sub(r"\.\d+(?=\.|$)", ".*", row.name)
            folded.setdefault((pattern, row.style, row.shape, row.op), []).append(row)
        lines = [("module", "style", "local shape", "bytes", "served by")]
        for (pattern, style, shape, op), rows in folded.items():
            name = pattern if len(rows) == 1 else f"{pattern}  ({len(rows)})"
            lines.append((name, style, "x".join(map(str, shape)), f"{sum(row.bytes for row in rows):,}", op))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        title = f"rank {self.rank} of {self.world}: {self.bytes:,} bytes of parameters"
        title += f", split by {self.plan}" if self.plan else ""
        return "\n".join([title, *([self.widened] if self.widened else [])] + [_line(line, widths) for line in lines])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [c.rjust(w) if i == 3 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(padded).rstrip()


def make_report(
    model: nn.Module, styles: dict[str, str], ctx: Iris, plan: str = "", weights: str | None = None
) -> Report:
    """Return the report of `model` as it is now, split by `styles`, those of `plan`, with the option `weights`."""
    report = Report(ctx.cur_rank, ctx.num_ranks, plan=plan)
    counted: set[int] = set()  # parameters of earlier modules, which may share one
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        tied = getattr(module, "tied_to", None)
        new = [p for key, p in own.items() if id(p) not in counted and not (tied and key == "weight")]
        size = sum(p.numel() * p.element_size() for p in new)
        counted |= {id(p) for p in new}
        split = (
            isinstance(module, ShardedLinear) or is_split_experts(module) or any(part_of(module, key) for key in own)
        )
        style = styles.get(name, "replicate") + (f", tied to {tied}" if tied else "")
        if not split and "replica" not in style:
            style += ", kept whole"
        weight = module.weight if "weight" in own else next(iter(own.values()))
        op = _served_by(module)
        quantised = isinstance(getattr(module, "storage", None), Quantised) or bool(getattr(module, "coded", None))
        if weights in FORMS and split and not quantised and (dtype := _kept_dtype(own)):
            op += f" (weight kept in {dtype})"
        shape = module.local_shape if isinstance(module, ShardedLinear) else tuple(weight.shape)
        if isinstance(module, SplitExperts) and module.coded:
            shape = next(iter(module.coded.values())).shape
        report.rows.append(ReportRow(name, style, shape, size, op))
    return report


def _kept_dtype(parameters: dict[str, nn.Parameter]) -> str | None:
    """Return the dtype of the matrices among `parameters`; None where there are none."""
    kinds = {each.dtype for each in parameters.values() if each.dim() > 1}
    return str(min(kinds, key=str)).removeprefix("torch.") if kinds else None


def unconverted(model: nn.Module, styles: dict[str, str]) -> list[str]:
    """Return the names of the modules of `model` that no `weights` option converts: experts and recurrent states."""
    recurrent = {name for name, style in styles.items() if style == RECURRENT}
    return [
        name
        for name, module in model.named_modules()
        if (is_split_experts(module) and not getattr(module, "coded", None))
        or (name in recurrent and _kept_dtype(dict(module.named_parameters())))
    ]


def _served_by(module: Any) -> str:
    if isinstance(module, SplitExperts):
        return module.served_by
    if is_split_experts(module):
        return module._sums.op
    return module.served_by if isinstance(module, ShardedLinear) else "-"
