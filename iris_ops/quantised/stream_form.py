"""Divide a product among programs of the stream of weights: tiles, warps, rings, and how many programs run at once.

A program's time is about that of the bytes that its multiprocessor loads: the weights of its columns and, once for
each tile, all of A. Weights come from memory, and A from the L2 cache. Up to 16 rows, A is small beside the weights.
Then four warps take a line of 128 numbers along K each, with all columns of a tile. Of more rows A is larger than the
weights, so tiles are wide, and warps divide their columns as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from iris.errors import ArgumentError

from ..planning.needs import LINE

# Programs for which a multiprocessor has room at once: stages of their rings, by rows and T. Where there is but one for
# each, there must be room for one only: after a kernel that is about to end, two would come to the first free place.
RINGS = {
    1: {(8, 1): 12, (8, 2): 8, (8, 3): 6, (16, 1): 8, (16, 2): 6, (16, 3): 5},
    2: {(8, 1): 6, (8, 2): 4, (8, 3): 3, (16, 1): 4, (16, 2): 3, (16, 3): 2},
    3: {(8, 1): 4, (16, 2): 2},
}
MULTIPLIED_ROWS = 16  # at most, by weights that a warp has widened: of more rows it has several such blocks
_WARPS, _COLUMNS = 4, 16  # of a program and of a tile of fp8 with a scale for each column
SHARED, _MOST, RESERVED = 228 << 10, 227 << 10, 1536  # bytes of a multiprocessor, of a program, beside ring and sums
_VECTOR = 16  # bytes of scales that the hardware copies at least


@dataclass(frozen=True)
class Choice:
    """The division of the work among programs.

    COLUMNS: of a tile, of which a program takes one of each matrix at a time. LINES: of a step, of all
    warps. RESIDENT: programs on a multiprocessor at once. BRANCHES: whether a branch skips loads beyond the last.
    COLUMN_WARPS: of the WARPS, those that divide a tile's columns; the others divide lines.
    """

    COLUMNS: int = 32
    LINES: int = 4
    RESIDENT: int = 2
    STAGES: int = 12
    BRANCHES: bool = True
    WARPS: int = 4
    COLUMN_WARPS: int = 1

    def stages(self, rows: int, T: int, words: int, scales: int, resident: int) -> int:
        """Return the stages that fit if `resident` programs run on a multiprocessor; 2 are needed."""
        others = RESERVED + sums_bytes(rows, T * self.COLUMNS, self.WARPS // self.COLUMN_WARPS)
        stage = stage_bytes(rows, T * self.COLUMNS, words, scale_bytes(self.LINES, scales), self.LINES)
        return min(self.STAGES, (min(SHARED // resident, _MOST) - others) // stage)

    def grid_and_stages(
        self, rows: int, columns: int, T: int, words: int, scales: int, programs: int
    ) -> tuple[int, int]:
        """Return the programs of a product, all resident at once, and the stages of their rings."""
        groups = _cdiv(columns, self.COLUMNS)
        resident = max(1, min(self.RESIDENT, _cdiv(groups, programs)))
        while resident > 1 and self.stages(rows, T, words, scales, resident) < 2:
            resident -= 1
        stages = self.stages(rows, T, words, scales, resident)
        if stages < 2:
            raise ArgumentError(f"{self} has room for {stages} stages of {rows} rows; expected 2 or more")
        return min(groups, resident * programs), stages


# Tiles by the matrices in B and the most rows: their sums and widened weights fit in registers.
_NARROW = Choice(32, 2, 1, COLUMN_WARPS=2)
_TILES: dict[int, dict[int, tuple[Choice, ...]]] = {
    1: {
        16: (Choice(64, 8, 1), Choice()),
        32: (Choice(64, 4, 1, WARPS=8, COLUMN_WARPS=2), _NARROW),
        64: (Choice(64, 2, 1, WARPS=8, COLUMN_WARPS=4), _NARROW),
    },
    2: {16: (Choice(),), 32: (Choice(32, 4, 1, WARPS=8, COLUMN_WARPS=2),)},
}
COLUMN_SCALES = Choice(_COLUMNS, BRANCHES=False)


def choice(words: int, scales: int, rows: int, columns: int, programs: int, matrices: int = 1) -> Choice:
    """Return how programs divide `rows` rows of A and `columns` columns of weights, of `words` words and `scales` bytes
    of scales a line.

    The tile of which the busiest program loads the fewest bytes.
    """
    loaded, weight = 2 * LINE * loaded_rows(rows), (4 * words + scales) * matrices

    def nbytes(tile: Choice) -> int:
        """Return what the busiest program loads for a line of K."""
        return _cdiv(_cdiv(columns, tile.COLUMNS), programs) * (loaded + tile.COLUMNS * weight)

    fitting = next(fitting for most, fitting in _TILES[matrices].items() if rows <= most)
    return min(fitting, key=nbytes)


def tiles_at_once(columns: int, programs: int) -> int:
    """Return T, the number of tiles that a program takes at a time.

    It makes multiprocessors end together and reads A rarely.
    """
    tiles = _cdiv(columns, _COLUMNS)

    def most(T: int) -> float:
        return _cdiv(_cdiv(tiles, T), programs) * T * (1 + 0.35 / T)  # A costs a third of a tile

    return min((3, 2, 1), key=most)


def loaded_rows(rows: int, runs: bool = False) -> int:
    """Return how many rows of A a program loads: a power of two from 8 on, or, of runs, one alone.

    What is loaded beyond the last row is zero, but slow: one row took longer than eight.
    """
    return 1 if rows == 1 and runs else max(8, _power_of_2(rows))


def grid_and_stages(columns: int, rows: int, T: int, programs: int, matrices: int = 1) -> tuple[int, int]:
    """Return the number of programs of a product with `columns` columns, all resident at once, and the stages of their
    rings.

    It assumes fp8 with a scale for each column.
    """
    groups, kind = _cdiv(columns, _COLUMNS * (T // matrices)), (loaded_rows(rows), T)
    resident = 1 if groups <= programs else 3 if kind in RINGS[3] else 2
    return min(groups, resident * programs), RINGS[resident][kind]


def options(grid: int, programs: int, warps: int = _WARPS) -> dict[str, int]:
    """Return the launch options of a grid whose programs must all run at once on `programs` multiprocessors."""
    most = registers(_cdiv(grid, programs), warps)
    return {"num_warps": warps} | ({"maxnreg": most} if most else {})


def registers(resident: int, warps: int = _WARPS) -> int:
    """Return the registers of a thread, if `resident` programs run at once; 0 if the most that a thread can have
    fit."""
    most = 65536 // (32 * warps * resident) // 8 * 8
    return most if most < 255 else 0


def shared_bytes(rows: int, T: int, stages: int) -> int:
    """Return the bytes of shared memory of a program of fp8 with a scale for each column, without its barriers."""
    return stages * stage_bytes(rows, T * _COLUMNS, 32) + sums_bytes(rows, T * _COLUMNS)


def stage_bytes(rows: int, columns: int, words: int, scales: int = 0, lines: int = 4) -> int:
    """Return the bytes of a stage of the ring: lines of A, their words of `columns` columns, and a column's `scales` of
    a stage."""
    return lines * (2 * LINE * rows + columns * 4 * words) + columns * scales


def scale_bytes(lines: int, scales: int) -> int:
    """Return the bytes of a column's scales in a stage, of `scales` bytes a line, as whole vectors."""
    return _cdiv(lines * scales, _VECTOR) * _VECTOR


def sums_bytes(rows: int, columns: int, slices: int = _WARPS) -> int:
    return slices * _power_of_2(columns) * max(8, rows) * 4


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    """Return the least power of two from `n` on."""
    return 1 << (n - 1).bit_length()
