"""What a step of a 405B model should take on 1 to 64 hosts, by the planner's arithmetic: TP inside, PP or TP across.

    python -m benchmarks.hosts      writes benchmarks/results/simulated/hosts.json; needs no GPU and takes a minute

Nothing here is measured between hosts. Times inside a host are the planner's, of which those between two and four H200
were compared with measurements; a link between hosts is the data sheet's, times what a bulk transfer reaches of it.
"""

import argparse
from collections.abc import Iterator
from datetime import date
from functools import cache
import json
from pathlib import Path
from typing import Any

import iris  # noqa: F401  # before triton
from iris.machines import Machine, machine_named
from iris_ops.planning.hosts import Network, plan_all_reduce
from iris_ops.planning.plan import plan
from iris_ops.planning.product_model import local_problem, product_us
from iris_ops.planning.requests import requested
from iris_ops.problem import ALL_REDUCE, REDUCE_SCATTER, Request
import torch

from benchmarks.measuring.report import RESULTS

FILE = RESULTS / "simulated" / "hosts.json"
HOSTS = 1, 2, 4, 8, 16, 32, 64
ROWS = 1, 64, 512, 8192
GPUS, GBS, HOP_US = 8, 45.0, 12.0  # of a host; of 50 GB/s a GPU (400 Gb/s), nine tenths; of a message
CONTEXT = 2048  # tokens in the cache of each row of a step
PREFILL = 8192  # rows that are one prompt
_MODEL = dict(layers=126, hidden=16384, inner=53248, heads=128, kv_heads=8, head_dim=128)
_DTYPE = torch.bfloat16
_ATTENTION_TFLOPS = 400.0


def layer_us(rows: int, hosts: int, machine: Machine) -> float:
    """Microseconds of one decoder layer of `rows` tokens, split over all GPUs of `hosts` hosts."""
    ranks, width = GPUS * hosts, _MODEL["head_dim"]
    heads, groups = _MODEL["heads"] // ranks, max(1, _MODEL["kv_heads"] // ranks)
    like = local_problem(rows, 1, 1, _DTYPE)
    qkv = product_us(rows, (heads + 2 * groups) * width, _MODEL["hidden"], like, machine)
    gate_up = product_us(rows, 2 * _MODEL["inner"] // ranks, _MODEL["hidden"], like, machine)
    if rows == PREFILL:
        attention = 2 * rows * rows * heads * width / (_ATTENTION_TFLOPS * 1e6)
    else:
        attention = rows * CONTEXT * 2 * groups * width * 2 / (machine.hbm_gbs * 1e3)
    sums = sum(_sum_us(rows, depth // ranks, hosts, machine) for depth in (_MODEL["heads"] * width, _MODEL["inner"]))
    return qkv + gate_up + attention + machine.launch_us + sums


@cache
def _sum_us(rows: int, depth: int, hosts: int, machine: Machine) -> float:
    """A row-parallel product and its sum over all ranks of `hosts` hosts."""
    columns = _MODEL["hidden"]
    reduced, scattered = (
        plan(requested(Request(op, rows, columns, depth, GPUS, _DTYPE)), machine, False)
        for op in (ALL_REDUCE, REDUCE_SCATTER)
    )
    if hosts == 1:
        assert reduced.prediction is not None
        return reduced.prediction.total_us
    nbytes = rows * columns * _DTYPE.itemsize
    return plan_all_reduce(nbytes, GPUS, Network(hosts, GBS, HOP_US), machine, scattered, reduced).total_us


def layouts(hosts: int) -> Iterator[tuple[int, int]]:
    """(hosts over which a layer is split, stages), with at least one head on each GPU."""
    wide = 1
    while wide <= hosts and GPUS * wide <= _MODEL["heads"]:
        yield wide, hosts // wide
        wide *= 2


def row(hosts: int, rows: int, wide: int, stages: int, machine: Machine) -> dict[str, Any]:
    """One layout's times: a batch's step through all stages, and tokens per second with a batch in each stage."""
    layers = layer_us(rows, wide, machine) * _MODEL["layers"]
    send = Network(2, GBS, HOP_US).send_us(rows * _MODEL["hidden"] * _DTYPE.itemsize)
    step = layers + (stages - 1) * send
    return {
        "hosts": hosts,
        "rows": rows,
        "tp": GPUS * wide,
        "pp": stages,
        "step_ms": round(step / 1e3, 3),
        "tokens_per_s": round(rows * stages / (step * 1e-6)),
    }


def study() -> dict[str, Any]:
    machine = machine_named("NVIDIA H200", 132)
    rows = [
        row(hosts, count, wide, stages, machine) for hosts in HOSTS for count in ROWS for wide, stages in layouts(hosts)
    ]
    return {
        "benchmark": "hosts",
        "simulated": True,
        "date": date.today().isoformat(),
        "machine": machine.name,
        "gpus_of_a_host": GPUS,
        "gbs_of_a_gpu_between_hosts": GBS,
        "hop_us_between_hosts": HOP_US,
        "context": CONTEXT,
        "model": _MODEL,
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.hosts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FILE, help="default: %(default)s")
    args = parser.parse_args(argv)
    run = study()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    for each in run["rows"]:
        print(" ".join(f"{key} {value:>9}" for key, value in each.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
