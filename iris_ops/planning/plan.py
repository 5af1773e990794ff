"""Chooses the configuration that serves a problem: arithmetic on shapes, dtype, world size and device rates.

Nothing else is read, so every rank chooses the same without talking, and the plan can explain itself. Candidates are
whole configurations. The planner takes the one that should take least time by `overlap_model.py`.
With `Problem.invariant` it weighs those of one order only (`orders.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from iris.errors import ArgumentError
from iris.invariance import RANKS
import torch

from ..config import FusedConfig, Prediction
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem
from . import orders, tritonblas
from .fp8_model import MULTIPLE
from .kernel_names import LAMPORT_PAIR, TREE, kernel_for, stand_in
from .machine import INTERPRETER, Machine
from .orders import Order
from .overlap_model import push_us
from .tile_model import tile_us
from .trace import label, row
from .waves import gemm_tiles, programs_of
from .ways import WAYS, hides, predict


def plan(problem: Problem, machine: Machine, explained: bool = True, algorithm: str | None = None) -> FusedConfig:
    """The fastest candidate by the model, with its prediction and, if `explained`, the reasons.

    `algorithm`: among those only. Raises `ArgumentError` where none of them serves the problem.
    """
    return _plan(problem, machine, explained, algorithm)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, machine: Machine, explained: bool, algorithm: str | None) -> FusedConfig:
    if why := _converting(problem, machine):
        found = _plan(replace(problem, fp8=False), machine, explained, algorithm)
        return replace(found, reasons=(*found.reasons[:1], why, *found.reasons[1:])) if explained else found
    rejected: list[tuple[str, str]] = []
    candidates = _candidates(problem, machine, rejected)
    asked_for = [each for each in candidates if algorithm in (None, each.config.algorithm)]
    wanted = orders.chosen(replace(problem, M=0), machine, _offers) if problem.invariant else None
    scored = [each for each in asked_for if not problem.invariant or (wanted and each.order == wanted)]
    if not scored:
        others = ", ".join(sorted({each.config.algorithm for each in candidates}))
        if problem.invariant == RANKS and not wanted:
            raise ArgumentError(
                f"{problem.asked}: {problem.world_size} ranks' parts of K = {problem.K} begin within a block; with"
                " invariant='ranks' expected parts of whole blocks, or A gathered by rows"
            )
        alike = ""
        if problem.invariant:
            alike = f", and sum in the order that all numbers of {_of_what(problem)} have, {wanted}"
        raise ArgumentError(
            f"{problem.asked}: algorithm is {algorithm!r}; expected one that serves these sizes, dtype and ranks"
            f"{alike}, {others}"
        )
    chosen, prediction = scored[0].config, scored[0].prediction
    reasons: tuple[str, ...] = ()
    if explained:
        asked = f"{problem.asked} {problem.form} M={problem.M} N={problem.N} K={problem.K} {problem.dtype}"
        asked += ", B in eight bits" if problem.fp8 else ""
        table = [row(problem, each.config, each.prediction) for each in scored]
        named = tritonblas.reasons(problem, machine.name)
        refused = [f"rejected {kernel}: {why}" for kernel, why in rejected]
        if wanted:
            refused += _left_out(problem, wanted, scored, [each for each in asked_for if each.order != wanted])
        reasons = (f"{asked} on {machine.name}", *named, *table, *refused, f"chosen {label(problem, chosen)}")
        if problem.op in (ALL_REDUCE, MATMUL_GATHER) and chosen.algorithm == "overlapped":
            said = (
                "peers write out directly when it lies on the heap, as outputs of layers do where they find room; "
                "otherwise it is staged and copied once more"
            )
            reasons += (said,)
    return replace(chosen, kernel=kernel_for(problem, chosen), prediction=prediction, reasons=reasons)


def weighed(problem: Problem, machine: Machine) -> tuple[list[tuple[FusedConfig, Prediction]], list[tuple[str, str]]]:
    """Every candidate with its times, the one that a plan takes first, and each way that cannot serve, with the reason.

    Of weights in 16 bits; what a plan makes of B in eight bits stands in its own trace only.
    """
    rejected: list[tuple[str, str]] = []
    return [(each.config, each.prediction) for each in _candidates(problem, machine, rejected)], rejected


def check_order(problem: Problem, config: FusedConfig, machine: Machine) -> None:
    """Raises `ArgumentError` for a user's configuration in which a row would be summed in an order of its own."""
    wanted = orders.chosen(replace(problem, M=0), machine, _offers)
    kernel = kernel_for(problem, config)
    (way,) = (way for way in WAYS if way.kernel == kernel)
    order = way.order(way.asked(problem), config, machine)
    cut = problem.by_tree and problem.tree.depth % config.block_k
    if kernel == TREE and config.warp_specialised:
        raise ArgumentError(
            f"{problem.asked}: config.warp_specialised is True; with invariant='ranks' expected False, but for two"
            " ranks of which each has half of the leaves of K"
        )
    if kernel == TREE and config.algorithm == "two_shot" and problem.M < problem.world_size**2:
        raise ArgumentError(
            f"{problem.asked}: config.algorithm is 'two_shot' for {problem.M} rows; with invariant='ranks' expected"
            f" 'one_shot' below {problem.world_size**2}"
        )
    if cut or order is None or order != wanted:
        raise ArgumentError(
            f"{problem.asked}: config sums by {order or 'an order of its own'}"
            f"{f', in blocks of {config.block_k}' if cut else ''}; with invariant={problem.invariant!r} expected None,"
            f" or one that sums by {wanted}"
        )


class _Candidate(NamedTuple):
    weighed_us: float
    number: int
    config: FusedConfig
    prediction: Prediction
    order: Order | None


def _candidates(problem: Problem, machine: Machine, rejected: list[tuple[str, str]]) -> list[_Candidate]:
    """All that serve the problem, the fastest first; and why others do not, to `rejected`."""
    found: list[_Candidate] = []
    promising = problem
    for way in (way for way in WAYS if problem.op in way.ops):
        problem = way.asked(promising)  # what knows nothing of the tree is weighed for what it would take, and left out
        unhidden = "" if hides(way, problem) else "nothing would hide the exchange of so large a result"
        if reason := way.supports(problem, machine) or unhidden:
            rejected.append((way.kernel, reason))
            continue
        for candidate in way.configs(problem, machine):
            if stagger_us := _stagger_us(problem, candidate, machine):
                candidate = replace(candidate, stagger_us=stagger_us)
            prediction = predict(problem, candidate, machine)
            lead, most = (0.0, 0.0) if candidate.warp_specialised else _LEADS.get(candidate.algorithm, (0.0, 0.0))
            weighed_us = prediction.total_us + min(lead * prediction.total_us, most)
            order = way.order(problem, candidate, machine) if problem.invariant else None
            found.append(_Candidate(weighed_us, len(found), candidate, prediction, order))
    return sorted(found, key=lambda each: each[:2])


def _offers(problem: Problem, machine: Machine) -> dict[Order, float]:
    """The orders of all that serve the problem, each with its least time."""
    found: dict[Order, float] = {}
    for each in _candidates(problem, machine, []):
        if each.order is not None:
            found.setdefault(each.order, each.weighed_us)
    return found


def _left_out(problem: Problem, wanted: Order, scored: list[_Candidate], others: list[_Candidate]) -> list[str]:
    """What was not weighed, so that a row has the same bits however many there are, and what that costs."""
    free = replace(problem, invariant=None, depths=()) if problem.by_tree else problem
    what = _of_what(problem)
    said = [
        f"left out {label(free, each.config)}, {each.prediction.total_us:.1f} us: "
        + (f"it sums by {each.order}" if each.order else f"its order of sums depends on the number of {what}")
        for each in others
    ]
    cost = scored[0].weighed_us - min([scored[0].weighed_us, *(each.weighed_us for each in others)])
    share = 100 * cost / scored[0].weighed_us if scored[0].weighed_us else 0.0
    return [*said, f"all sum by {wanted}: the same bits at every number of {what} cost {cost:.1f} us, {share:.1f} %"]


def _of_what(problem: Problem) -> str:
    return "rows and ranks" if problem.invariant == RANKS else "rows"


def unaligned(problem: Problem, config: FusedConfig) -> FusedConfig:
    """The same for tensors whose rows do not all begin at multiples of 16 bytes: some kernels have a stand-in then."""
    kernel = stand_in(problem, kernel_for(problem, config))
    if kernel == config.kernel:
        return config
    said = f"{kernel} runs in its place, for rows that do not begin at multiples of 16 bytes"
    return replace(config, kernel=kernel, reasons=(*config.reasons, said) if config.reasons else ())


# Our kernel, one launch, is taken unless several are this much faster in CUDA graphs, where no host time counts: a part
# of the time, and at most so many microseconds.
_LEADS = {"sequential": (0.02, 7.0), "copy_gather": (0.01, float("inf"))}


def _converting(problem: Problem, machine: Machine) -> str | None:
    """Why a B in eight bits is converted in each call and the plan is that of what it becomes, if so.

    Of an all-reduce it never is: there `sequential` serves everywhere.
    """
    if not problem.fp8 or problem.op == ALL_REDUCE:
        return None
    if not machine.warp_specialised or problem.dtype != torch.bfloat16:
        return f"B is converted in each call: {problem.dtype} by eight bits is not multiplied on {machine.name}"
    if problem.form != "rows" or problem.K % MULTIPLE or problem.N % MULTIPLE:
        multiples = f"K and N multiples of {MULTIPLE}"
        return f"B is converted in each call: by rows, {multiples}, it would be multiplied"
    return None


def _stagger_us(problem: Problem, config: FusedConfig, machine: Machine) -> int:
    """Over what time the programs of an op that pushes tiles start, or, warp-specialised, end what they share first.

    Best is, by measurement, about the time that all of them take to push a tile at once; a third more where tiles go to
    everyone. With more than a tile's product the last would push with the first again. Programs that have one tile each
    gain nothing. Where two ranks exchange Lamport values, it is two fifths of what a wave's values take, from three
    waves on.
    """
    programs = programs_of(config, machine.num_programs)
    if kernel_for(problem, config) == LAMPORT_PAIR and not problem.fp8:
        waves = -(-gemm_tiles(problem, config) // programs)
        wave_us = problem.link_bytes / (machine.link_gbs * 1e3) / max(1, waves)
        return round(0.4 * wave_us) if waves > 2 else 0
    if problem.op == GATHER_MATMUL or config.algorithm != "overlapped":
        return 0
    if config.warp_specialised and (problem.op == REDUCE_SCATTER or config.splits == 1 or config.block_n < 256):
        return 0  # what others sum is pushed while the next tile is multiplied; small tiles lose by unequal shares
    if problem.world_size == 1 or machine.name == INTERPRETER:
        return 0
    if gemm_tiles(problem, config) <= programs and not config.warp_specialised:
        return 0
    copies = 1.35 * (problem.world_size - 1) if problem.op == MATMUL_GATHER else 1
    wave_us = copies * push_us(problem, config, machine, programs)
    return min(int(wave_us), int(tile_us(problem, config, machine)))
