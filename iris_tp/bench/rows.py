"""One measured call: an op and its sizes, each rank's share of it, and the floor.

M, N, K are the sizes of one call. `form` is the dimension along which the op scatters or gathers; w ranks:

    op   call                  form   A on a rank   W on a rank   out on a rank   product on a rank
    ar   matmul_all_reduce            (M, K)        (N, K)        (M, N)          M x N x K
    rs   matmul_reduce_scatter rows   (M, K)        (N, K)        (M/w, N)        M x N x K
                               cols   (M, K)        (N, K)        (M, N/w)        M x N x K
    ag   all_gather_matmul     rows   (M/w, K)      (N, K)        (M, N)          M x N x K
                               k      (M, K/w)      (N, K)        (M, N)          M x N x K
    ga   matmul_all_gather     rows   (M/w, K)      (N, K)        (M, N)          M/w x N x K
                               cols   (M, K)        (N/w, K)      (M, N)          M x N/w x K

Rows need not be divisible by w: parts are those of `torch.chunk`, the last ones short or empty.

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
LINK_GB_S = 389.0  # rate of an H200's copy engines over NVLink, all ranks sending at once


@dataclass(frozen=True)
class Row:
    op: str
    M: int
    N: int
    K: int
    form: str = "rows"

    def supports(self, world: int) -> bool:
        """Return whether the row exists for `world` ranks: columns are divided evenly or not at all."""
        size = {"cols": self.N, "k": self.K}.get(self.form, 0)
        return size % world == 0

    def even(self, world: int) -> bool:
        """Return whether every rank's part has the same size, which most rivals need."""
        return self.op == "ar" or self.form != "rows" or self.M % world == 0

    def part_rows(self, world: int) -> int:
        """Return rows of the largest part."""
        return part(self.M, world)

    def rows_of(self, rank: int, world: int) -> int:
        return max(0, min(self.part_rows(world), self.M - rank * self.part_rows(world)))

    def a_shape(self, rank: int, world: int) -> tuple[int, int]:
        if self.op in ("ag", "ga") and self.form == "rows":
            return self.rows_of(rank, world), self.K
        return self.M, self.K // world if self.form == "k" else self.K

    def w_shape(self, world: int) -> tuple[int, int]:
        return (self.N // world if self.op == "ga" and self.form == "cols" else self.N, self.K)

    def out_shape(self, rank: int, world: int) -> tuple[int, int]:
        if self.op != "rs":
            return self.M, self.N
        return (self.M, self.N // world) if self.form == "cols" else (self.rows_of(rank, world), self.N)

    def gemm(self, world: int) -> tuple[int, int, int]:
        """Return the largest product that one rank computes."""
        rows = self.part_rows(world) if self.op == "ga" and self.form == "rows" else self.M
        return rows, *self.w_shape(world)

    def link_bytes(self, world: int, itemsize: int = 2) -> float:
        """Return the fewest bytes that a rank sends: each part of a gather or reduction goes to w - 1 peers, once."""
        to_peers = (world - 1) / world
        elements = {
            "ar": 2 * to_peers * self.M * self.N,  # scatter the partial sums, gather the totals
            "rs": to_peers * self.M * self.N,
            "ag": to_peers * self.M * self.K,
            "ga": to_peers * self.M * self.N,
        }
        return elements[self.op] * itemsize

    def link_us(self, world: int, itemsize: int = 2) -> float:
        return self.link_bytes(world, itemsize) / LINK_GB_S / 1e3

    def floor_us(self, gemm_us: float, world: int, itemsize: int = 2) -> float:
        return max(gemm_us, self.link_us(world, itemsize))

    def __str__(self) -> str:
        return f"{self.op} {label(vars(self))}"


def label(row: dict) -> str:
    """Return a row's name in tables and pictures."""
    form = row.get("form", "rows")
    return f"{row['M']}, {row['N']}, {row['K']}" + (f" ({form})" if form != "rows" else "")


def part(size: int, world: int) -> int:
    """Return the largest part of `size` over the ranks."""
    return -(-size // world)
