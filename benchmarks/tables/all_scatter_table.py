"""Results of benchmarks.all_scatter as Markdown: a table for graphs, one for eager calls, and times over the floor."""

from benchmarks.measuring import report
from benchmarks.measuring.tables import markdown

ALONE = "alone"  # the product without the scatter


def us(result: dict) -> float | None:
    """Return the time in a CUDA graph, else eager."""
    return result.get("graph_us") or result.get("eager_us")


def render(measured: dict) -> str:
    parts = [f"{report.headline(measured)} µs per call: median, slowest rank. `{measured['command']}`"]
    for mode, title in (("graph", "CUDA graph"), ("eager", "eager")):
        rows = [row for row in measured["rows"] if any(f"{mode}_us" in result for result in row["results"])]
        if not rows:
            continue
        names = [result["name"] for result in rows[0]["results"]]
        lines = []
        for row in rows:
            results = {result["name"]: result for result in row["results"]}
            line = [f"{row['M']}, {row['N']}, {row['K']}", f"{row['link_us']:.0f}"]
            for name in names:
                value = results[name].get(f"{mode}_us")
                ratio = f" ({value / row['floor_us']:.2f})" if value and results[name]["kind"] != ALONE else ""
                line.append(f"{value:.0f}{ratio}" if value else results[name]["status"])
            lines.append(line)
        parts += [f"#### {title}; in brackets, over the floor", markdown(["M, N, K", "link", *names], lines)]
    return "\n\n".join(parts)
