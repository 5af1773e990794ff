"""Tries every causal language model type of the installed transformers, split and unsplit, and writes docs/models.md.

    python -m tests.coverage_of_models --engine --write          all types on 2 and on 3 ranks: an hour on two cores
    python -m tests.coverage_of_models --only mixtral --report   one type, and how each of its modules was split
    ... --only mixtral dbrx --engine --write                     other rows of the page for these
    python -m tests.coverage_of_models --json FILE               goes on where FILE ends
    python -m tests.coverage_of_models --json FILE --engine      also runs each type of FILE in an engine

Fails if a split model or an engine accepts a type and gives wrong results. `table` describes the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import time

import iris  # noqa: F401  # before triton

from tests.coverage_of_models import compare, engine, table, tiny
from tests.harness import run_ranks

TIMEOUT_S = 400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types in place of all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3], metavar="N")
    parser.add_argument("--json", type=Path, help="results by type: read first if it is there, then written")
    parser.add_argument("--engine", action="store_true", help="try each type that is split in an engine, on 2 ranks")
    parser.add_argument("--again", action="store_true", help="try what the file has, too")
    parser.add_argument("--write", action="store_true", help="write docs/models.md; with --only, their rows")
    parser.add_argument("--report", action="store_true", help="print each report")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    for model_type in arguments.only or tiny.types():
        known = model_type in results and not arguments.again and not arguments.only
        if known and not (arguments.engine and "engine" not in results[model_type]):
            continue
        started = time.monotonic()
        if not known:
            results[model_type] = of_type(model_type, arguments.ranks, arguments.report)
        row = results[model_type]
        text = row["message"] if row["outcome"] != "split" else f"{row['share']:.0%}"
        if arguments.engine and row["outcome"] == "split":
            row["engine"] = in_engine(model_type)
            text += f", in an engine: {row['engine']}"
        print(f"{model_type}: {row['outcome']} {text[:300]} ({time.monotonic() - started:.1f} s)", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        some = {name: results[name] for name in arguments.only or ()}
        page = table.PLACE.read_text()
        page = table.updated(page, some) if some else table.render(page, results, arguments.ranks)
        table.PLACE.write_text(page)
    counts: dict[str, int] = {}
    for row in results.values():
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    print(counts)
    wrong = [name for name, row in results.items() if row.get("engine", "").startswith("wrong")]
    print(f"wrong in an engine: {', '.join(wrong) or 'none'}")
    return int(counts.get("wrong", 0) > 0 or bool(wrong))


def of_type(model_type: str, ranks: list[int], shows: bool) -> dict:
    """One row: outcome (split, refused, wrong, untried), the share that is split, and a message."""
    if model_type in tiny.UNTRIED:
        return {"outcome": "untried", "share": 0.0, "message": tiny.UNTRIED[model_type]}
    try:
        single, double, note = compare.reference(model_type)
    except Exception as error:  # of transformers: whatever it is, the type cannot be tried
        return {"outcome": "untried", "share": 0.0, "message": f"{type(error).__name__}: {error}"}
    share, report = 1.0, ""
    for world_size in ranks:
        try:
            outcomes = run_ranks(world_size, compare.split_body, model_type, timeout=TIMEOUT_S)
        except Exception as error:  # the worst of all: accepted, and then it fails
            lines = str(error).strip().splitlines()
            return {"outcome": "wrong", "share": 0.0, "message": f"{world_size} ranks: {' | '.join(lines[-8:])}"[-800:]}
        if outcomes[0].refusal:
            return {"outcome": "refused", "share": 0.0, "message": outcomes[0].refusal}
        if wrong := compare.judge(single, double, outcomes):
            return {"outcome": "wrong", "share": 0.0, "message": f"{world_size} ranks: {wrong}"}
        share, report = min(share, *(each.share for each in outcomes)), outcomes[0].report
        if shows:
            print(report)
    return {"outcome": "split", "share": round(share, 3), "message": note}


def in_engine(model_type: str) -> str:
    """Return the verdict of `engine.judge` on a split type."""
    try:
        return engine.judge(model_type, run_ranks(2, engine.served_body, model_type, timeout=TIMEOUT_S))
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"[-400:]


if __name__ == "__main__":
    raise SystemExit(main())
