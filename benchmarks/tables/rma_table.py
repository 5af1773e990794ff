"""Results of `benchmarks.rma` as Markdown."""

import statistics

from benchmarks.measuring.report import headline
from benchmarks.measuring.tables import markdown

# What the link of an H200 carries each way with all ranks at once, GB/s, by operation and programs; a round trip, µs.
KNOWN_GPU = "H200"
KNOWN_GB_S = {("store", 8): 348, ("store", 32): 348, ("store", 132): 363, ("load", 8): 197, ("load", 32): 332}
KNOWN_GB_S[("load", 132)] = 333
KNOWN_ROUND_TRIP_US = 2.7


def render(report: dict) -> str:
    together = [case for case in report["cases"] if case["caller"] is None and case["status"] == "ok"]
    pairs = [case for case in report["cases"] if case["caller"] is not None and case["status"] == "ok"]
    transfers = [case for case in together if not case["op"].startswith("atomic")]
    atomics = [case for case in together if case["op"].startswith("atomic")]
    most = report["programs"]
    parts = [f"{headline(report)} Median, slowest rank. `{report['command']}`"]
    if transfers:
        largest = max(case["nbytes"] for case in transfers)
        full = [case for case in transfers if case["programs"] == most]
        parts += [
            f"#### All ranks at once, each with the next: GB/s of payload a rank, {most} programs",
            _by(full, "nbytes", _gb_s, size),
            "#### The same: µs a call",
            _by(full, "nbytes", lambda case: f"{case['us']:.1f}", size),
            f"#### The same by programs, {size(largest)}: GB/s",
            _by([case for case in transfers if case["nbytes"] == largest], "programs", _gb_s, str),
        ]
        if KNOWN_GPU in report["gpu"]:
            parts += ["#### Beside what the link is known to carry", _known(transfers, largest)]
    alone = [case for case in pairs if not case["op"].startswith("atomic") and case["programs"] == most]
    if alone:
        parts += [f"#### One pair at a time, {most} programs: GB/s, slowest, median and fastest pair", _spread(alone)]
    if atomics:
        full = [case for case in atomics if case["programs"] == most]
        parts += ["#### Atomics on 4-byte words, all ranks at once: 10^9 a second", _by(full, "nbytes", _giga, size)]
    trips = report["round_trips"]
    if trips:
        known = f" (known: {KNOWN_ROUND_TRIP_US})" if KNOWN_GPU in report["gpu"] else ""
        parts += [f"#### A signal and its answer, µs, by who begins (row) and who answers{known}", _matrix(trips)]
    return "\n\n".join(parts)


def size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >> shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _gb_s(case: dict) -> str:
    return f"{case['gb_s']:.0f}" if case["gb_s"] >= 10 else f"{case['gb_s']:.2f}"


def _giga(case: dict) -> str:
    return f"{case['gb_s'] / 4:.2f}"


def _by(cases: list[dict], key: str, show, name) -> str:
    ops = list(dict.fromkeys(case["op"] for case in cases))
    cells = {(case[key], case["op"]): show(case) for case in cases}
    lines = [[name(value), *(cells.get((value, op), "") for op in ops)] for value in sorted({k for k, _ in cells})]
    return markdown([{"nbytes": "size"}.get(key, key), *ops], lines)


def _known(cases: list[dict], nbytes: int) -> str:
    lines = []
    for case in cases:
        known = KNOWN_GB_S.get((case["op"], case["programs"]))
        if known and case["nbytes"] == nbytes:
            share = f"{case['gb_s'] / known:.3f}"
            lines.append([case["op"], str(case["programs"]), str(known), f"{case['gb_s']:.1f}", share])
    return markdown(["operation", "programs", "known GB/s", "measured", "ratio"], lines)


def _spread(cases: list[dict]) -> str:
    ops = list(dict.fromkeys(case["op"] for case in cases))
    lines = []
    for nbytes in sorted({case["nbytes"] for case in cases}):
        line = [size(nbytes)]
        for op in ops:
            rates = [case["gb_s"] for case in cases if (case["nbytes"], case["op"]) == (nbytes, op)]
            figures = (min(rates), statistics.median(rates), max(rates)) if rates else ()
            line.append(" / ".join(f"{rate:.3g}" for rate in figures))
        lines.append(line)
    return markdown(["size", *ops], lines)


def _matrix(trips: list[dict]) -> str:
    ranks = sorted({trip["caller"] for trip in trips})
    cells = {(trip["caller"], trip["peer"]): f"{trip['us']:.2f}" for trip in trips}
    lines = [[str(a), *(cells.get((a, b), "") for b in ranks)] for a in ranks]
    return markdown(["", *map(str, ranks)], lines)
