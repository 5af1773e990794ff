"""The ways of a mixture's ops, a row each, as `ways.py` has those of the others: kernels, reasons, tiles and times.

A grouped product of few rows to an expert is a stream of the weights of the experts that have rows; of many it is a
product whose blocks are each one expert's, the last of them partly empty. Both times stand in `_product_us`.

All ways round and add alike: along K from 0 on, experts in the order of a token's choice, ranks in order. So where a
context promises a row's bits at every number of rows (`orders.py`), tiles of one instruction are all that is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from iris.errors import ArgumentError

from ..config import FusedConfig, Prediction
from .machine import INTERPRETER, Machine
from .moe_problem import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP, MoeProblem
from .workspace_size import exchange_ld

GROUPED, LAMPORT, SEQUENTIAL = "moe.grouped_matmul", "moe.lamport_down", "moe.sequential"
TOKEN, COMBINE = "moe.lamport_token", "moe.lamport_combine"
FEW_PAIRS = 256  # that a program looks through by itself
MOST_TOKENS = 128  # of which one program adds up what their experts give, for some columns
# block_m, block_n, block_k, warps, stages; what part of the chip's rate its products reach, and the depth along K that
# would take as long as its beginning and end: less where two programs share a multiprocessor.
_FEW_TILES = ((16, 32, 256, 4, 4, 0.08, 128), (16, 64, 128, 4, 5, 0.12, 128), (16, 128, 64, 4, 3, 0.15, 128))
_TILES = (
    *_FEW_TILES, (32, 128, 64, 4, 3, 0.26, 192), (64, 128, 64, 4, 4, 0.5, 192), (128, 128, 64, 8, 3, 0.65, 192),
    (128, 256, 64, 8, 4, 0.75, 512),
)  # fmt: skip
# Of gate and up the depth of a step, in tiles of few rows and so many columns or more: the fastest that was measured.
# The way back has little depth, so there three stages, and more programs to a multiprocessor, are faster.
_DEEP, _DEEP_COLUMNS = 128, 128
_NOT_BACK = 32  # rows of a tile that was never the fastest on the way back: 16 or 64 were
# Of `lamport_token.py`: columns of a tile, and its elements in all, which four warps keep in registers; stages, where a
# program has a multiprocessor to itself, and where two share one.
_TOKEN_COLUMNS, _TOKEN_ELEMENTS, _TOKEN_STAGES = (16, 32, 64), 8192, (8, 5)
_DRAW_ALL = 0.8  # of the multiprocessors draw all that the memory gives
_SORT_US, _ROWS_US = 3.0, 2.0  # a kernel that sorts, one that goes over a token's rows
_ONE_PROGRAM_GBS = 25.0  # at which one program reads what others have left for it to add up
_MOST_TO_ALL = 1 << 17  # sums that more than two ranks send each other in one shot
_MOST_EXCHANGED = 1 << 27  # bytes of the heap, for what the ranks send each other at a time


@dataclass(frozen=True)
class MoeWay:
    """`supports`: why it cannot serve a problem, or None. `rest_us`: what it takes beside the product."""

    kernel: str
    algorithm: str
    ops: tuple[str, ...]
    supports: Callable[[MoeProblem, Machine], str | None]
    rest_us: Callable[[MoeProblem, Machine], float]


def need_sorting(pairs: int, experts: int) -> bool:
    """Whether so many pairs of token and expert are sorted first; else each program looks through them.

    An expert's rows beyond one block would be multiplied by the same program, which then reads the weights again: the
    busiest expert has some four times the mean.
    """
    return pairs > min(FEW_PAIRS, 4 * experts)


def _few(problem: MoeProblem, machine: Machine) -> str | None:
    sorted_first = need_sorting(problem.pairs, problem.experts)
    return f"{problem.pairs} pairs of token and expert are sorted first" if sorted_first else None


def _many(problem: MoeProblem, machine: Machine) -> str | None:
    return None if need_sorting(problem.pairs, problem.experts) else "few pairs need not be sorted"


def one_token(problem: MoeProblem, machine: Machine | None = None) -> str | None:
    """Why `lamport_token.py` cannot serve a problem, or None."""
    if problem.tokens != 1:
        return "it serves one token"
    if problem.in_rows:
        return "its columns would be read in pieces too short"
    return None if problem.invariant is None else "it adds otherwise than what serves more tokens"


def _one_hop(problem: MoeProblem, machine: Machine) -> str | None:
    if not one_token(problem, machine):
        return f"one token is {TOKEN}'s"
    if problem.tokens > MOST_TOKENS:
        return f"one program would add up more than {MOST_TOKENS} tokens of its columns"
    return waits_too_wide(problem, max(n for _, n, *_ in _FEW_TILES), machine)


def waits_too_wide(problem: MoeProblem, block_n: int, machine: Machine) -> str | None:
    """Why columns in blocks of so many would have too many programs wait at once, if they would."""
    if machine.name != INTERPRETER and -(-problem.N // block_n) >= machine.num_programs:
        return f"{problem.N} columns are more blocks of {block_n} than programs run at once"
    return None


def exchange_form(problem: MoeProblem) -> str:
    """To whom a rank's sums of many tokens go (`lamport_combine.py`)."""
    if problem.scatters:
        return "scatter"
    few = problem.world_size == 2 or problem.tokens * problem.N <= _MOST_TO_ALL
    return "all" if few else "owners"


def exchange_bytes(problem: MoeProblem, config: FusedConfig) -> int:
    """What the ranks send each other in Lamport values at a time, in two buffers."""
    if config.algorithm == "sequential" or not problem.reduces:
        return 0
    if config.algorithm == "overlapped":
        return _sums_bytes(problem, tokens_at_once(problem))
    return 2 * problem.world_size * problem.tokens * exchange_ld(problem.N) * problem.dtype.itemsize


def tokens_at_once(problem: MoeProblem) -> int:
    """Of how many tokens `lamport_combine.py` exchanges the sums in one launch."""
    if problem.scatters:  # whose parts are of all tokens
        return problem.tokens
    each = _sums_bytes(problem, problem.world_size) // problem.world_size
    return min(problem.tokens, max(1, _MOST_EXCHANGED // max(1, each)))


def _sums_bytes(problem: MoeProblem, tokens: int) -> int:
    w, ld = problem.world_size, exchange_ld(problem.N)
    elements = w * tokens * ld
    if exchange_form(problem) != "all":
        rows = -(-tokens // w) * w
        elements = rows * ld + (exchange_ld(w) if problem.scatters else rows * ld)
    return 2 * elements * problem.dtype.itemsize


def _many_sums(problem: MoeProblem, machine: Machine) -> str | None:
    nbytes = _sums_bytes(problem, tokens_at_once(problem))
    if nbytes > _MOST_EXCHANGED:
        return f"its exchange would take {nbytes >> 20} MiB; at most {_MOST_EXCHANGED >> 20}"
    return None


def _sums_us(problem: MoeProblem, machine: Machine) -> float:
    """As `_passed_us`, where what travels hides behind what is read, or the other way round."""
    size = problem.dtype.itemsize
    again = (problem.pairs + 3 * problem.tokens) * problem.N * size / (machine.hbm_gbs * 1e3)
    link = _link_us(problem, machine)
    sort = _SORT_US if need_sorting(problem.pairs, problem.experts) else 0.0
    launches = -(-problem.tokens // max(1, tokens_at_once(problem)))
    fixed = _ROWS_US + launches * (machine.launch_us + machine.exchange_us) + sort
    return fixed + max(again, link) + 0.2 * min(again, link)


def _hop_us(problem: MoeProblem, machine: Machine) -> float:
    block_n = max(n for _, n, *_ in _FEW_TILES)
    sums = (problem.pairs + problem.tokens) * block_n * problem.dtype.itemsize / (_ONE_PROGRAM_GBS * 1e3)
    copies = problem.world_size - 1
    link = copies * problem.tokens * problem.N * problem.dtype.itemsize / (machine.link_gbs * 1e3)
    sort = _SORT_US if need_sorting(problem.pairs, problem.experts) else 0.0
    return machine.exchange_us + -(-problem.tokens // 16) + sums + link + sort  # a microsecond for 16 tokens


def _passed_us(problem: MoeProblem, machine: Machine) -> float:
    """Rows of products that are read again, for each token's sum, and what travels."""
    size = problem.dtype.itemsize
    again = (problem.pairs + problem.tokens) * problem.N * size / (machine.hbm_gbs * 1e3)
    sort = _SORT_US if need_sorting(problem.pairs, problem.experts) else 0.0
    return _ROWS_US + again + _link_us(problem, machine) + 2 * machine.exchange_us + machine.launch_us + sort


def _link_us(problem: MoeProblem, machine: Machine) -> float:
    w = problem.world_size
    copies = (1 if problem.scatters else 2) * (w - 1) / w
    return copies * problem.tokens * problem.N * problem.dtype.itemsize / (machine.link_gbs * 1e3)


WAYS = (
    MoeWay(GROUPED, "one_shot", (GATE_UP,), _few, lambda problem, machine: 0.0),
    MoeWay(GROUPED, "sequential", (GATE_UP,), _many, lambda problem, machine: _SORT_US),
    MoeWay(TOKEN, "one_shot", (DOWN_ALL_REDUCE,), one_token, lambda problem, machine: machine.exchange_us),
    MoeWay(LAMPORT, "one_shot", (DOWN_ALL_REDUCE,), _one_hop, _hop_us),
    MoeWay(COMBINE, "overlapped", (DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER), _many_sums, _sums_us),
    MoeWay(SEQUENTIAL, "sequential", (DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER), lambda problem, machine: None, _passed_us),
)


def kernel_for(problem: MoeProblem, config: FusedConfig) -> str:
    """The way's kernel that `config` stands for. Raises `ArgumentError` where there is none."""
    for way in WAYS:
        if problem.op in way.ops and way.algorithm == config.algorithm:
            if way.kernel == TOKEN and one_token(problem):
                continue
            return way.kernel
    known = ", ".join(sorted({repr(way.algorithm) for way in WAYS if problem.op in way.ops}))
    raise ArgumentError(f"{problem.op}: config.algorithm is {config.algorithm!r}; expected one of {known}")


def moe_plan(
    problem: MoeProblem, machine: Machine, explained: bool = True, algorithm: str | None = None
) -> FusedConfig:  # fmt: skip
    """The fastest configuration by the model, with its kernel, prediction and, if `explained`, the reasons.

    `algorithm`: among those only. Raises `ArgumentError` where none of them serves the problem.
    """
    return _plan(problem, machine, explained, algorithm)


@lru_cache(maxsize=4096)
def _plan(problem: MoeProblem, machine: Machine, explained: bool, algorithm: str | None) -> FusedConfig:
    rejected: list[str] = []
    found = _scored(problem, machine, rejected)
    scored = [each for each in found if algorithm in (None, each.algorithm)]
    if not scored:
        others = ", ".join(sorted({each.algorithm for each in found}))
        raise ArgumentError(
            f"{problem.op}: algorithm is {algorithm!r}; expected one that serves these sizes, dtype and ranks, {others}"
        )
    if not explained:
        return scored[0]
    asked = (
        f"{problem.op} T={problem.tokens} k={problem.top_k} E={problem.experts} N={problem.N} K={problem.K} "
        f"{problem.dtype} on {machine.name}"
    )
    rows = [_row(config) for config in scored]
    refused = [*rejected, *(_left_out(problem, machine, scored, algorithm) if problem.invariant else ())]
    return replace(scored[0], reasons=(asked, *rows, *refused, f"chosen {_label(scored[0])}"))


def _scored(problem: MoeProblem, machine: Machine, rejected: list[str]) -> list[FusedConfig]:
    """All configurations that a plan looks at with their times, the fastest first, and why other ways cannot serve."""
    found: list[FusedConfig] = []
    for way in (way for way in WAYS if problem.op in way.ops):
        if reason := way.supports(problem, machine):
            rejected.append(f"rejected {way.kernel} {way.algorithm}: {reason}")
            continue
        for config in _configs(way, problem, machine):
            found.append(replace(config, prediction=_predict(way, problem, config, machine)))
    return sorted(found, key=_total_us)


def weighed(problem: MoeProblem, machine: Machine) -> tuple[list[tuple[str, FusedConfig]], list[str]]:
    """Each configuration that a plan looks at, with its name, the fastest first; and why other ways cannot serve."""
    rejected: list[str] = []
    return [(_label(config), config) for config in _scored(problem, machine, rejected)], rejected


def _total_us(config: FusedConfig) -> float:
    assert config.prediction is not None  # every candidate has one
    return config.prediction.total_us


def _left_out(
    problem: MoeProblem, machine: Machine, scored: list[FusedConfig], algorithm: str | None
) -> list[str]:  # fmt: skip
    """What was not weighed, so that a token has the same bits among any number of them, and what that costs."""
    others = _scored(replace(problem, invariant=None), machine, [])
    taken = {_label(config) for config in scored}
    others = [each for each in others if algorithm in (None, each.algorithm) and _label(each) not in taken]
    said = [
        f"left out {_label(each)}, {_total_us(each):.1f} us: its tile takes another instruction, which adds otherwise"
        for each in others
    ]
    least = _total_us(scored[0])
    cost = least - min([least, *map(_total_us, others)])
    share = 100 * cost / least if least else 0.0
    return [
        *said, f"tiles of one instruction: the same bits among any number of tokens cost {cost:.1f} us, {share:.1f} %"
    ]  # fmt: skip


def candidates(problem: MoeProblem, machine: Machine) -> list[FusedConfig]:
    """All configurations that a plan would look at."""
    ways = [way for way in WAYS if problem.op in way.ops and not way.supports(problem, machine)]
    return [config for way in ways for config in _configs(way, problem, machine)]


def _tiles(problem: MoeProblem, machine: Machine) -> Sequence[tuple]:
    """Tiles that suit so many pairs; of a problem that is to be invariant, those of one order (`orders.py`)."""
    few = not need_sorting(problem.pairs, problem.experts)
    if problem.invariant is None:
        return _FEW_TILES if few else _TILES
    least = 32 if machine.name.startswith("AMD") else 16  # an instruction has 32 rows and columns there, or 16
    found = [tile for tile in _TILES if tile[0] >= least and tile[1] >= 128]
    return found[:1] if few else found


def _configs(way: MoeWay, problem: MoeProblem, machine: Machine) -> Sequence[FusedConfig]:
    if way.kernel == TOKEN:
        return [_token_config(problem, machine)]
    found = []
    for m, n, k, warps, stages, *_ in _tiles(problem, machine):
        if problem.invariant is None and problem.reduces and m == _NOT_BACK:
            continue
        if problem.invariant is None and not problem.reduces and problem.tokens > 1 and m < 64 and n >= _DEEP_COLUMNS:
            k = _DEEP
        if way.kernel == LAMPORT and waits_too_wide(problem, n, machine):
            continue
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


def _token_config(problem: MoeProblem, machine: Machine) -> FusedConfig:
    """As narrow columns as have no more programs than two for each multiprocessor."""
    n = next((n for n in _TOKEN_COLUMNS if -(-problem.N // n) <= 2 * machine.num_programs), _TOKEN_COLUMNS[-1])
    choices = 1 << (problem.top_k - 1).bit_length()
    k = min(256, max(16, _TOKEN_ELEMENTS // (n * choices)))
    stages = _TOKEN_STAGES[-(-problem.N // n) > machine.num_programs]
    fit = machine.stages(choices * (n + 1) * k * problem.dtype.itemsize)
    return FusedConfig(
        16, n, k, num_warps=4, num_stages=max(1, min(stages, fit)), algorithm="one_shot", kernel=TOKEN
    )  # fmt: skip


def _predict(way: MoeWay, problem: MoeProblem, config: FusedConfig, machine: Machine) -> Prediction:
    if way.kernel == TOKEN:  # as if it had the best of tiles: which way is taken must not depend on a rank's K
        product = min(_product_us(problem, m, n, machine) for m, n, *_ in _FEW_TILES)
    else:
        product = _product_us(problem, config.block_m, config.block_n, machine)
    link = _link_us(problem, machine) if problem.reduces else 0.0
    return Prediction(product, link, product + way.rest_us(problem, machine) + machine.launch_us)


def _product_us(problem: MoeProblem, block_m: int, block_n: int, machine: Machine) -> float:
    """In tiles of `_TILES`."""
    if not problem.pairs:
        return 0.0
    size, columns = problem.dtype.itemsize, problem.columns
    to_an_expert = problem.pairs / problem.touched
    blocks = problem.touched * max(1.0, to_an_expert / block_m + 0.5)
    flops = 2.0 * blocks * block_m * columns * problem.K
    rate, ends = next((rate, ends) for m, n, *_, rate, ends in _TILES if (m, n) == (block_m, block_n))
    rate *= (1.0 if size == 2 else 0.06) * problem.K / (problem.K + ends) if problem.K else 1.0
    streamed = problem.touched * columns * problem.K * size
    passed = problem.pairs * (problem.K * -(-columns // (4 * block_n)) + problem.N) * size
    programs = max(1.0, blocks * columns / block_n)
    waves = max(1.0, machine.num_programs / programs)
    drawing = min(1.0, programs / (_DRAW_ALL * machine.num_programs))  # of what the memory gives
    memory = (streamed + passed) / (drawing * machine.hbm_gbs * 1e3)
    math = waves * flops / (rate * machine.tflops * 1e6)
    return max(memory, math) + 0.25 * min(memory, math)


def _label(config: FusedConfig) -> str:
    return f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_k} {config.algorithm}"


def _row(config: FusedConfig) -> str:
    times = config.prediction
    assert times is not None
    return (
        f"{_label(config):<56} product {times.gemm_us:9.1f} us, link {times.link_us:9.1f} us, "
        f"together {times.total_us:9.1f} us"
    )
