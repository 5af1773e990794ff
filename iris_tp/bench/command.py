"""`iris-tp bench`: check and time an op of the library and torch's product and collective, on this machine.

    iris-tp bench                                            all four ops, at sizes that this machine can take
    iris-tp bench matmul_all_reduce 2048 8192 2048 --ranks 4
The sizes are those of `iris-tp plan`. Both read the same random inputs, of which several copies take turns, so that no
weights are left in a GPU's cache from the previous call; both are checked against a higher precision before they are
timed, in turns, as CUDA graphs on GPUs and call by call on CPUs. There the interpreter's time predicts no GPU's.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from .. import arguments
from . import separate
from .compare import budget_of, compare
from .inputs import Inputs
from .rows import CALLS, Row
from .team import Team, launch

ALONE = "product alone"
_SIZES = {"cuda": (2048, 8192, 2048), "cpu": (32, 64, 64)}
_LIMIT_S = 600.0


def main(argv: list[str]) -> int:
    return launch(measure, parse(argv), limit_s=_LIMIT_S)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.bench(in_checkout=False)
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [args.M, args.N, args.K]
    if None in sizes and sizes != [None] * 3:
        parser.error("expected M, N and K, or none of them")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.ranks is None:
        args.ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    if args.M is None:
        args.M, args.N, args.K = _SIZES[args.device]
    args.heap_gib = args.heap_gib or (4 if args.device == "cuda" else 0.25)
    return args


def measure(team: Team, args: argparse.Namespace) -> None:
    """Measure on each rank; the first prints a table, and contenders that failed or are wrong."""
    import iris

    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32, without TF32
    where = torch.cuda.get_device_name() if team.cuda else "CPU, in Triton's interpreter"
    how = "CUDA graphs" if team.cuda else "one call after the other"
    team.say(f"iris-tp {iris.__version__}, torch {torch.__version__}, {team.world} x {where}, {args.dtype}")
    team.say(f"M, N, K = {args.M}, {args.N}, {args.K}; us a call, median, slowest rank; {how}")
    names = ["ours", separate.name(team), ALONE]
    team.say(_line("", names))
    notes = []
    with iris.iris(int(args.heap_gib * 2**30)) as ctx:
        for op, call in CALLS.items():
            if args.op in (None, call):
                result = _compared(ctx, Row(op, args.M, args.N, args.K), team, args)
                us = result["us"]
                team.say(_line(call, [f"{us[name]:.1f}" if name in us else "-" for name in names]))
                notes += [f"{call}, {name}: {reason}" for name, reason in result["failed"].items()]
                errors = result["errors"].items()
                notes += [
                    f"{call}, {name}: wrong, {error:.3g} of the allowed error" for name, error in errors if error > 1
                ]
    for note in notes:
        team.say(note)
    if notes:
        raise SystemExit(1)


def _line(first: str, cells: list[str]) -> str:
    return f"{first:22}" + "".join(f"{cell:>16}" for cell in cells)


def _compared(ctx: Any, row: Row, team: Team, args: argparse.Namespace) -> dict[str, dict]:
    """Return the result of `compare` for one op."""
    inputs = Inputs(row, team, getattr(torch, args.dtype))
    rows, columns = inputs.out_shape
    # of one size on every rank, though a last part may be short
    memory = ctx.empty(math.prod(row.out_shape(0, team.world)), dtype=inputs.dtype)
    out, op = memory[: rows * columns].view(rows, columns), getattr(ctx.ops, CALLS[row.op])

    def ours(i: int) -> torch.Tensor:
        op(out, inputs.A[i], inputs.B[i])
        return out

    calls = {"ours": ours, separate.name(team): separate.PREPARE[row.op](inputs), ALONE: separate.product(inputs)}
    budget = budget_of(team, args.quick)
    return compare(team, calls, lambda name, call: inputs.check(call, name == ALONE), inputs.copies, budget)
