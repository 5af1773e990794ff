"""`Config`, how a collective is to be carried out, and `ReduceOp`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from .. import aliases
from ..errors import ArgumentError

ALL_REDUCE_VARIANTS = ("atomic", "ring", "one_shot", "two_shot", "spinlock")
REDUCE_SCATTER_VARIANTS = ("two_shot",)
PROTOCOLS = ("lamport", "flags")
# Rows and columns of a tile where a reduce-scatter's `out` has the sizes of its input, as in ROCm/iris.
TILE = 32, 64


class ReduceOp(Enum):
    """Name the operation that combines the ranks' elements."""

    SUM = "sum"


@aliases.fields(
    {"num_sms": "comm_sms"},
    {
        "num_xcds": "GPUs here are not numbered by chiplets",
        "chunk_size": "GPUs here are not numbered by chiplets",
        "use_gluon": "one kernel serves each collective",
        "all_reduce_ring_slice_n": "a ring is cut into units of block_size_m * block_size_n",
        "all_gather_variant": "an all-gather is chosen by size",
        "all_to_all_variant": "an all-to-all is chosen by size",
        "num_warps": "warps follow from the size of a unit",
        "num_stages": "these kernels have no pipeline of loads",
        "threads_per_warp": "the GPU decides it",
        "waves_per_eu": "it is an option of AMD's compiler",
        "barrier_mode": "each kernel waits for its peers itself",
    },
    assignable=True,
)
@dataclass(frozen=True)
class Config:
    """Describe how a collective runs, the same on all ranks. A field that is None is chosen by shape and machine.

    If `out` of a reduce-scatter has the sizes of its input, each rank gets the same tiles as in ROCm/iris. They depend
    on `block_size_m`, `block_size_n`, `swizzle_size` and `all_reduce_distribution`, whose defaults are the same there.

    Args:
        block_size_m: a power of two. `block_size_m * block_size_n` elements are what a program moves at once. The two
            are also the tile of a reduce-scatter whose `out` has the sizes of its input, by default 32 x 64.
        block_size_n: a power of two.
        swizzle_size: how many row blocks of such tiles are numbered together.
        comm_sms: the number of programs, at most the GPU's multiprocessors.
        all_reduce_variant: "one_shot" (each rank sums everything), "two_shot" (each rank sums a part and sends it to
            all), "ring", "atomic" or "spinlock". With the last two each rank adds into the sums of all ranks in the
            order of arrival, so last bits may differ between runs and ranks. All other variants give the same bits on
            every rank and in each run.
        all_reduce_distribution: how blocks are assigned to ranks: 0 one after the other, 1 one range for each rank.
        all_reduce_num_rings: into how many rings "ring" divides the data, half of them in the opposite direction; 1 for
            all other variants.
        reduce_scatter_variant: "two_shot".
        protocol: how a rank knows that data has arrived: "lamport" (by the values themselves, for small tensors) or
            "flags" (by signals, for large ones).

    Raises:
        ArgumentError: for a field out of its range, here and when a field is set later.
    """

    block_size_m: int | None = None
    block_size_n: int | None = None
    swizzle_size: int = 4
    comm_sms: int | None = None
    all_reduce_variant: str | None = None
    all_reduce_distribution: int = 1
    all_reduce_num_rings: int = 1
    reduce_scatter_variant: str = "two_shot"
    protocol: str | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                object.__setattr__(self, f.name, f.default)  # as left open
                continue
            if f.type.startswith("int"):
                least = 0 if f.name == "all_reduce_distribution" else 1
                if type(value) is not int or not least <= value < 1 << 31:
                    raise ArgumentError(f"Config.{f.name} is {value!r}; expected an integer from {least} below 2**31")
        for name in ("block_size_m", "block_size_n"):
            value = getattr(self, name)
            if value is not None and (value & (value - 1) or value > 1 << 16):
                raise ArgumentError(f"Config.{name} is {value}; expected a power of two up to 65536")
        if (self.block or 1) > 1 << 20:  # Triton's most elements of a block
            raise ArgumentError(
                f"Config.block_size_m and block_size_n are {self.tile[0]} and {self.tile[1]}; expected a product up to "
                f"2**20"
            )
        for name, allowed in (
            ("all_reduce_variant", ALL_REDUCE_VARIANTS),
            ("all_reduce_distribution", (0, 1)),
            ("reduce_scatter_variant", REDUCE_SCATTER_VARIANTS),
            ("protocol", PROTOCOLS),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ArgumentError(f"Config.{name} is {value!r}; expected one of {allowed}")
        if self.all_reduce_num_rings > 1 and self.all_reduce_variant != "ring":
            raise ArgumentError(
                f"Config.all_reduce_num_rings is {self.all_reduce_num_rings} and all_reduce_variant is "
                f"{self.all_reduce_variant!r}; expected at most 1, or the variant 'ring'"
            )

    @property
    def block(self) -> int | None:
        """Return the number of elements that a program moves at once."""
        if self.block_size_m is None and self.block_size_n is None:
            return None
        return self.tile[0] * self.tile[1]

    @property
    def tile(self) -> tuple[int, int]:
        """Return the rows and columns of a tile."""
        return self.block_size_m or TILE[0], self.block_size_n or TILE[1]


# The parameters of a collective as ROCm/iris calls them.
KEYWORDS = aliases.keywords(output_tensor="out", input_tensor="inp")


def check_options(op: str, reduce_op: object, config: object) -> None:
    """Raise `ArgumentError` for what is no `Config` or no operation."""
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"{op}: config is {type(config).__name__}; expected an iris.ccl.Config")
    if reduce_op is not None and reduce_op is not ReduceOp.SUM:
        raise ArgumentError(f"{op}: op is {reduce_op!r}; expected None or iris.ccl.ReduceOp.SUM")
