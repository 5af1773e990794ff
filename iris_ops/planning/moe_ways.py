"""The ways of a mixture's ops, a row each, as `ways.py` has those of the others: kernels, reasons, tiles and times.

A grouped product of few rows to an expert is a stream of the weights of the experts that have rows; of many it is a
product whose blocks are each one expert's, the last of them partly empty. Both times stand in `_product_us`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from iris.errors import ArgumentError
import torch

from ..config import FusedConfig, Prediction
from .machine import Machine
from .moe_problem import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP, MOE_OPS, MoeProblem

GROUPED, SEQUENTIAL = "moe.grouped_matmul", "moe.sequential"
FEW_PAIRS = 256  # that a program looks through by itself
# block_m, block_n, block_k, warps, stages, and what part of the chip's rate its products reach.
_FEW_TILES = ((16, 64, 128, 4, 5, 0.12), (16, 128, 64, 4, 5, 0.15))
_TILES = (
    *_FEW_TILES, (32, 128, 64, 4, 5, 0.25), (64, 128, 64, 4, 4, 0.5), (128, 128, 64, 8, 4, 0.65),
    (128, 256, 64, 8, 3, 0.75),
)  # fmt: skip
_SORT_US, _ROWS_US = 3.0, 2.0  # a kernel that sorts, one that goes over a token's rows


@dataclass(frozen=True)
class MoeWay:
    """`supports`: why it cannot serve a problem, or None. `rest_us`: what it takes beside the product."""

    kernel: str
    algorithm: str
    ops: tuple[str, ...]
    supports: Callable[[MoeProblem, Machine], str | None]
    rest_us: Callable[[MoeProblem, Machine], float]


def _few(problem: MoeProblem, machine: Machine) -> str | None:
    return None if problem.pairs <= FEW_PAIRS else f"it is for {FEW_PAIRS} pairs of token and expert at most"


def _many(problem: MoeProblem, machine: Machine) -> str | None:
    return None if problem.pairs > FEW_PAIRS else "few pairs need not be sorted"


def _passed_us(problem: MoeProblem, machine: Machine) -> float:
    """Rows of products that are read again, for each token's sum, and what travels."""
    size = problem.dtype.itemsize
    again = (problem.pairs + problem.tokens) * problem.N * size / (machine.hbm_gbs * 1e3)
    return _ROWS_US + again + _link_us(problem, machine) + 2 * machine.exchange_us


def _link_us(problem: MoeProblem, machine: Machine) -> float:
    w = problem.world_size
    copies = (1 if problem.scatters else 2) * (w - 1) / w
    return copies * problem.tokens * problem.N * problem.dtype.itemsize / (machine.link_gbs * 1e3)


WAYS = (
    MoeWay(GROUPED, "one_shot", (GATE_UP,), _few, lambda problem, machine: 0.0),
    MoeWay(GROUPED, "sequential", (GATE_UP,), _many, lambda problem, machine: _SORT_US),
    MoeWay(SEQUENTIAL, "sequential", (DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER), lambda problem, machine: None, _passed_us),
)


def kernel_for(problem: MoeProblem, config: FusedConfig) -> str:
    """The way's kernel that `config` stands for. Raises `ArgumentError` where there is none."""
    for way in WAYS:
        if problem.op in way.ops and way.algorithm == config.algorithm:
            return way.kernel
    known = ", ".join(sorted({repr(way.algorithm) for way in WAYS if problem.op in way.ops}))
    raise ArgumentError(f"{problem.op}: config.algorithm is {config.algorithm!r}; expected one of {known}")


def moe_problem_asked(
    op: str, tokens: int, N: int, K: int, experts: int, top_k: int, world_size: int, dtype: torch.dtype,
) -> MoeProblem:  # fmt: skip
    """The problem of a question to the planner; of `moe_gate_up` N is I, and experts are gated."""
    if op not in MOE_OPS:
        raise ArgumentError(f"op is {op!r}; expected one of {', '.join(MOE_OPS)}, for there are experts")
    for name, size, least in (("experts", experts, 1), ("top_k", top_k, 1)):
        if type(size) is not int or size < least:
            raise ArgumentError(f"{name} is {size!r}; expected an integer from {least}")
    return MoeProblem(op, tokens, top_k, experts, N, K, world_size, dtype, op == GATE_UP)


def moe_plan(problem: MoeProblem, machine: Machine, explained: bool = True) -> FusedConfig:
    """The fastest configuration by the model, with its kernel, prediction and, if `explained`, the reasons."""
    return _plan(problem, machine, explained)


@lru_cache(maxsize=4096)
def _plan(problem: MoeProblem, machine: Machine, explained: bool) -> FusedConfig:
    scored: list[tuple[float, int, FusedConfig]] = []
    rejected: list[str] = []
    for way in (way for way in WAYS if problem.op in way.ops):
        if objection := way.supports(problem, machine):
            rejected.append(f"rejected {way.kernel} {way.algorithm}: {objection}")
            continue
        for config in _configs(way, problem, machine):
            found = _predict(way, problem, config, machine)
            scored.append((found.total_us, len(scored), replace(config, prediction=found)))
    *_, chosen = min(scored)
    if not explained:
        return chosen
    asked = (
        f"{problem.op} T={problem.tokens} k={problem.top_k} E={problem.experts} N={problem.N} K={problem.K} "
        f"{problem.dtype} on {machine.name}"
    )
    rows = [_row(config) for _, _, config in sorted(scored)]
    return replace(chosen, reasons=(asked, *rows, *rejected, f"chosen {_label(chosen)}"))


def candidates(problem: MoeProblem, machine: Machine) -> list[FusedConfig]:
    """All configurations that a plan would look at."""
    ways = [way for way in WAYS if problem.op in way.ops and not way.supports(problem, machine)]
    return [config for way in ways for config in _configs(way, problem, machine)]


def _configs(way: MoeWay, problem: MoeProblem, machine: Machine) -> Sequence[FusedConfig]:
    found = []
    for m, n, k, warps, stages, _ in _FEW_TILES if problem.pairs <= FEW_PAIRS else _TILES:
        fit = machine.stages((m + n) * k * problem.dtype.itemsize)
        while fit < 2 and k > 32:
            k //= 2
            fit = machine.stages((m + n) * k * problem.dtype.itemsize)
        found.append(
            FusedConfig(
                m, n, k, group_m=8, num_warps=warps, num_stages=max(1, min(stages, fit)), algorithm=way.algorithm,
                kernel=way.kernel,
            )
        )  # fmt: skip
    return found


def _predict(way: MoeWay, problem: MoeProblem, config: FusedConfig, machine: Machine) -> Prediction:
    product, link = _product_us(problem, config, machine), _link_us(problem, machine) if problem.reduces else 0.0
    return Prediction(product, link, product + way.rest_us(problem, machine) + machine.launch_us)


def _product_us(problem: MoeProblem, config: FusedConfig, machine: Machine) -> float:
    if not problem.pairs:
        return 0.0
    size, columns = problem.dtype.itemsize, problem.columns
    to_an_expert = problem.pairs / problem.touched
    blocks = problem.touched * max(1.0, to_an_expert / config.block_m + 0.5)
    flops = 2.0 * blocks * config.block_m * columns * problem.K
    rate = next(rate for m, n, *_, rate in _TILES if m == config.block_m and n == config.block_n)
    rate *= 1.0 if size == 2 else 0.06
    streamed = problem.touched * columns * problem.K * size
    passed = problem.pairs * (problem.K * -(-columns // (4 * config.block_n)) + problem.N) * size
    waves = max(1.0, machine.num_programs / max(1.0, blocks * columns / config.block_n))
    return max((streamed + passed) / (machine.hbm_gbs * 1e3), waves * flops / (rate * machine.tflops * 1e6))


def _label(config: FusedConfig) -> str:
    return f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_k} {config.algorithm}"


def _row(config: FusedConfig) -> str:
    times = config.prediction
    assert times is not None  # every candidate has one
    return (
        f"{_label(config):<56} product {times.gemm_us:9.1f} us, link {times.link_us:9.1f} us, "
        f"together {times.total_us:9.1f} us"
    )
