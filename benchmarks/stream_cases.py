"""Which divisions of the weight stream are right, and how fast? `python -m benchmarks.stream_cases`, on one GPU.

Each format and number of rows has a process of its own, so that a fault ends one. Results are compared with float64.
"""

import argparse
from functools import partial
import itertools
import json
from pathlib import Path
import subprocess
import sys
import threading
import time

FORMATS = ["fp8_block", "int4", "mxfp4"]
ALLOWED = 0.006  # relative error of results, which are rounded to bf16
ROWS = [1, 8, 16, 32, 64, 128]
N, K, ODD = 8192, 4096, (201, 1440)
FEW = [(32, 4, 2, 4, 1), (64, 8, 1, 4, 1), (64, 8, 1, 8, 1), (64, 4, 1, 8, 2), (32, 8, 1, 8, 1)]
MORE = {
    32: [(64, 2, 1, 8, 4), (128, 2, 1, 8, 4), (32, 2, 1, 4, 2), (64, 2, 1, 4, 2), (64, 4, 1, 8, 2)],
    64: [(64, 2, 1, 8, 4), (128, 1, 1, 8, 8), (32, 2, 1, 4, 2), (64, 1, 1, 4, 4)],
    128: [(128, 1, 1, 8, 8), (64, 1, 1, 4, 4), (64, 2, 1, 8, 4)],
}


def variants(rows: int) -> list[str]:
    names = ["x".join(map(str, each)) for each in (FEW if rows <= 16 else MORE[rows])]
    if rows == 1:  # "one": a single row is loaded alone
        names += [f"{name}-one" for name in names[:3]]
    return names + ["odd"] + (["odd-one"] if rows == 1 else [])


def prepare(rows: int, name: str):
    """Let the stream divide its work so."""
    from iris_ops.quantised import stream_form, weight_stream

    stream_form.ONE_ROW = True
    weight_stream.loaded_rows = lambda m, runs=False: stream_form.loaded_rows(m, runs and name.endswith("-one"))
    fixed = next((v for v in [*FEW, *itertools.chain(*MORE.values())] if name.startswith("x".join(map(str, v)))), None)
    if fixed is None:
        weight_stream.choice = stream_form.choice
    else:
        columns, lines, resident, warps, across = fixed
        choice = stream_form.Choice(columns, lines, resident, WARPS=warps, COLUMN_WARPS=across)
        weight_stream.choice = lambda *sizes: choice


def operands(form: str, rows: int, name: str, copies: int = 1):
    import torch

    from benchmarks.quantised import weight_of

    n, k = ODD if name.startswith("odd") else (N, K)
    k -= k % 128 if form == "fp8_block" else 0
    weight, exact = weight_of(form, n, k, 1, torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(rows)
    m = max(1, rows - 1) if name.startswith("odd") else rows
    x = torch.randn(m, k, generator=draw, device="cuda").to(torch.bfloat16)
    more = [tuple(t if t is None else t.clone() for t in weight) for _ in range(copies - 1)]
    return x, [weight, *more], exact


def call(x, weight, out):
    from iris_ops.local import skinny_matmul

    return skinny_matmul.skinny_matmul(x, weight[0], None, weight[1], launch=skinny_matmul.Launch(out=out))


def check(form: str, rows: int, names: list[str]) -> None:
    """Print a line for each case, before and after it runs."""
    from iris.errors import ArgumentError
    import torch
    import triton

    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        prepare(rows, name)
        x, (weight,), exact = operands(form, rows, name)
        out = torch.full((x.shape[0], exact.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
        try:
            call(x, weight, out)
            expected = x.double() @ exact.t()
            result = {"error": ((out.double() - expected).norm() / expected.norm()).item()}
        except (triton.OutOfResources, ArgumentError) as error:
            result = {"refused": str(error)[:80]}
        print(json.dumps({"end": name} | result), flush=True)


def watched(form: str, rows: int, results: dict, slots: threading.Semaphore) -> None:
    """Check all cases of a format and number of rows, in another process after each fault."""
    names = variants(rows)
    while names:
        with slots:
            command = [sys.executable, "-m", "benchmarks.stream_cases", "--check", form, str(rows), *names]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=75)
                text, tail = done.stdout, done.stderr.strip().splitlines()[-1:] or [""]
            except subprocess.TimeoutExpired as late:
                text, tail = (late.stdout or b"").decode(), ["took too long"]
        begun = None
        for line in filter(lambda line: line.startswith("{"), text.splitlines()):
            event = json.loads(line)
            if "begin" in event:
                begun = event["begin"]
                results[form, rows, begun] = {"crashed": tail[0][:160]}
            else:
                results[form, rows, event.pop("end")] = event
        if begun is None:
            results[form, rows, names[0]] = {"crashed": tail[0][:160]}
            begun = names[0]
        names = names[names.index(begun) + 1 :]


def graph_us(calls: list) -> float:
    import torch

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def timed(results: dict) -> None:
    """Time bf16, the way back to bf16, and all cases that are right."""
    from iris_ops.quantised import restoring
    import torch
    from torch.nn import functional as F

    for rows in [*ROWS, 512, 2048]:
        x, weights, _ = operands("bf16", rows, "", 4)
        calls = {"torch": [partial(F.linear, x, w[0]) for w in weights * 4]}
        if rows <= 64:
            out = torch.empty(rows, N, dtype=x.dtype, device=x.device)
            calls["bf16"] = [partial(call, x, w, out) for w in weights * 4]
        print(f"bf16 {rows}: " + ", ".join(f"{name} {graph_us(each):.1f}" for name, each in calls.items()), flush=True)
    for form in FORMATS:
        _, weights, _ = operands(form, 1, "", 10)
        restored = [partial(restoring.restored_by_kernel, *w, K, torch.bfloat16) for w in weights[:4]]
        print(f"{form}: made in bf16 in {graph_us(restored):.1f} us", flush=True)
        for rows in ROWS:
            x = torch.randn(rows, K, device="cuda").to(torch.bfloat16)
            out = torch.empty(rows, N, dtype=x.dtype, device=x.device)
            cells = []
            for name in variants(rows):
                if results.get((form, rows, name), {}).get("error", 1) <= ALLOWED and not name.startswith("odd"):
                    prepare(rows, name)
                    cells.append(f"{name} {graph_us([partial(call, x, w, out) for w in weights * 2]):.1f}")
            print(f"{form} {rows}: " + ", ".join(cells), flush=True)


def checked(at_once: int) -> dict:
    """Return the result of each case, several processes at a time."""
    begin, results, slots = time.monotonic(), {}, threading.Semaphore(at_once)
    threads = [
        threading.Thread(target=watched, args=(form, rows, results, slots))
        for rows, form in itertools.product(sorted(ROWS, reverse=True), FORMATS)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for key, result in sorted(results.items()):
        state = "ok" if result.get("error", 1) <= ALLOWED else "WRONG" if "error" in result else "bad"
        print(state, *key, result, flush=True)
    print(f"checked in {time.monotonic() - begin:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=10, help="processes that check")
    parser.add_argument("--only-check", type=Path, metavar="JSON", help="check, and write the results there")
    parser.add_argument("--only-time", type=Path, metavar="JSON", help="time what that file says is right")
    args = parser.parse_args()
    if args.check:
        check(args.check[0], int(args.check[1]), args.check[2:])
        return
    if args.only_time:
        results = {tuple(key): value for *key, value in json.loads(args.only_time.read_text())}
    else:
        results = checked(args.at_once)
    if args.only_check:
        args.only_check.write_text(json.dumps([[*key, value] for key, value in results.items()]))
    else:
        timed(results)


if __name__ == "__main__":
    main()
