"""Which configuration serves a problem: arithmetic on shapes, dtype, world size and device rates, nothing else.

So it is the same on every rank without talking, and it can explain itself. Candidates are whole configurations; each
is scored by an analytical model in the manner of tritonBLAS (https://github.com/ROCm/tritonBLAS): waves of tiles over
multiprocessors for the product, bytes over the link rate for the collective, and fixed latencies for hops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from .config import FusedConfig, Prediction
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem


@dataclass(frozen=True)
class Machine:
    """Rates of one device, measured where the name says so."""

    name: str
    num_programs: int
    """Programs that run at once: multiprocessors."""
    tflops: float
    """bf16 products of the whole chip at large tiles."""
    hbm_gbs: float
    link_gbs: float
    """To all peers together, each way."""
    launch_us: float
    hop_us: float
    """Store, signal and poll between two devices."""


_MACHINES = {
    # One H200 of an NVLink host, torch 2.11, triton 3.6: benchmarks/results.
    "NVIDIA H200": Machine("NVIDIA H200", 132, 740.0, 4300.0, 380.0, 3.0, 6.5),
    # Data sheet values scaled by what the H200 reaches of its own; not measured.
    "NVIDIA H100": Machine("NVIDIA H100", 132, 700.0, 3000.0, 380.0, 3.0, 5.0),
    "AMD Instinct MI300X": Machine("AMD Instinct MI300X", 304, 600.0, 4000.0, 300.0, 5.0, 6.0),
    "AMD Instinct MI350X": Machine("AMD Instinct MI350X", 256, 1000.0, 6000.0, 350.0, 5.0, 6.0),
}
INTERPRETER = "interpreter"


def machine_named(name: str, num_programs: int) -> Machine:
    """The rates of a device by its name; of an unknown one, the H200's scaled by its multiprocessors."""
    if name in _MACHINES:
        return _MACHINES[name]
    if name == INTERPRETER:
        return Machine(INTERPRETER, 1, 0.05, 1.0, 1.0, 2000.0, 5000.0)
    scale = num_programs / 132
    return Machine(name, num_programs, 740.0 * scale, 4300.0 * scale, 380.0, 3.0, 5.0)


# (block_m, block_n, block_k, warps, stages): share of the chip's rate that a full wave of such tiles reaches, bf16.
_GPU_TILES = {
    (128, 256, 64, 8, 3): 1.0,
    (128, 128, 64, 8, 4): 0.80,
    (64, 256, 64, 8, 4): 0.72,
    (64, 128, 64, 4, 4): 0.60,
    (64, 64, 128, 4, 4): 0.40,
    (32, 64, 128, 4, 4): 0.22,
    (16, 64, 128, 4, 5): 0.12,
    (16, 128, 128, 4, 4): 0.14,
}
# Float32 blocks are half as deep and wide, so that they fit in shared memory; torch's fp32 has no tensor cores.
_FP32_TILES = {(64, 128, 32, 8, 2): 1.0, (64, 64, 32, 4, 3): 0.9, (32, 64, 32, 4, 3): 0.7, (16, 64, 64, 4, 3): 0.4}
_FP32_SHARE = 0.05


def plan(problem: Problem, machine: Machine) -> FusedConfig:
    """The fastest candidate by the model, with its prediction and the reasons."""
    return _plan(problem, machine)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, machine: Machine) -> FusedConfig:
    reasons = [
        f"{problem.op} {problem.form} M={problem.M} N={problem.N} K={problem.K} {problem.dtype} on {machine.name}"
    ]
    scored = []
    for candidate in _candidates(problem, machine):
        objection = _objection(problem, candidate)
        label = f"{candidate.block_m}x{candidate.block_n}x{candidate.block_k} {_variant(problem, candidate)}".rstrip()
        if objection:
            reasons.append(f"rejected {label}: {objection}")
            continue
        prediction = predict(problem, candidate, machine)
        reasons.append(
            f"{label}: product {prediction.gemm_us:.1f} us, link {prediction.link_us:.1f} us, "
            f"together {prediction.total_us:.1f} us"
        )
        scored.append((prediction.total_us, len(scored), replace(candidate, prediction=prediction)))
    chosen = min(scored)[2]
    reasons.append(f"chosen {chosen.block_m}x{chosen.block_n}x{chosen.block_k} {_variant(problem, chosen)}".rstrip())
    if problem.op == MATMUL_GATHER or (problem.op == ALL_REDUCE and chosen.algorithm == "two_shot"):
        reasons.append("peers write out directly when it lies on the heap; otherwise it is staged and copied once more")
    return replace(chosen, reasons=tuple(reasons))


def _variant(problem: Problem, config: FusedConfig) -> str:
    if problem.op != ALL_REDUCE:
        return ""
    return config.algorithm if config.algorithm == "one_shot" else f"two_shot, {config.owner_blocks} blocks an owner"


def _candidates(problem: Problem, machine: Machine) -> list[FusedConfig]:
    if machine.name == INTERPRETER:
        tiles = [(m, n, k, 4, 1) for m, n, k in product(*(_powers(size) for size in problem.gemm))]
    else:
        tiles = list(_FP32_TILES if problem.dtype == torch.float32 else _GPU_TILES)
    reductions = [("two_shot", 2)]
    if problem.op == ALL_REDUCE:
        reductions = [("one_shot", 1), ("two_shot", 2), ("two_shot", 1)]
    comm = 1 if machine.name == INTERPRETER else FusedConfig.comm_programs
    return [
        FusedConfig(m, n, k, num_warps=w, num_stages=s, algorithm=algorithm, owner_blocks=blocks, comm_programs=comm)
        for (m, n, k, w, s), (algorithm, blocks) in product(tiles, reductions)
    ]


def _powers(size: int) -> list[int]:
    """The powers of two worth trying for a dimension in the interpreter, where few large blocks are best."""
    whole = min(1024, max(16, 1 << max(0, size - 1).bit_length()))
    return [block for block in (whole, whole // 2, whole // 4) if 16 <= block <= 1024] or [1024]


def _objection(problem: Problem, config: FusedConfig) -> str | None:
    m, n, _ = problem.gemm
    if config.block_m * config.block_n > 1 << 19 or max(config.block_m, config.block_n) * config.block_k > 1 << 19:
        return "a block has more than half a million elements"
    if config.algorithm == "one_shot" and problem.op == ALL_REDUCE and m * n > 1 << 24:
        return "every rank would hold all partial results"
    return None


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> Prediction:
    """The time that `config` should take."""
    gemm = _gemm_us(problem, config, machine)
    w, nbytes = problem.world_size, problem.link_bytes
    hops = 0 if w == 1 else 1
    if problem.op == ALL_REDUCE and config.algorithm == "two_shot":
        # the rank that owns most rows receives, sums and sends most
        turn = config.block_m * config.owner_blocks * w
        owned = problem.M // turn * config.block_m * config.owner_blocks + min(problem.M % turn, turn // w)
        nbytes *= owned * w / max(1, problem.M)
    if problem.op == ALL_REDUCE and config.algorithm == "one_shot":
        result = problem.M * problem.N * problem.dtype.itemsize
        link = (w - 1) * result / (machine.link_gbs * 1e3)
        # nothing hides behind the product of a single wave: push, hop, then read every rank's tile
        total = gemm + link + hops * machine.hop_us + w * result / (machine.hbm_gbs * 1e3)
    else:
        link = nbytes / (machine.link_gbs * 1e3)
        hops = _HOPS[problem.op] * hops
        total = max(gemm, link) + _EXPOSED[problem.op] * min(gemm, link) + hops * machine.hop_us
    return Prediction(gemm, link, total + machine.launch_us)


# Hops that nothing hides: the entry, then what the last tiles wait for.
_HOPS = {ALL_REDUCE: 3, REDUCE_SCATTER: 2, GATHER_MATMUL: 2, MATMUL_GATHER: 1}
# How much of the shorter of product and transfer the longer one does not hide; measured on H200s.
_EXPOSED = {ALL_REDUCE: 0.6, REDUCE_SCATTER: 0.4, GATHER_MATMUL: 0.3, MATMUL_GATHER: 0.7}


def _gemm_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    m, n, k = problem.gemm
    w = problem.world_size
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    if problem.op == REDUCE_SCATTER:  # tiles do not cross the owners' borders
        tiles = w * _tiles(problem.part_rows, problem.part_cols, bm, bn)
    elif problem.op == GATHER_MATMUL and problem.form == "rows":
        tiles = w * _tiles(problem.part_rows, n, bm, bn)
    else:
        tiles = _tiles(m, n, bm, bn)
    steps = -(-k // bk)
    if machine.name == INTERPRETER:
        elements = bm * bk + bk * bn
        return tiles * (4000.0 + steps * (1500.0 + elements * 0.02 + bm * bn * bk * 2e-5))
    fp32 = problem.dtype == torch.float32
    share = (_FP32_TILES if fp32 else _GPU_TILES).get((bm, bn, bk, config.num_warps, config.num_stages), 0.3)
    rate = machine.tflops * share * (_FP32_SHARE if fp32 else 1.0) / machine.num_programs  # TFLOP/s of one program
    programs = min(config.num_programs or machine.num_programs, machine.num_programs)
    waves = -(-tiles // programs)
    compute = waves * (2.0 * bm * bn * max(k, bk) / (rate * 1e6) + 1.5)
    stream = (m * k + k * n) * problem.dtype.itemsize / (machine.hbm_gbs * 1e3)
    # a program alone cannot draw its share of HBM when few of them run
    stream *= max(1.0, 0.9 * programs / max(1, min(tiles, programs)))
    return max(compute, stream)


def _tiles(rows: int, cols: int, block_m: int, block_n: int) -> int:
    return -(-rows // block_m) * -(-cols // block_n)
