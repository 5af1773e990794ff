"""Check that ranks load what a checkpoint's files hold: `iris-tp verify load`.

Each rank loads its part of the model, then reads a weight of each kind again, widens it in float64 and compares. The
ranks compare digests of what several of them hold, and that their parts are the whole.

    iris-tp verify load --model path --ranks 4
    layers.from_pretrained(path, ctx, verify=True)     the same in a program
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
import json
from pathlib import Path
import tempfile
import time
from typing import Any

import torch

from . import launch


def _rank_main(results: Path, args: argparse.Namespace) -> None:
    import iris
    import layers

    with launch.reporting(results), iris.iris(int(args.heap_gib * 2**30)) as ctx:
        begun = time.monotonic()
        model = layers.from_pretrained(
            args.model, ctx, dtype=getattr(torch, args.dtype), verify=True, weights=args.weights
        )
        report = model.parallel_report
        loaded = {
            "rows": [asdict(each) for each in report.verified],
            "widened": report.widened,
            "bytes": report.bytes,
            "seconds": time.monotonic() - begun,
        }
        (results / f"{ctx.cur_rank}.json").write_text(json.dumps(loaded))


def table(by_rank: Sequence[dict[str, Any]]) -> str:
    """Return a line for each kind of weight: numbers and errors of all ranks, the digest of rank 0's part."""
    head = f"{'numbers':>14}  {'largest error':>13}  {'rank 0':<16}  weight"
    lines = [head]
    for number, row in enumerate(by_rank[0]["rows"]):
        alike = [each["rows"][number] for each in by_rank]
        error = max(each["error"] for each in alike)
        numbers = sum(each["numbers"] for each in alike)
        lines.append(
            f"{numbers:>14,}  {error:>13.2f}  {row['digest']}  {row['name']} ({row['stored']} to {row['dtype']})"
        )
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Return 0 where every rank holds what the files do. Raises `RankError` with what is wrong on any."""
    with tempfile.TemporaryDirectory(prefix="iris-verify-") as folder:
        launch.run_reporting(_rank_main, args.ranks[0] if args.ranks else None, Path(folder), args)
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    print(table(by_rank))
    if by_rank[0]["widened"]:
        print(by_rank[0]["widened"])
    sizes = [result["bytes"] for result in by_rank]
    even = max(sizes) * len(sizes) / sum(sizes)
    seconds = max(result["seconds"] for result in by_rank)
    print("errors are in roundings to the dtype: expected at most 1")
    print(f"the fullest rank has {max(sizes):,} bytes, {even:.3f} of the mean")
    print(f"{len(by_rank)} ranks loaded what the files hold, in {seconds:.1f} s")
    return 0
