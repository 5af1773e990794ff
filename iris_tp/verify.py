"""Check that a row of a model's results has the same bits in any batch, on this machine: `iris-tp verify batch`.

A prompt is read and continued alone, and then in batches of several sizes, in the first, middle and last place, with
other prompts of its own length and with longer ones, to which it is padded: eagerly and, on GPUs, from CUDA graphs.
Compared are the logits after the prompt and of each step, bit by bit. Where an eager run differs, the outputs of
modules for the row show the first that differed.

    iris-tp verify batch --model path --ranks 2
    iris_tp.verify.batch(model, ctx)        the same for a split model, as a list of findings

`iris-tp verify ranks` is in `verify_ranks.py`, `iris-tp verify load` in `verify_load.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
import json
from pathlib import Path
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
import torch

from . import arguments, launch, verify_load, verify_ranks
from .arguments import LENGTH, STEPS
from .verify_runs import modes_on, run_batch, split, unlike

if TYPE_CHECKING:
    from iris.context import Iris

BATCHES = (2, 7, 64)
LONGER = 7


@dataclass(frozen=True)
class Finding:
    """One batch. `differing`: numbers of the row's logits whose bits differ from those alone. `first`: the module and
    op that differs first, if known.
    """

    mode: str
    batch: int
    place: int
    padding: int
    differing: int
    first: str = ""


def batch(
    model: torch.nn.Module, ctx: Iris, batches: Sequence[int] = BATCHES, steps: int = STEPS, length: int = LENGTH,
    compile: bool = False, thorough: bool = True, modes: Sequence[str] | None = None,
) -> list[Finding]:  # fmt: skip
    """Return a finding for each batch of a split `model`. Collective; each rank compares its own logits.

    `thorough`: in the first, middle and last place, without padding and, if the model masks it, with padding; else in
    the middle, without. `modes`: those of "eager" and "graphs" to run; by default all that the device supports. Raises
    `ArgumentError` as `layers.Engine` does.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    draw = torch.Generator("cpu").manual_seed(0)
    prompt = torch.randint(3, vocabulary, (length,), generator=draw, device="cpu").tolist()
    room = length + LONGER + steps + 1
    paddings = (0, LONGER) if thorough and _passes_over_padding(model, room) else (0,)
    findings = []
    for mode in modes or modes_on(ctx.device):
        alone = run_batch(model, ctx, mode, [prompt], 0, room, steps, compile)
        for size in batches:
            for place in sorted({0, size // 2, size - 1}) if thorough else [size // 2]:
                for padding in paddings if size > 1 else (0,):
                    rows = torch.randint(3, vocabulary, (size, length + padding), generator=draw, device="cpu").tolist()
                    rows[place] = prompt
                    logits, seen = run_batch(model, ctx, mode, rows, place, room, steps, compile)
                    differing = sum(unlike(a, b) for a, b in zip(alone[0], logits, strict=True))
                    first = _first(alone[1], seen) if differing and mode == "eager" else ""
                    findings.append(Finding(mode, size, place, padding, differing, first))
    return findings


def _passes_over_padding(model: torch.nn.Module, room: int) -> bool:
    from layers.serving.served import check_padding

    try:
        check_padding(model, torch.tensor([[False, True]], device="cpu"), room)
    except ArgumentError:
        return False
    return True


def _first(alone: list, among: list) -> str:
    for (name, op, a), (_, _, b) in zip(alone, among, strict=False):
        if count := unlike(a, b):
            return f"{name} ({op}), {count} of {a.numel()} numbers"
    return "no module that was watched while the prompts were read: attention, or a step"


def table(findings: Sequence[Finding]) -> str:
    head = f"{'mode':<8}{'batch':>6}{'place':>7}{'padding':>9}{'numbers that differ':>21}  first difference"
    rows = [
        f"{each.mode:<8}{each.batch:>6}{each.place:>7}{each.padding:>9}{each.differing:>21}  {each.first}"
        for each in findings
    ]
    return "\n".join([head, *rows])


def _rank_main(results: Path, args: argparse.Namespace) -> None:
    with split(args, results) as (model, ctx):
        findings = batch(model, ctx, args.batches, args.steps, args.length, args.compile)
        (results / f"{ctx.cur_rank}.json").write_text(json.dumps([vars(each) for each in findings]))


def main(argv: list[str]) -> int:
    parser = arguments.verify()
    args = parser.parse_args(argv)
    args.promised = None if args.nothing or args.level == "load" else args.level
    if args.level == "ranks":
        args.ranks = args.ranks or tuple(range(1, launch.default_ranks() + 1))
        args.batches = args.batches or verify_ranks.BATCHES
        if len(args.ranks) < 2:
            parser.error(
                f"--ranks is {args.ranks[0]}: expected several numbers, of which each is compared with the first"
            )
    else:
        args.batches = args.batches or (BATCHES if torch.cuda.is_available() else BATCHES[:-1])
        if args.ranks and len(args.ranks) > 1:
            parser.error(f"--ranks is {','.join(map(str, args.ranks))}: expected one number, or the level ranks")
    try:
        for ranks in args.ranks or ():
            launch.check_ranks(ranks)
    except ValueError as error:
        parser.error(str(error))
    if args.model is None:
        from . import smollm2

        if lacking := smollm2.missing():
            print("iris-tp verify: first " + " && ".join(lacking), file=sys.stderr)
            return 2
        args.model = str(smollm2.checkpoint())
    try:
        return {"ranks": verify_ranks.main, "load": verify_load.main}.get(args.level, _main)(args)
    except launch.RankError as error:
        print(f"iris-tp verify: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="iris-verify-") as folder:
        launch.run_reporting(_rank_main, args.ranks[0] if args.ranks else None, Path(folder), args)
        by_rank = [
            [Finding(**each) for each in json.loads(path.read_text())] for path in sorted(Path(folder).glob("*.json"))
        ]
    worst = max(by_rank, key=lambda findings: sum(each.differing for each in findings))
    print(table(worst))
    if max(args.batches) > 1 and not any(each.padding for each in worst):
        print("without padding: an engine takes prompts of one length only for this model")
    differing = sum(each.differing > 0 for each in worst)
    verdict = "no" if differing else "yes, the same bits"
    print(f"{len(worst)} batches on {len(by_rank)} ranks, {differing} differ: {verdict}")
    return 1 if differing else 0
