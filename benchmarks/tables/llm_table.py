"""The table of `benchmarks.llm`, from its result: first tokens and steps of each contender."""

from __future__ import annotations

from benchmarks.cases import engines, truth
from benchmarks.measuring import report
from benchmarks.measuring.tables import markdown


def summary(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['name']} {result['status']} ({result['notes'][-1]})"
    first, step = (result.get(f"{key}_graph_ms", result.get(f"{key}_eager_ms", 0)) for key in ("first", "step"))
    return f"{result['name']} first {first:.1f} ms, step {step:.2f} ms"


def render(measured: dict) -> str:
    """Return the table: a line for each row and contender, with the ratio of its time to ours."""
    depth = f"{measured['layers']} layers" + (" (SHORTENED)" if measured["shortened"] else "")
    depth += ", compiled" if measured.get("compiled") else ""
    kinds = ("first token, graph, ms", "first token, eager, ms", "step, graph, ms", "step, eager, ms")
    head = ["batch x prompt", "contender", *kinds, "tokens/s", "GiB", "error"]
    lines = []
    for row in measured["rows"]:
        ours = next((each for each in row["results"] if each["key"] == engines.OURS), {})
        for result in row["results"]:
            line = [f"{row['batch']} x {row['prompt']}", result["name"]]
            if result["status"] != "ok":
                lines.append([*line, result["status"], *[""] * 6])
                continue
            keys = ("first_graph_ms", "first_eager_ms", "step_graph_ms", "step_eager_ms")
            line += [_cell(result, ours, key) for key in keys]
            memory = f"{result['memory_gib']:.1f}" if "memory_gib" in result else "-"
            error = f"{max(result['errors'].values()):.1e}" if "errors" in result else "-"
            lines.append([*line, f"{result['tokens_per_s']:.0f}", memory, error])
    notes = measured["notes"] + [
        f"{row['batch']} x {row['prompt']}, {result['name']}: {note}"
        for row in measured["rows"]
        for result in row["results"]
        for note in result["notes"]
    ]
    keys = {result["key"] for row in measured["rows"] for result in row["results"]}
    rounded = f", in fp8 {truth.FP8} times as much beside the rounded weights" if keys & {*engines.IN_FP8} else ""
    allowed, wide = measured["allowed"], "float64" if measured["dtype"] == "float32" else "float32"
    title = (
        f"{measured['model']}, {depth}. {report.headline(measured)} Medians, slowest rank; in brackets how many times"
        f" ours. error: what the logits miss of those computed in {wide}, over their root mean square; accepted is at"
        f" most {allowed['times']:g} times that of cuBLAS + NCCL and {allowed['eps']:g} eps{rounded}."
        f" `{measured['command']}`"
    )
    note_lines = ["\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join([title, markdown(head, lines), *note_lines, *report.omissions(measured)])


def _cell(result: dict, ours: dict, key: str) -> str:
    if key not in result:
        return "-"
    ratio = f" ({result[key] / ours[key]:.2f}x)" if ours.get(key) and result is not ours else ""
    return f"{result[key]:.2f}{ratio}"
