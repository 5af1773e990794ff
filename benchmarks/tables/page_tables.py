"""The tables of README and docs, as Markdown, from result files: rows chosen here, figures and marks from the JSON.

Every table begins with machine, date and versions (`marks.header`) and ends in a column "changed since"
(`marks.changed`).
"""

from __future__ import annotations

from collections.abc import Sequence
import statistics
from typing import Any

from iris_tp.bench.rows import CALLS

from benchmarks.measuring import report
from benchmarks.measuring.tables import figure, geometric_mean, size_name
from benchmarks.tables.cells import Run, lines_of, nothing, timed, us, versus
from benchmarks.tables.marks import (
    CHANGED,
    FACTOR,
    GRAPHS,
    changed,
    current,
    gpus,
    header,
    in_common,
    in_short,
    newest,
    run_of,
)
from benchmarks.tables.model_tables import MODELS, latest_rows, ms_of, results_by_key, versus_ms, vllm_ms, vllm_of

RowKey = tuple[str, int, int, int] | tuple[str, int, int, int, str]

SUMMARY: list[RowKey] = [
    ("ar", 8192, 8192, 7168), ("ar", 2048, 8192, 2048), ("ar", 64, 8192, 2048), ("ar", 1, 8192, 2048),
    ("rs", 8192, 8192, 7168), ("ag", 8192, 2560, 8192), ("ga", 8192, 14336, 8192),
]  # fmt: skip
TWO: list[RowKey] = [
    ("ar", 8192, 8192, 7168), ("ar", 2048, 8192, 2048), ("ar", 1024, 5120, 12800), ("ar", 512, 8192, 2048),
    ("ar", 256, 8192, 2048), ("ar", 200, 8192, 14336), ("ar", 64, 8192, 2048), ("ar", 1, 8192, 2048),
    ("rs", 8192, 8192, 7168), ("rs", 2048, 8192, 2048), ("rs", 4096, 4096, 3584), ("rs", 2048, 5120, 12800),
    ("rs", 320, 8192, 4096), ("rs", 1, 8192, 4096), ("ag", 8192, 14336, 8192), ("ag", 8192, 2560, 8192),
    ("ag", 4096, 14336, 4096), ("ag", 512, 9216, 16384), ("ag", 512, 2560, 8192), ("ag", 32, 5120, 8192),
    ("ga", 8192, 14336, 8192), ("ga", 2048, 2560, 8192), ("ga", 64, 128256, 8192, "cols"),
]  # fmt: skip
FOUR: list[RowKey] = [
    ("ar", 8192, 8192, 7168), ("ar", 8192, 8192, 2048), ("ar", 2048, 8192, 2048), ("ar", 1024, 4096, 3584),
    ("ar", 512, 8192, 7168), ("ar", 512, 5120, 2048), ("ar", 512, 8192, 2048), ("ar", 64, 8192, 2048),
    ("ar", 16, 8192, 7168), ("ar", 1, 8192, 2048), ("ar", 1, 4096, 1024), ("rs", 8192, 8192, 7168),
    ("rs", 2048, 8192, 7168), ("rs", 2048, 8192, 2048), ("rs", 128, 4096, 3584), ("rs", 1, 8192, 2048),
    ("ag", 8192, 8192, 7168), ("ag", 2048, 14336, 8192), ("ag", 512, 14336, 8192), ("ag", 8192, 2560, 8192),
    ("ag", 32, 2560, 8192), ("ga", 8192, 8192, 7168), ("ga", 512, 2560, 8192), ("ga", 64, 128256, 8192, "cols"),
]  # fmt: skip
OPS_TWO = ("ops_{gpu}_x2", "ops_models_{gpu}_x2", "ops_between_{gpu}_x2")
OPS_FOUR = ("ops_{gpu}_x4", "ops_models_{gpu}_x4")
OPS_TEXT = f"µs a call {GRAPHS}. {FACTOR}"
SIZES = [2 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


def summary(_folder: str) -> str:
    """Return ten rows of ops and of models' steps on two GPUs, from current runs, with vLLM where it was measured."""
    used, rows = _op_rows(OPS_TWO, SUMMARY, floor=False)
    rows = [[op, gpus(run), *cells] for run, (op, *cells) in zip(used, rows, strict=True)]
    of_models = [measured for model in MODELS if (measured := latest_rows(model, 2)) and current(measured[0][0])]
    # the smallest batch of each model; of a single model its three batches, too
    for run, row in (each for measured in of_models for each in measured[: 3 if len(of_models) == 1 else 1]):
        vllm = vllm_of(run, row, "step")
        cells = [f"{MODELS[run['model']]}, one decode step, ms", gpus(run), f"{row['batch']} x {row['prompt']}"]
        cells += [figure(ms_of(results_by_key(row)["ours"], "step")), versus_ms(results_by_key(row), "nccl", "step")]
        rows.append([*cells, f"vLLM {vllm_ms(run, vllm, 'step')}" if vllm else "", changed(run)])
        used += [run, *vllm[:1]]
    head = ["what", "GPUs", "M, N, K or batch x prompt", "ours", "cuBLAS + NCCL", "best other rival", CHANGED]
    text = f'µs a call, and ms a step of a model, {GRAPHS}. {FACTOR} "vLLM H200" was measured on H200s.'
    return f"{lines_of(head, rows, 3)}\n\n{in_short(used, text)}"


def numbers(_folder: str) -> str:
    """Return figures with the best rival of each: an op, a collective, and decode steps of our engine and of vLLM's."""
    op_run, op_row = _first("ops_{gpu}_x2", op="ar", M=2048, N=8192, K=2048)
    ccl_run, ccl_row = _first("ccl_{gpu}_x2", op="all_reduce", bytes=4 << 20)
    model_run, model_row = latest_rows("llama-3-8b", 2)[0]
    results = results_by_key(model_row)
    steps = {results[key]["name"]: ms_of(results[key], "step") for key in ("ours", "nccl", "vllm") if key in results}
    vllm_run = newest("vllm_plugin_qwen3-30b-a3b_{gpu}_x2")[0]
    vllm_run = vllm_run | {"world": vllm_run["gpus"], "dtype": "bfloat16"}
    plugin, stock = (vllm_run["step_ms"][side]["1"]["step"] for side in ("plugin", "stock"))
    in_vllm = {"ours": plugin, "stock vLLM": stock}
    rows = []
    for what, run, times, unit in (
        ("`matmul_all_reduce`, 2048 x 8192 x 2048", op_run, timed(op_row), "µs"),
        ("`all_reduce` of 4 MiB", ccl_run, timed(ccl_row), "µs"),
        ("Llama-3-8B, one decode step, batch 1", model_run, steps, "ms"),
        ("Qwen3-30B-A3B in vLLM with our plug-in, one decode step, batch 1", vllm_run, in_vllm, "ms"),
    ):
        ours = times.pop("ours")
        best = min(times, key=times.__getitem__)
        best_rival = f"{best}: {figure(times[best])} {unit}"
        at = f"{run['date']}, {run['commit']}"
        rows.append([what, gpus(run), f"{figure(ours)} {unit}", best_rival, f"{times[best] / ours:.2f}x", at])
    text = (
        "M x N x K are the sizes of the product that each rank computes. The rival is the fastest one measured."
        " Every contender runs in a CUDA graph, with NVLink multicast off."
    )
    head = ["what", "GPUs", "iris-tp", "best rival", "speedup", "date, commit"]
    return f"{lines_of(head, rows, 2)}\n\n{in_common([op_run, ccl_run, model_run, vllm_run], text)}"


def _first(pattern: str, **fields: Any) -> tuple[Run, dict[str, Any]]:
    """Return the newest run of `pattern` and its row with these fields."""
    (run,) = newest(pattern)
    return run, next(row for row in run["rows"] if all(row[name] == value for name, value in fields.items()))


def ops(patterns: Sequence[str], keys: Sequence[RowKey], folder: str) -> str:
    """Return rows of the four ops, each from the first of the files that has it."""
    used, rows = _op_rows(patterns, keys, floor=True)
    head = ["op", "M, N, K", "floor", "ours", "cuBLAS + NCCL", "best other rival", CHANGED]
    return f"{header(used, folder, OPS_TEXT)}\n\n{lines_of(head, rows, 2)}" if rows else nothing()


def _op_rows(patterns: Sequence[str], keys: Sequence[RowKey], floor: bool) -> tuple[list[Run], list[list[str]]]:
    runs = [run for pattern in patterns for run in newest(pattern)]
    used: list[Run] = []
    rows: list[list[str]] = []
    before = ""
    for key in keys:
        measured = next(
            ((run, row) for run in runs for row in run["rows"] if _is(row, key) and "ours" in timed(row)), None
        )
        if measured is None:
            continue
        run, row = measured
        used.append(run)
        times = timed(row)
        ours = times.pop("ours")
        nccl = times.pop("cuBLAS + NCCL", None)
        best = min(times, key=times.__getitem__, default=None)
        cells = [
            f"`{CALLS[key[0]]}`" if key[0] != before else "",
            _size(row),
            *([us(row["floor_us"])] * floor),
            us(ours),
        ]
        cells += [versus(nccl, ours), versus(times[best], ours, best.removeprefix("cuBLAS + ")) if best else ""]
        rows.append([*cells, changed(run, row)])
        before = key[0]
    return used, rows


def _is(row: dict[str, Any], key: RowKey) -> bool:
    form = key[4] if len(key) > 4 else "rows"
    return (row["op"], row["M"], row["N"], row["K"], row.get("form", "rows")) == (*key[:4], form)


def _size(row: dict[str, Any]) -> str:
    form = row.get("form", "rows")
    return f"{row['M']}, {row['N']}, {row['K']}" + (f" ({form})" if form != "rows" else "")


def collectives(ranks: int, folder: str) -> str:
    """Return all-reduces by size, and reduce-scatters and gathers from 1 MiB on, in CUDA graphs."""
    (run,) = newest(f"ccl_{{gpu}}_x{ranks}") or [None]
    if run is None:
        return nothing()
    names = list(
        dict.fromkeys(each["name"] for row in run["rows"] for each in row["results"] if each["kind"] == "rival")
    )
    rows, before = [], ""
    for op, sizes in (("all_reduce", SIZES), ("reduce_scatter", SIZES[4:]), ("all_gather", SIZES[4:])):
        for row in run["rows"]:
            times = timed(row)
            if row["op"] != op or row["bytes"] not in sizes or "ours" not in times:
                continue
            cells = [f"`{op}`" if op != before else "", size_name(row["bytes"]), us(times["ours"])]
            rows.append([*cells, *(versus(times.get(name), times["ours"]) for name in names), changed(run)])
            before = op
    text = f"µs a call {GRAPHS}. {FACTOR}"
    return f"{header([run], folder, text)}\n\n{lines_of(['op', 'size', 'ours', *names, CHANGED], rows, 2)}"


def norms(folder: str) -> str:
    """Return `matmul_all_reduce_norm` and the rivals' all-reduces with the full norm."""
    (run,) = newest("norms_{gpu}_x2") or [None]
    if run is None:
        return nothing()
    names = list(
        dict.fromkeys(each["name"] for row in run["rows"] for each in row["results"] if each["kind"] == "rival")
    )
    rows = []
    for row in run["rows"]:
        times = timed(row)
        if "ours" in times:
            cells = [_size(row), us(times["ours"]), *(versus(times.get(name), times["ours"]) for name in names)]
            rows.append([*cells, changed(run, row)])
    shown = [name.removeprefix("cuBLAS + ").removesuffix(", norm") for name in names]
    text = f"µs a call {GRAPHS}. Rivals multiply with cuBLAS. {FACTOR}"
    return f"{header([run], folder, text)}\n\n{lines_of(['M, N, K', 'ours', *shown, CHANGED], rows, 1)}"


FILES = {
    "ops_{gpu}_x2": "assorted sizes",
    "ops_models_{gpu}_x2": "the layers of six models",
    "ops_between_{gpu}_x2": "rows between powers of two",
    "ops_{gpu}_x4": "assorted sizes",
    "ops_models_{gpu}_x4": "the layers of six models",
}


def means(folder: str) -> str:
    """Return the geometric means, by file, of cuBLAS + NCCL and of the best rival over ours, of each op."""
    runs, rows = [], []
    for pattern, what in FILES.items():
        for run in newest(pattern):
            runs.append(run)
            cells = [_mean(run, op) for op in CALLS]
            marks = {changed(run, row) for row in run["rows"]}
            rows.append([f"[{gpus(run)}]({folder}{run['file']}.md), {what}", *cells, together(marks)])
    head = ["rows", *(f"`{call}`" for call in CALLS.values()), CHANGED]
    text = (
        "Time relative to ours in CUDA graphs, as the geometric mean of all rows: first cuBLAS + NCCL, then the best"
        " rival of each row."
    )
    return f"{header(runs, folder, text)}\n\n{lines_of(head, rows, 1)}"


def floors(folder: str) -> str:
    """Return our time over the floor, by file, as geometric means of the rows with M >= 2048."""
    runs = [run for pattern in (*OPS_TWO[:2], *OPS_FOUR) for run in newest(pattern)]
    rows = []
    for run in runs:
        cells = []
        for op in CALLS:
            large = [row for row in run["rows"] if row["op"] == op and row["M"] >= 2048 and row["floor_us"]]
            mean = geometric_mean([timed(row)["ours"] / row["floor_us"] for row in large if "ours" in timed(row)])
            cells.append(f"{mean:.2f}" if mean else "")
        marks = {changed(run, row) for row in run["rows"]}
        rows.append([f"[{run['file']}]({folder}{run['file']}.md)", *cells, together(marks)])
    head = ["rows from 2048 on", *(f"`{call}`" for call in CALLS.values()), CHANGED]
    text = "Our time divided by the floor, in CUDA graphs, as the geometric mean of the rows."
    return f"{header(runs, folder, text)}\n\n{lines_of(head, rows, 1)}"


def hosts(folder: str) -> str:
    """Return how long an eager call of ours keeps the host busy, by file."""
    rows, used = [], []
    for run in (run for pattern in ("ops_{gpu}_x2", "ops_{gpu}_x4") for run in _eager(pattern)):
        busy = [each["eager_host_us"] for row in run["rows"] for each in row["results"] if _eager_ours(each)]
        figures = (us(min(busy)), us(statistics.median(busy)), us(max(busy)))
        rows.append([f"[{gpus(run)}]({folder}{run['file']}.md)", *figures, changed(run)])
        used.append(run)
    head = ["rows of the ops", "least", "median", "most", CHANGED]
    text = "µs for which the host is busy with one eager call of ours."
    return f"{header(used, folder, text)}\n\n{lines_of(head, rows, 1)}"


def _eager(pattern: str) -> list[Run]:
    """Return the newest of those files that have eager calls."""
    runs = [run_of(pattern.format(gpu=gpu)) for gpu in ("h100", "h200") if _exists(pattern.format(gpu=gpu))]
    runs = [run for run in runs if any(_eager_ours(each) for row in run["rows"] for each in row["results"])]
    return [max(runs, key=lambda run: run["date"])] if runs else []


def _eager_ours(result: dict) -> bool:
    return result["name"] == "ours" and "eager_host_us" in result


def _exists(file: str) -> bool:
    return (report.RESULTS / f"{file}.json").exists()


def together(marks: set[str]) -> str:
    return "no" if marks == {"no"} else "unknown" if marks == {"unknown"} else "some rows"


def _mean(run: Run, op: str) -> str:
    nccl, best = [], []
    for row in run["rows"]:
        times = timed(row) if row["op"] == op else {}
        ours = times.pop("ours", None)
        if ours and times:
            best.append(min(times.values()) / ours)
            nccl += [times["cuBLAS + NCCL"] / ours] if "cuBLAS + NCCL" in times else []
    return f"{geometric_mean(nccl):.2f} / {geometric_mean(best):.2f}" if nccl and best else ""
