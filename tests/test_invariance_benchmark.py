"""What `benchmarks.invariance` compares: each kind of product, and that a bit that differs is counted.

And kernels that are compiled ahead: one for all launches that need the same, under the name that a rank looks for.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
import os
from pathlib import Path
import random
import signal
import subprocess
import sys

import iris
from iris_ops.problem import GATHER_MATMUL, MATMUL_GATHER, NORM, REDUCE_SCATTER
from iris_tp.bench.team import Team
import pytest
import torch

from benchmarks.cases.invariance_case import _EIGHT_BITS, _OPS, EXPERTS, Case, product_of, random_case
from tests.harness import WORLDS, run_ranks
from tests.processes import patient, python_path

NUMBERS = (1, 3, 5, 9, 18)


def case_of(op: str, form: str, fp8: bool = False, dtype: torch.dtype = torch.bfloat16) -> Case:
    bias = dtype == torch.float16
    choices = (4, 2) if op == EXPERTS else (0, 0)
    return Case(op, form, 96, 192, dtype, bias, random.randrange(1 << 30), NUMBERS, fp8, choices)


def differing(ctx: iris.Iris, case: Case, spoil: str = "") -> int:
    """How many numbers differ; with `spoil`, one bit of one operand changes behind the third call, on all ranks."""
    ctx.invariant = "batch"
    product = product_of(Team(ctx.cur_rank, ctx.num_ranks, ctx.device), ctx, case)
    for i in range(len(NUMBERS)):
        product.call(i)
        if spoil and i == 2:
            operand = getattr(product, spoil)
            operand[..., 0] = operand[..., 0] * 1.02
    return int(product.differing.sum())


@pytest.mark.parametrize("world_size", [pytest.param(w, marks=() if w == 2 else pytest.mark.slow) for w in WORLDS])
@pytest.mark.parametrize(("op", "form"), _OPS)
def test_each_kind_of_product_keeps_its_bits(world_size: int, op: str, form: str) -> None:
    kinds = [case_of(op, form), case_of(op, form, dtype=torch.float16)]
    if (op, form) in _EIGHT_BITS:
        kinds += [replace(case_of(op, form, fp8=True), bias=bias) for bias in (False, True)]
    for case in kinds:
        assert run_ranks(world_size, differing, case) == [0] * world_size, case


@pytest.mark.parametrize(
    ("op", "form", "spoil"),
    [(GATHER_MATMUL, "rows", "x"), (MATMUL_GATHER, "cols", "B"), (NORM, "", "residual"), (EXPERTS, "", "down")],
)
def test_another_operand_is_noticed(op: str, form: str, spoil: str) -> None:
    assert all(run_ranks(2, differing, case_of(op, form), spoil))


def test_scattered_rows_are_noticed_where_they_are() -> None:
    assert any(run_ranks(2, differing, case_of(REDUCE_SCATTER, "rows"), "x"))


def test_random_products_have_sizes_that_all_ranks_can_share() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(500):
        case = random_case(rng, 4, "cuda", tuple(range(1, 40)))
        assert case.N % 64 == 0 and case.K % 64 == 0 and len(case.numbers) == 10
        seen.add(replace(case, N=0, K=0, seed=0, numbers=(), bias=False, choices=(0, 0)).kind)
    ops = {kind.partition(",")[0] for kind in seen if not kind.startswith("moe")}
    assert len(ops) == len(_OPS) - 1 and any("eight bits" in kind for kind in seen)


AHEAD = """
import multiprocessing
import os
import sys
import time
from benchmarks.measuring import ahead
from iris.device import arch
from iris.triton_private import compile_without_gpu
from iris_ops.local.gating import gate_kernel
from iris_tp.bench.team import Team
import torch, triton
from torch import distributed
from triton.backends.compiler import GPUTarget

def calls():
    both, out = (torch.zeros(16, 128, dtype=torch.bfloat16) for _ in range(2))
    for rows in (32, 48, 7, 9):
        gate_kernel[(1,)](both, out, rows, 64, 128, 64, BLOCK_M=4, BLOCK_N=64, num_warps=4)

def failing():
    calls()
    while compiled() < 2:  # by processes that wait for more, then
        time.sleep(0.1)
    raise ValueError("no room")

def compiled():
    return sum(name.endswith(".cubin") for *_, names in os.walk(os.environ["TRITON_CACHE_DIR"]) for name in names)

def main(calls):
    compile_without_gpu(GPUTarget("cuda", 90, 32))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert arch.drain_stores.cache_key and gate_kernel.cache_key  # in another order than where it is compiled
    forms = ahead.compile_ahead(Team(0, 1, torch.device("cpu")), [], calls)
    before, run = compiled(), triton.JITFunction.run
    triton.JITFunction.run = lambda self, *args, **given: run(self, *args, **given | {"warmup": True})
    calls()
    print(f"forms {forms}, before {before}, behind {compiled()}", flush=True)

if __name__ == "__main__":
    rank = multiprocessing.get_context("spawn").Process(target=main, args=(globals()[sys.argv[1]],))
    rank.start()
    rank.join()
    print("the rank ended with", rank.exitcode)
"""


def run_ahead(tmp_path: Path, calls: str) -> str:
    """What a process prints that starts a rank of `calls`; with all that they start it is killed behind a time."""
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(AHEAD)
    cache = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": python_path()}
    with told.open("w") as out:
        line = [sys.executable, str(script), calls]
        child = subprocess.Popen(line, env=os.environ | cache, stdout=out, stderr=out, start_new_session=True)
        try:
            child.wait(patient(60))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return told.read_text()


@pytest.mark.slow
def test_what_is_compiled_ahead_is_found_again(tmp_path: Path) -> None:
    said = run_ahead(tmp_path, "calls")
    assert "forms 2, before 2, behind 2" in said and "the rank ended with 0" in said, said


@pytest.mark.slow
def test_a_call_that_fails_ends_those_that_compile(tmp_path: Path) -> None:
    said = run_ahead(tmp_path, "failing")
    assert "no room" in said and "the rank ended with 1" in said, said
