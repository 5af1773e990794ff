"""Results of benchmarks.ccl as Markdown. Of a sweep, the best settings of each variant, and the plan's."""

from benchmarks.measuring.report import headline, omissions
from benchmarks.measuring.tables import markdown, mean_of

MODES = {"graph": "CUDA graph", "eager": "eager"}


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def render(report: dict) -> str:
    parts = [f"{headline(report)} µs per call: median, slowest rank. `{report['command']}`"]
    sweep = report["benchmark"] == "ccl_sweep"
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["op"] == op]
        for mode, title in MODES.items():
            if any(f"{mode}_us" in result for row in rows for result in row["results"]):
                parts += [f"#### `{op}`, {title}", sweep_table(rows, mode) if sweep else op_table(rows, mode)]
        parts += ["\n".join(f"- {note}" for note in _notes(rows))] if _notes(rows) else []
    return "\n\n".join(parts + omissions(report))


def op_table(rows: list[dict], mode: str) -> str:
    """Return a table of ours with its bus bandwidth, and each rival's time with its ratio to ours."""
    rivals = list(dict.fromkeys(r["name"] for row in rows for r in row["results"] if r["kind"] == "rival"))
    ratios: dict[str, list[float]] = {name: [] for name in rivals}
    lines = []
    for row in rows:
        results = {result["name"]: result for result in row["results"]}
        us = results["ours"].get(f"{mode}_us")
        plan = results["ours"].get("plan", {})
        how = f"{plan['variant']} {plan['protocol']} {plan['programs']} x {plan['block']}" if plan else ""
        bus = f"{row['bus_bytes'] / us / 1e3:.0f}" if us else "-"
        host = results["ours"].get("eager_host_us") if mode == "eager" else None
        line = [size_name(row["bytes"]), how, _us(us) if us else results["ours"]["status"], bus]
        if mode == "eager":
            line.append(_us(host) if host else "-")
        for name in rivals:
            rival_us = results.get(name, {}).get(f"{mode}_us")
            if us and rival_us:
                ratios[name].append(rival_us / us)
                line.append(f"{_us(rival_us)} ({rival_us / us:.2f}x)")
            else:
                line.append(_us(rival_us) if rival_us else results.get(name, {}).get("status", ""))
        lines.append(line)
    host = ["host µs"] if mode == "eager" else []
    means = [mean_of(ratios[name], len(rows), "x") for name in rivals]
    lines.append(["geometric mean", "", "", "", *("" for _ in host), *means])
    return markdown(["size", "as planned", "ours", "bus GB/s", *host, *rivals], lines)


def sweep_table(rows: list[dict], mode: str, shown: int = 3) -> str:
    """Return a table of the planned settings and the fastest ones of each variant."""
    key = f"{mode}_us"
    lines = []
    for row in rows:
        timed = [result for result in row["results"] if key in result]
        families: dict[str, list[dict]] = {}
        for result in timed:
            name = "as planned" if result["name"] == "as planned" else " ".join(result["name"].split()[:2])
            families.setdefault(name, []).append(result)
        for name, members in families.items():
            best = sorted(members, key=lambda result: result[key])[:shown]
            cells = [f"{_us(r[key])} ({r['plan']['programs']} x {r['plan']['block']})" for r in best]
            if name == "as planned":
                plan = members[0]["plan"]
                name = f"as planned: {plan['variant']} {plan['protocol']}, expected {plan['expected_us']:.1f}"
            lines.append([size_name(row["bytes"]), name, *cells, *[""] * (shown - len(cells))])
    return markdown(["size", "variant", *(f"no. {i + 1}" for i in range(shown))], lines)


def _notes(rows: list[dict]) -> list[str]:
    return [
        f"{result['name']}, {size_name(row['bytes'])}: {note}"
        for row in rows
        for result in row["results"]
        for note in result["notes"]
    ]


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
