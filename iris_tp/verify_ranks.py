"""Whether a model's logits have the same bits on any number of ranks, on this machine: `iris-tp verify ranks`.

A prompt is read and continued alone and in batches, by a context with `invariant="ranks"`, on one number of ranks after
the other: eagerly and, on GPUs, from CUDA graphs. The logits of all ranks are compared with those of the first number,
bit by bit. Where an eager run differs, what modules gave whole says which was the first.

    iris-tp verify ranks --model path --ranks 1,2,3,4
    iris_tp.verify_ranks.logits(model, ctx)        what is compared, of a split model
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
_Seen = list[tuple[str, str, torch.Tensor]]  # module, op, what it gave


@dataclass(frozen=True)
class Finding:
    """One batch on so many ranks. `differing`: numbers of the logits that have other bits than on the first number of
    ranks, on the rank with most of them. `first`: module and op where they begin, if that was looked for and found.
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
    """For each batch of a split `model` the logits behind a prompt and of `steps` steps, [words] each. Collective."""
    return [each for _, _, made, _ in read(model, ctx, batches, steps, length, compile) for each in made]


def read(
    model: torch.nn.Module,
    ctx: Iris,
    batches: Sequence[int],
    steps: int,
    length: int,
    compile: bool,
    modes: Sequence[str] | None = None,
) -> list[tuple[str, int, list[torch.Tensor], _Seen]]:
    """(mode, batch, logits of a prompt and its steps, what modules gave for it) of each batch."""
    config: Any = model.config
    draw = torch.Generator("cpu").manual_seed(0)
    prompts = torch.randint(
        3, config.get_text_config().vocab_size, (max(batches), length), generator=draw, device="cpu"
    ).tolist()
    found = []
    for mode in modes or modes_on(ctx.device):
        for batch in batches:
            place = batch // 2
            others = [prompts[(i - place) % max(batches)] for i in range(batch)]
            made, seen = run_batch(model, ctx, mode, others, place, length + steps + 1, steps, compile)
            here = [(name, op, each.cpu()) for name, op, each in seen if mode == "eager"]
            found.append((mode, batch, [each.cpu() for each in made], here))
    return found


def _rank_main(results: Path, args: argparse.Namespace) -> None:
    with split(args, results) as (model, ctx):
        found = read(model, ctx, args.batches, args.steps, args.length, args.compile)
        torch.save(found, results / f"{ctx.cur_rank}.pt")


def compared(first: list, others: list[list], ranks: int) -> list[Finding]:
    """What differs between the readings of one rank and those of all of so many `ranks`."""
    found = []
    for number, (mode, batch, expected, seen) in enumerate(first):
        worst, where = 0, ""
        for other in others:
            _, _, made, theirs = other[number]
            differing = sum(unlike(a, b) for a, b in zip(expected, made, strict=True))
            if differing > worst:
                worst, where = differing, _first(seen, theirs) if mode == "eager" else ""
        found.append(Finding(mode, ranks, batch, worst, where))
    return found


def _first(alone: _Seen, split: _Seen) -> str:
    """The first module of which both gave all, and other numbers. A part of a result has another shape."""
    theirs = {name: each for name, _, each in split}
    for name, op, expected in alone:
        made = theirs.get(name)
        if made is not None and made.shape == expected.shape and (count := unlike(expected, made)):
            return f"{name} ({op}), {count} of {expected.numel()} numbers"
    return "no module that gave all of its result while the prompt was read: a step"


def table(found: Sequence[Finding]) -> str:
    head = f"{'mode':<8}{'ranks':>6}{'batch':>7}{'numbers that differ':>21}  first difference"
    rows = [f"{each.mode:<8}{each.ranks:>6}{each.batch:>7}{each.differing:>21}  {each.first}" for each in found]
    return "\n".join([head, *rows])


def main(args: argparse.Namespace) -> int:
    """Runs `args.ranks`, numbers of ranks, one after the other, and prints what differs from the first."""
    found: list[Finding] = []
    first: list | None = None
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(prefix="iris-verify-") as folder:
            run_reporting(_rank_main, ranks, Path(folder), args)
            readings = [torch.load(path) for path in sorted(Path(folder).glob("*.pt"))]
        first = readings[0] if first is None else first
        found += compared(first, readings, ranks)
    print(table(found))
    differing = sum(each.differing > 0 for each in found)
    numbers = ", ".join(map(str, args.ranks))
    print(f"{len(found)} batches on {numbers} ranks, {differing} differ: {'no' if differing else 'yes, the same bits'}")
    return 1 if differing else 0
