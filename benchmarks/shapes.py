"""The rows that are measured, as data.

M, N, K are the sizes of one call, whatever the number of ranks:

    op   call                  A on a rank   W on a rank   out on a rank   product on a rank
    ar   matmul_all_reduce     (M, K)        (N, K)        (M, N)          M x N x K
    rs   matmul_reduce_scatter (M, K)        (N, K)        (M/w, N)        M x N x K
    ag   all_gather_matmul     (M/w, K)      (N, K)        (M, N)          M x N x K
    ga   matmul_all_gather     (M/w, K)      (N, K)        (M, N)          M/w x N x K

The floor is the longer of the product alone and the bytes that a rank must send, at the rate of its link. No
schedule can beat it: at best one hides the other completely.
"""

from dataclasses import dataclass

CALLS = {
    "ar": "matmul_all_reduce",
    "rs": "matmul_reduce_scatter",
    "ag": "all_gather_matmul",
    "ga": "matmul_all_gather",
}
LINK_GB_S = 389.0  # what the copy engines of an H200 push over NVLink, every rank sending at once


@dataclass(frozen=True)
class Row:
    op: str
    M: int
    N: int
    K: int

    def divides(self, world: int) -> bool:
        """Whether every rank's part has the same size, which the rivals' collectives need."""
        return self.op == "ar" or self.M % world == 0

    def a_shape(self, world: int) -> tuple[int, int]:
        return (self.M // world if self.op in ("ag", "ga") else self.M, self.K)

    def out_shape(self, world: int) -> tuple[int, int]:
        return (self.M // world if self.op == "rs" else self.M, self.N)

    def gemm(self, world: int) -> tuple[int, int, int]:
        """The product that one rank computes."""
        return (self.M // world if self.op == "ga" else self.M, self.N, self.K)

    def link_bytes(self, world: int, itemsize: int = 2) -> float:
        """The fewest bytes that a rank sends: each part of what is gathered or reduced goes to w - 1 peers, once."""
        others = (world - 1) / world
        elements = {
            "ar": 2 * others * self.M * self.N,  # scatter the partial sums, gather the totals
            "rs": others * self.M * self.N,
            "ag": others * self.M * self.K,
            "ga": others * self.M * self.N,
        }
        return elements[self.op] * itemsize

    def link_us(self, world: int, itemsize: int = 2) -> float:
        return self.link_bytes(world, itemsize) / LINK_GB_S / 1e3

    def floor_us(self, gemm_us: float, world: int, itemsize: int = 2) -> float:
        return max(gemm_us, self.link_us(world, itemsize))

    def __str__(self) -> str:
        return f"{self.op} {self.M}, {self.N}, {self.K}"


def _rows(ops: str, *sizes: tuple[int, int, int]) -> list[Row]:
    return [Row(op, *size) for op in ops.split() for size in sizes]


SQUARE = (8192, 8192, 7168)
PREFILL = (
    SQUARE,
    (8192, 8192, 2048),
    (2048, 8192, 7168),
    (2048, 8192, 2048),
    (512, 8192, 7168),
    (512, 8192, 2048),
    (4096, 4096, 3584),
    (128, 4096, 3584),
)
DECODE = (
    (64, 8192, 7168),
    (64, 8192, 2048),
    (1, 8192, 7168),
    (1, 8192, 2048),
    (256, 8192, 2048),
    (128, 8192, 2048),
    (32, 8192, 2048),
    (16, 8192, 7168),
    (16, 8192, 2048),
    (16, 4096, 3584),
    (4, 7168, 4096),
    (4, 5120, 2048),
    (1, 4096, 3584),
    (1, 4096, 1024),
)
COLUMN = (
    SQUARE,
    (8192, 14336, 8192),
    (8192, 2560, 8192),
    (2048, 14336, 8192),
    (2048, 2560, 8192),
    (512, 14336, 8192),
    (512, 2560, 8192),
)

SETS = {
    "facts": _rows("ar", *PREFILL, *DECODE) + _rows("rs", *PREFILL) + _rows("ag ga", *COLUMN),
    "quick": _rows("ar rs ag ga", SQUARE, (512, 8192, 2048)),
    "tiny": _rows("ar rs ag ga", (16, 48, 32), (32, 32, 64)),  # for machines without a GPU
}


def select(name: str, ops: list[str], sizes: str | None = None) -> list[Row]:
    """The rows of a set that belong to `ops`; `sizes` as "8192,8192,7168;512,8192,2048" keeps those sizes only."""
    wanted = [tuple(int(size) for size in part.split(",")) for part in sizes.split(";")] if sizes else None
    rows = [row for row in SETS[name] if row.op in ops and (wanted is None or (row.M, row.N, row.K) in wanted)]
    if not rows:
        raise ValueError(f"no row of set {name!r} has ops {ops} and sizes {sizes}; see benchmarks/shapes.py")
    return rows
