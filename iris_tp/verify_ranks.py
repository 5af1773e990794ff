"""Check that a model's logits have the same bits on any number of ranks, on this machine: `iris-tp verify ranks`.

A prompt is read and continued alone and in batches, by a context that promises this, on one number of ranks after
the other: eagerly and, on GPUs, from CUDA graphs. The logits of all ranks are compared with those of the first number,
bit by bit. Where an eager run differs, complete outputs of modules show the first that differed.

    iris-tp verify ranks --model path --ranks 1,2,3,4
    iris_tp.verify_ranks.logits(model, ctx)        the logits of a split model that are compared
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from .arguments import LENGTH, STEPS
from .launch import run_reporting
from .verify_runs import modes_on, run_batch, split, unlike

if TYPE_CHECKING:
    from iris.context import Iris

BATCHES = (1, 3)
_Outputs = list[tuple[str, str, torch.Tensor]]  # module, op, its output


@dataclass(frozen=True)
class Finding:
    """One batch on a number of ranks. `differing`: numbers of the logits that have other bits than on the first number
    of ranks, on the rank with most of them. `first`: the module and op that differs first, if known.
    """

    mode: str
    ranks: int
    batch: int
    differing: int
    first: str = ""


def logits(
    model: torch.nn.Module, ctx: Iris, batches: Sequence[int] = BATCHES, steps: int = STEPS,
    length: int = LENGTH, compile: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return, by batch, the logits [vocabulary] after a prompt and of `steps` steps of a split `model`. Collective."""
    return [each for _, _, rows, _ in read(model, ctx, batches, steps, length, compile) for each in rows]


def read(
    model: torch.nn.Module,
    ctx: Iris,
    batches: Sequence[int],
    steps: int,
    length: int,
    compile: bool,
    modes: Sequence[str] | None = None,
) -> list[tuple[str, int, list[torch.Tensor], _Outputs]]:
    """Return (mode, batch, logits of a prompt and its steps, modules' outputs for it) of each batch."""
    config: Any = model.config
    draw = torch.Generator("cpu").manual_seed(0)
    prompts = torch.randint(
        3, config.get_text_config().vocab_size, (max(batches), length), generator=draw, device="cpu"
    ).tolist()
    readings = []
    for mode in modes or modes_on(ctx.device):
        for batch in batches:
            place = batch // 2
            batch_prompts = [prompts[(i - place) % max(batches)] for i in range(batch)]
            logits, seen = run_batch(model, ctx, mode, batch_prompts, place, length + steps + 1, steps, compile)
            here = [(name, op, each.cpu()) for name, op, each in seen if mode == "eager"]
            readings.append((mode, batch, [each.cpu() for each in logits], here))
    return readings


def _rank_main(results: Path, args: argparse.Namespace) -> None:
    with split(args, results) as (model, ctx):
        readings = read(model, ctx, args.batches, args.steps, args.length, args.compile)
        torch.save(readings, results / f"{ctx.cur_rank}.pt")


def compared(first: list, readings: list[list], ranks: int) -> list[Finding]:
    """Return the differences between the readings of one rank and those of all `ranks` ranks."""
    findings = []
    for number, (mode, batch, expected, seen) in enumerate(first):
        worst, where = 0, ""
        for other in readings:
            _, _, actual, theirs = other[number]
            differing = sum(unlike(a, b) for a, b in zip(expected, actual, strict=True))
            if differing > worst:
                worst, where = differing, _first(seen, theirs) if mode == "eager" else ""
        findings.append(Finding(mode, ranks, batch, worst, where))
    return findings


def _first(alone: _Outputs, split: _Outputs) -> str:
    """Return the first module whose complete outputs differ. A part of a result has another shape."""
    theirs = {name: each for name, _, each in split}
    for name, op, expected in alone:
        actual = theirs.get(name)
        if actual is not None and actual.shape == expected.shape and (count := unlike(expected, actual)):
            return f"{name} ({op}), {count} of {expected.numel()} numbers"
    return "no module that gave all of its result while the prompt was read: a step"


def table(findings: Sequence[Finding]) -> str:
    head = f"{'mode':<8}{'ranks':>6}{'batch':>7}{'numbers that differ':>21}  first difference"
    rows = [f"{each.mode:<8}{each.ranks:>6}{each.batch:>7}{each.differing:>21}  {each.first}" for each in findings]
    return "\n".join([head, *rows])


def main(args: argparse.Namespace) -> int:
    """Run `args.ranks`, numbers of ranks, one after the other, and print the differences from the first."""
    findings: list[Finding] = []
    first: list | None = None
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="iris-verify-") as folder:
            run_reporting(_rank_main, ranks, Path(folder), args)
            readings = [torch.load(path) for path in sorted(Path(folder).glob("*.pt"))]
        first = readings[0] if first is None else first
        findings += compared(first, readings, ranks)
    print(table(findings))
    differing = sum(each.differing > 0 for each in findings)
    numbers = ", ".join(map(str, args.ranks))
    same = "no" if differing else "yes, the same bits"
    print(f"{len(findings)} batches on {numbers} ranks, {differing} differ: {same}")
    return 1 if differing else 0
