"""The regrets of plans: by op and rows, and each shape whose choice was not the fastest."""

from __future__ import annotations

from typing import Any

from iris_tp.bench.rows import CALLS, label

from benchmarks.measuring.report import headline, omissions
from benchmarks.measuring.tables import figure, geometric_mean, markdown
from benchmarks.tables.marks import header, newest

Row = dict[str, Any]
CLASSES = (("up to 64", 64), ("65 to 256", 256), ("257 to 2000", 2000), ("more", 1 << 31))
_SHOWN = 1.02  # regrets of more are listed
_MOST_SHOWN = 12


def regret(folder: str) -> str:
    """Return the regrets of the newest run on each number of ranks, and the worst shapes of all."""
    parts = []
    for world in (2, 4):
        for run in newest(f"regret_{{gpu}}_x{world}"):
            text = (
                f"**Regret: the time of the chosen way over the fastest way's, of {len(run['rows'])} random shapes.**"
            )
            parts += [header([run], folder, text), summary(run)]
            if worst(run):
                parts += [f"Shapes with a regret above {_SHOWN}, the worst {_MOST_SHOWN}:", worst(run)]
    return "\n\n".join(parts) or "No run yet: `python -m benchmarks.regret` makes one."


def render(run: dict[str, Any]) -> str:
    """Return the tables of a run, after machine, versions and command, and every way of every shape."""
    parts = [f"{headline(run)} CUDA graphs, medians, slowest rank. `{run['command']}`"]
    parts += [f"Plans by rates {source}: `{by}`." for by, source in run["rates"].items()]
    parts += [summary(run)]
    lines = []
    for row in run["rows"]:
        for result in row["results"]:
            marks = [by for by, name in row["chosen"].items() if name == result["name"]]
            lines.append([
                f"`{CALLS[row['op']]}` {label(row)}", result["name"], figure(result["predicted_us"]),
                figure(_us(result)) or result["status"], ", ".join(marks),
            ])  # fmt: skip
    parts += [markdown(["shape", "way", "predicted, µs", "measured, µs", "chosen by"], lines)]
    return "\n\n".join(parts + omissions(run))


def summary(run: dict[str, Any]) -> str:
    """Return a line for each op and each class of rows: mean and worst regret, and the predictions' error."""
    lines = []
    for by in run["rates"]:
        rows = [row for row in run["rows"] if by in row["regret"]]
        groups = [(f"`{CALLS[op]}`", [row for row in rows if row["op"] == op]) for op in CALLS]
        least = 0
        for name, most in CLASSES:
            groups.append((f"{name} rows", [row for row in rows if least < row["M"] <= most]))
            least = most
        for name, some in [*groups, ("all", rows)]:
            if some:
                lines.append([name, by, str(len(some)), *_regrets(some, by), *_misses(some, by)])
    head = ["shapes", "rates", "number", "mean regret", "worst", "predictions off by", "at most"]
    return markdown(head, lines)


def worst(run: dict[str, Any]) -> str:
    """Return the shapes whose choice was not the fastest way, the worst first; "" if there is none."""
    rows = [row for row in run["rows"] if row["regret"].get("plan", 1.0) > _SHOWN]
    rows = sorted(rows, key=lambda row: -row["regret"]["plan"])[:_MOST_SHOWN]
    lines = []
    for row in rows:
        results = {result["name"]: result for result in row["results"]}
        chosen = results[row["chosen"]["plan"]]
        best = min((each for each in row["results"] if _us(each)), key=_us)
        cells = [
            f"{_plain(each['name'])}, {figure(_us(each))} ({figure(each['predicted_us'])})" for each in (chosen, best)
        ]
        lines.append([f"`{CALLS[row['op']]}` {label(row)}", f"{row['regret']['plan']:.2f}", *cells])
    return markdown(["M, N, K", "regret", "chosen, µs (predicted)", "fastest, µs (predicted)"], lines) if lines else ""


def in_short(row: Row) -> str:
    """Return the regrets of a shape and its fastest way, for the progress line."""
    timed = [each for each in row["results"] if _us(each)]
    if not timed:
        return "no way could be measured"
    best = min(timed, key=_us)
    regrets = ", ".join(f"{by} {value:.3f}" for by, value in row["regret"].items())
    failed = sum(each["status"] != "ok" for each in row["results"])
    return (
        f"regret {regrets}; {_plain(best['name'])} {_us(best):.1f} us of {len(timed)} ways"
        + f", {failed} failed" * (failed > 0)
    )


def _plain(name: str) -> str:
    """Return a way's label without the fields that its name adds."""
    return name.partition(" stages, ")[0].rpartition(", ")[0] or name


def _us(result: dict[str, Any]) -> float | None:
    return result.get("graph_us") or result.get("eager_us")


def _regrets(rows: list[Row], by: str) -> tuple[str, str]:
    values = [row["regret"][by] for row in rows]
    return f"{geometric_mean(values):.3f}", f"{max(values):.2f}"


def _misses(rows: list[Row], by: str) -> tuple[str, str]:
    values = [abs(row["predicted"][by] - 1) for row in rows]
    return f"{100 * sum(values) / len(values):.0f} %", f"{100 * max(values):.0f} %"
