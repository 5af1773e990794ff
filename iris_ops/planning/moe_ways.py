"""Numbers that the ways of a mixture's ops share: tiles, times and sizes of what ranks send each other.

A grouped product of few rows to an expert is a stream of the weights of the experts that have rows; of many it is a
product whose blocks are each one expert's, the last of them partly empty. `product_us` has both times.

All ways round and add alike: along K from 0 on, experts in the order of a token's choice, ranks in order. So where a
context promises a row's bits at every number of rows (`orders.py`), tiles of one instruction are all that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import INTERPRETER, Machine

from ..problem import Problem
from .needs import LINE, PLAIN
from .operations import DOWN_REDUCE_SCATTER
from .weights.streams import on_hopper
from .workspace_size import exchange_ld

FEW_PAIRS = 256  # that a program looks through by itself
MOST_TOKENS = 128  # of which one program adds up what their experts give, for some columns
# block_m, block_n, block_k, warps, stages; what part of the chip's rate its products reach, and the depth along K that
# would take as long as its beginning and end: less where two programs share a multiprocessor.
FEW_TILES = ((16, 32, 256, 4, 4, 0.08, 128), (16, 64, 128, 4, 5, 0.12, 128), (16, 128, 64, 4, 3, 0.15, 128))
_TILES = (
    *FEW_TILES, (32, 128, 64, 4, 3, 0.26, 192), (64, 128, 64, 4, 4, 0.5, 192), (128, 128, 64, 8, 3, 0.65, 192),
    (128, 256, 64, 8, 4, 0.75, 512),
)  # fmt: skip
# Tiles of sorted pairs by widened codes (`moe/widened_matmul.py`), and the microseconds of a line of 128 along K on a
# multiprocessor, which two programs share: of int4 in groups of 32, measured on an H200.
WIDENED_TILES = ((16, 128, 128, 4, 2), (32, 128, 128, 4, 2), (64, 128, 128, 4, 2))
_LINE_US = {16: 0.45, 32: 0.55, 64: 0.68}
MOST_STREAMED_PAIRS = 128  # that programs of the stream of touched experts compare with each other
# The depth of a step of the first product, in tiles of few rows, from a number of columns on: the fastest measured.
# The way back has little depth, so there three stages, and more programs to a multiprocessor, are faster.
DEEP, DEEP_COLUMNS = 128, 128
# Of a code's way into a product: instructions, and which part of all that a multiprocessor can issue one program does,
# or several that share it. Cycles in a microsecond.
_WIDENING, _ALONE, _SHARED, _CYCLES = 4.5, 0.45, 0.75, 1700.0
# Widening and products overlap, the more so the deeper the product: what part of both remains, measured on two H200
# (`benchmarks/results/experts_touched_h200_x2.json`). K of a tile's beginning.
_MOST_REMAINS, _REMAINS, _BEGINNING = 0.8, 0.31, 1000
MOST_CODED_COLUMNS = 128  # of a tile whose codes are widened by lines of 128: registers hold no more
NOT_BACK = 32  # rows of a tile that was never the fastest on the way back: 16 or 64 were
# Of `lamport_token.py`: columns of a tile, and its elements in all, which four warps keep in registers; stages, where a
# program has a multiprocessor to itself, and where two share one.
TOKEN_COLUMNS, TOKEN_ELEMENTS, TOKEN_STAGES = (16, 32, 64), 8192, (8, 5)
_DRAW_ALL = 0.8  # of the multiprocessors draw all that the memory gives
SORT_US, ROWS_US = 3.0, 2.0  # a kernel that sorts, one that goes over a token's rows
ONE_PROGRAM_GBS = 25.0  # at which one program reads what others have left for it to add up
_MOST_TO_ALL = 1 << 17  # sums that more than two ranks send each other in one shot
MOST_EXCHANGED = 1 << 27  # bytes of the heap, for what the ranks send each other at a time


def need_sorting(pairs: int, experts: int) -> bool:
    """Return whether pairs of token and expert are sorted first; else each program looks through them.

    An expert's rows beyond one block would be multiplied by the same program, which then reads the weights again: the
    busiest expert has some four times the mean.
    """
    return pairs > min(FEW_PAIRS, 4 * experts)


def widened(problem: Problem, machine: Machine) -> bool:
    """Return whether ways that sort pairs multiply them by codes in the tensor cores' operand registers.

    It does not depend on K, of which ranks may have unequal parts: they must choose the same exchange.
    """
    if problem.pairs <= MOST_STREAMED_PAIRS or problem.sums.promised:
        return False
    alike = problem.N % (2 * problem.epilogue.matrices) == 0
    return alike and problem.weights.widened_in_tiles and on_hopper(problem, machine)


def widened_us(problem: Problem, block_m: int, block_n: int, machine: Machine) -> float:
    """Return the microseconds of the product of sorted pairs by widened codes."""
    touched = problem.experts.touched(problem.pairs)
    blocks = touched * max(1.0, problem.pairs / touched / block_m + 0.5)
    lines = blocks * -(-problem.N // block_n) * -(-problem.K // LINE) / machine.num_programs
    memory = touched * problem.N * problem.K * weight_bytes(problem) / (machine.hbm_gbs * 1e3)
    return max(memory, lines * _LINE_US[block_m] / problem.weights.tile_share)


def one_token(problem: Problem) -> str | None:
    """Return why `lamport_token.py` cannot serve a problem, or None."""
    if problem.M != 1:
        return "it serves one token"
    if problem.weights is not PLAIN:
        return "it reads weights in the tokens' dtype"
    if problem.experts.in_rows:
        return "it would read columns in pieces that are too short"
    return None if not problem.sums.promised else "its order of sums differs from that of the kernels for more tokens"


def waits_too_wide(problem: Problem, block_n: int, machine: Machine) -> str | None:
    """Return why too many programs would wait at once with this width of blocks, or None."""
    if machine.name != INTERPRETER and -(-problem.N // block_n) >= machine.num_programs:
        return f"{problem.N} columns need more blocks of {block_n} than programs run at once"
    return None


def exchange_form(problem: Problem) -> str:
    """Return which ranks receive a rank's sums of many tokens (`lamport_combine.py`)."""
    if problem.op == DOWN_REDUCE_SCATTER:
        return "scatter"
    few = problem.world_size == 2 or problem.M * problem.N <= _MOST_TO_ALL
    return "all" if few else "owners"


def tokens_at_once(problem: Problem) -> int:
    """Return how many tokens' sums `lamport_combine.py` exchanges in one launch."""
    if problem.op == DOWN_REDUCE_SCATTER:  # whose parts are of all tokens
        return problem.M
    token_bytes = sums_bytes(problem, problem.world_size) // problem.world_size
    return min(problem.M, max(1, MOST_EXCHANGED // max(1, token_bytes)))


def sums_bytes(problem: Problem, tokens: int) -> int:
    w, ld = problem.world_size, exchange_ld(problem.N)
    elements = w * tokens * ld
    if exchange_form(problem) != "all":
        rows = -(-tokens // w) * w
        elements = rows * ld + (exchange_ld(w) if problem.op == DOWN_REDUCE_SCATTER else rows * ld)
    return 2 * elements * problem.dtype.itemsize


def link_us(problem: Problem, machine: Machine) -> float:
    return problem.link_bytes / (machine.link_gbs * 1e3)


def weight_bytes(problem: Problem) -> float:
    """Return the bytes of a number of an expert's weight in memory."""
    if problem.weights is PLAIN:
        return problem.dtype.itemsize
    return problem.weights.nbytes(1, problem.K) / max(1, problem.K)


def tiles_of(problem: Problem, machine: Machine) -> Sequence[tuple]:
    """Return the tiles for the problem's number of pairs; where bits are promised, those of one order (`orders.py`)."""
    few = not need_sorting(problem.pairs, problem.experts.count)
    if not problem.sums.promised:
        return FEW_TILES if few else _TILES
    least = 32 if machine.name.startswith("AMD") else 16  # an instruction has 32 rows and columns there, or 16
    tiles = [tile for tile in _TILES if tile[0] >= least and tile[1] >= 128]
    return tiles[:1] if few else tiles


def product_us(problem: Problem, block_m: int, block_n: int, machine: Machine) -> float:
    """Return the microseconds of the product in tiles of `_TILES`."""
    if not problem.pairs:
        return 0.0
    size, columns = problem.dtype.itemsize, problem.N
    touched = problem.experts.touched(problem.pairs)
    to_an_expert = problem.pairs / touched
    blocks = touched * max(1.0, to_an_expert / block_m + 0.5)
    flops = 2.0 * blocks * block_m * columns * problem.K
    rate, ends = next((rate, ends) for m, n, *_, rate, ends in _TILES if (m, n) == (block_m, block_n))
    rate *= (1.0 if size == 2 else 0.06) * problem.K / (problem.K + ends) if problem.K else 1.0
    streamed = touched * columns * problem.K * weight_bytes(problem)
    passed = problem.pairs * (problem.K * -(-columns // (4 * block_n)) + problem.out_cols) * size
    programs = max(1.0, blocks * columns / block_n)
    waves = max(1.0, machine.num_programs / programs)
    drawing = min(1.0, programs / (_DRAW_ALL * machine.num_programs))  # of what the memory gives
    memory = (streamed + passed) / (drawing * machine.hbm_gbs * 1e3)
    math = waves * flops / (rate * machine.tflops * 1e6)
    if problem.weights is not PLAIN and machine.name != INTERPRETER:
        remains = min(_MOST_REMAINS, _REMAINS + _BEGINNING / max(1, problem.K))
        math = remains * (math + _widening_us(problem, block_n, programs, machine))
    return max(memory, math) + 0.25 * min(memory, math)


def _widening_us(problem: Problem, block_n: int, programs: float, machine: Machine) -> float:
    """Return the microseconds in which programs widen the codes of their tiles."""
    alone = problem.K * block_n * _WIDENING / 128 / _CYCLES  # of a program, four warps of which always have work
    return max(alone / _ALONE, alone * programs / machine.num_programs / _SHARED)


def sort_us(problem: Problem) -> float:
    """Return the microseconds of a kernel that sorts the tokens, where they are many."""
    return SORT_US if need_sorting(problem.pairs, problem.experts.count) else 0.0
