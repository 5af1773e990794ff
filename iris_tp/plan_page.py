"""`iris-tp plan --html FILE`: write one self-contained page in which a reader moves the sizes of a call.

Calls are those of products and of mixtures of experts, each with a separate grid.

The page has the planner's answer for every point of a grid, and stops at no other point. So all its numbers are exact;
for sizes between its points it names the command that computes them. A port of the planner to another language would
answer for all sizes, and be wrong silently whenever the planner changes.

`survey` makes the table, `page` puts it, deflated, into `plan_page.html`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import product
import json
from pathlib import Path
from typing import Any
import zlib

from iris.machines import machine_named
from iris_ops.planning.operations import GATE_UP, MOE_OPS
from iris_ops.planning.plan import WAYS, compare_ways
from iris_ops.problem import OPS, Problem, Request, requested_problem
import torch

from . import arguments

TEMPLATE = Path(__file__).with_name("plan_page.html")
GPUS = {gpu: arguments.GPUS[gpu] for gpu in ("h200", "h100", "mi300x")}


@dataclass(frozen=True)
class Grid:
    """The points of a page: every combination."""

    gpus: Sequence[str] = tuple(GPUS)
    ranks: Sequence[int] = (2, 4, 8)
    ops: Sequence[str] = OPS
    M: Sequence[int] = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
    N: Sequence[int] = (1024, 2560, 4096, 8192, 14336, 28672)
    K: Sequence[int] = (1024, 2048, 4096, 7168, 8192, 14336)


@dataclass(frozen=True)
class MixtureGrid:
    """The points of mixtures of experts: every combination, for the GPUs and ranks of the page."""

    ops: Sequence[str] = MOE_OPS
    tokens: Sequence[int] = (1, 4, 16, 32, 64, 128, 512, 2048, 8192)
    experts: Sequence[int] = (8, 32, 128, 256)
    top_k: Sequence[int] = (1, 2, 4, 8)
    sizes: Sequence[tuple[str, int, int]] = (  # model, hidden size, and intermediate size of an expert
        ("Mixtral-8x7B", 4096, 14336),
        ("Qwen3-30B-A3B", 2048, 768),
        ("gpt-oss", 2880, 2880),
        ("DeepSeek-V3", 7168, 2048),
        ("Qwen3-Next", 2048, 512),
    )


class _Texts:
    """A table that numbers texts, which may repeat."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def survey(grid: Grid, mixtures: MixtureGrid) -> dict[str, Any]:
    """Return the plans of each point of both grids, in bf16 and the op's usual form.

    `points`: for each, in the order of the grid's fields, the last one fastest, `[ways, rejected]`. A way is the best
    configuration of one kernel, `[label, total, product, link]`, the times in tenths of a microsecond; the first one is
    the plan's. `rejected` has `[kernel, reason]`. Labels, kernels and reasons are numbers of `words`.
    """
    texts, points, of_mixtures = _Texts(), [], []
    for gpu, ranks, op, M, N, K in product(grid.gpus, grid.ranks, grid.ops, grid.M, grid.N, grid.K):
        problem = requested_problem(Request(op, M, N, K, ranks, torch.bfloat16))
        points.append(_point(problem, machine_named(*GPUS[gpu]), texts))
    axes = {axis.name: list(getattr(grid, axis.name)) for axis in fields(grid)}
    own = {axis.name: list(getattr(mixtures, axis.name)) for axis in fields(mixtures)}
    for gpu, ranks, *where in product(grid.gpus, grid.ranks, *own.values()):
        of_mixtures.append(_point(mixture_of(ranks, *where), machine_named(*GPUS[gpu]), texts))
    names = {gpu: GPUS[gpu][0] for gpu in grid.gpus}
    own["sizes"] = [list(each) for each in mixtures.sizes]  # as JSON has them
    mixture = {"axes": {"gpus": axes["gpus"], "ranks": axes["ranks"], **own}, "points": of_mixtures}
    return {"axes": axes, "names": names, "words": list(texts.numbers), "points": points, "mixtures": mixture}


def mixture_of(ranks: int, op: str, tokens: int, experts: int, top_k: int, sizes: tuple[str, int, int]) -> Problem:
    """Return the problem of a point: a rank has its part of each expert's intermediate size."""
    _, hidden, intermediate = sizes
    N, K = (intermediate // ranks, hidden) if op == GATE_UP else (hidden, intermediate // ranks)
    return requested_problem(Request(op, tokens, N, K, ranks, torch.bfloat16, experts=experts, top_k=top_k))


def _tenths(us: float) -> int:
    return round(10 * us)


def _point(problem: Any, machine: Any, texts: Callable[[str], int]) -> list[Any]:
    comparison = compare_ways(WAYS, problem, machine)
    best: dict[str, list[int]] = {}  # of each way, in the order of the plan
    for each in comparison.candidates:
        if each.way.name not in best:
            us = map(_tenths, (each.times.total_us, each.times.gemm_us, each.times.link_us))
            best[each.way.name] = [texts(each.way.label(problem, each.config)), *us]
    return [list(best.values()), [[texts(way.name), texts(reason)] for way, reason in comparison.rejected]]


def page(table: dict[str, Any]) -> str:
    """Return the page as text."""
    packed = base64.b64encode(zlib.compress(json.dumps(table, separators=(",", ":")).encode(), 9)).decode()
    return TEMPLATE.read_text().replace("/*TABLE*/", packed)


def unpacked(text: str) -> dict[str, Any]:
    """Return the table of a page."""
    packed = text.split('id="table">', 1)[1].split("<", 1)[0]
    return json.loads(zlib.decompress(base64.b64decode(packed)))
