"""`FusedConfig`, which says how a problem is computed, and `Prediction`, the time that this should take."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from iris import aliases, platform
from iris.ccl.config import ALL_REDUCE_VARIANTS
from iris.errors import ArgumentError

WITH_TORCH = ("sequential", "copy_gather")  # whose product may be torch's
ALGORITHMS = ("one_shot", "two_shot", "overlapped", *WITH_TORCH)


@dataclass(frozen=True)
class Prediction:
    """Hold the expected times of a call, in microseconds, by the model of `overlap_model.py`.

    Args:
        gemm_us: the product alone.
        link_us: the bytes over the link alone.
        total_us: the call: both together, with the launch and the hops.
    """

    gemm_us: float
    link_us: float
    total_us: float

    @property
    def columns(self) -> tuple[tuple[str, float], ...]:
        """Return the times that a trace shows, with their names."""
        return ("product", self.gemm_us), ("link", self.link_us), ("together", self.total_us)


@aliases.fields(
    {
        "block_size_m": "block_m",
        "block_size_n": "block_n",
        "block_size_k": "block_k",
        "group_size_m": "group_m",
        "swizzle_size": "group_m",
        "num_sms": "num_programs",
        "comm_sms": "comm_programs",
    },
    {
        "num_xcds": "GPUs here are not numbered by chiplets",
        "chunk_size": "GPUs here are not numbered by chiplets",
        "cache_modifier_a": "operands are loaded by descriptors",
        "cache_modifier_b": "operands are loaded by descriptors",
        "allow_tf32": "products of float32 are always exact to float32",
        "all_reduce_variant": "`algorithm` decides it, one that serves every op",
        "all_reduce_num_rings": "no fused op here is a ring",
        "reduce_num_sms": "the programs that multiply also reduce",
        "ksplit": "`splits` cuts K",
    },
)
@dataclass(frozen=True)
class FusedConfig:
    """Describe how a fused op is computed. All ranks pass equal configurations, and an op ignores fields of other ops.

        field                       what it decides
        block_m, block_n, block_k   the tile of the product, powers of two from 16 (fewer rows in the interpreter); with
                                    one-byte operands a step covers 2 * block_k of K
        group_m                     how many row blocks neighbouring programs share, which then lie in the L2 cache
        num_warps, num_stages       warps of a program, and its pipeline stages in shared memory
        num_programs                size of the persistent grid, at most the GPU's multiprocessors; 0 takes them all
        comm_programs               all_gather_matmul: how many programs move data before they multiply
        stagger_us                  over how many microseconds programs start, so that they do not all push at once
        splits                      into how many parts along K tiles are split that do not fill a wave of programs
        ranks_together              "copy_gather": how many other ranks' rows torch multiplies together, at least
        warp_specialised            whether some warps of a program multiply while others move finished tiles
        algorithm                   how the product and the transfer are arranged, see below
        kernel                      the kernel to launch, by its module's name; plans set it. If several kernels
                                    implement one algorithm, it selects one

        algorithm       for               how
        "one_shot"      few rows          each rank sends its product to all ranks that need it, in one hop
        "two_shot"      all-reduce        each rank sums some rows and sends the sums to all ranks
        "overlapped"    many rows         finished tiles travel while the program multiplies the next ones
        "sequential"    torch's product   a collective of `iris.ccl` follows the product, or precedes it for a gather
        "copy_gather"   gathered rows     copy engines bring rows while torch, or our kernel, multiplies others

    `warp_specialised` needs NVIDIA Hopper, bf16 or fp16, and rows that begin at multiples of 16 bytes. Otherwise a
    portable kernel runs. `num_warps` warps multiply, and others move tiles. Two ranks may use it with "one_shot", more
    ranks with "two_shot". With "overlapped" and `splits` above 1, programs first share the tiles that do not fill a
    wave, and `stagger_us` is the time over which programs end these parts.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    num_programs: int = 0
    comm_programs: int = 16
    stagger_us: int = 0
    splits: int = 1
    ranks_together: int = 1
    warp_specialised: bool = False
    algorithm: str = "overlapped"
    kernel: str = ""
    prediction: Prediction | None = field(default=None, compare=False)
    reasons: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():  # a plan makes hundreds of these
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 1 << 31:
                raise ArgumentError(f"FusedConfig.{name} is {value!r}; expected an integer from {least} below 2**31")
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            least = 1 if name == "block_m" and platform.interpreting() else 16  # as tensor cores take them
            if value < least or value & (value - 1):
                raise ArgumentError(f"FusedConfig.{name} is {value!r}; expected a power of two from {least}")
        shallow = min(self.block_m, self.block_n, self.block_k)
        if self.block_m * self.block_n * self.block_k // shallow > MOST_ELEMENTS:
            raise ArgumentError(
                f"FusedConfig.block_m, block_n and block_k are {self.block_m}, {self.block_n} and {self.block_k}; "
                f"expected products of any two up to 2**20"
            )
        if self.num_warps & (self.num_warps - 1) or self.num_warps > 32:
            raise ArgumentError(f"FusedConfig.num_warps is {self.num_warps}; expected a power of two up to 32")
        if type(self.warp_specialised) is not bool:
            raise ArgumentError(f"FusedConfig.warp_specialised is {self.warp_specialised!r}; expected True or False")
        if type(self.kernel) is not str:
            raise ArgumentError(f"FusedConfig.kernel is {self.kernel!r}; expected a kernel's name, or ''")
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError(f"FusedConfig.algorithm is {self.algorithm!r}; expected one of {ALGORITHMS}")
        tile = min(self.block_m, self.block_n), max(self.block_m, self.block_n)
        warps = (4, 8) if tile[0] * tile[1] <= 128 * 128 else (8,)
        if self.warp_specialised and (
            tile[0] < 64 or tile[1] > 256 or self.num_warps not in warps or self.num_stages < 2
        ):
            raise ArgumentError(
                f"FusedConfig.warp_specialised is True with tiles of {self.block_m} x {self.block_n}, {self.num_warps} "
                f"warps, {self.num_stages} stages; expected tiles of 64 to 256 rows and columns, "
                f"{' or '.join(map(str, warps))} warps, 2 stages or more"
            )
        ring = self.num_stages * (self.block_m + self.block_n) * self.block_k
        nbytes = 2 * (ring + self.finished)
        if self.warp_specialised and nbytes > SHARED_BYTES:
            raise ArgumentError(
                f"FusedConfig.warp_specialised is True with blocks of {self.block_m} x {self.block_n} x {self.block_k} "
                f"in {self.num_stages} stages and finished tiles, {nbytes} bytes of "
                f"shared memory; expected at most {SHARED_BYTES}"
            )

    def validate(self, world_size: int | None = None) -> None:
        """Check the configuration.

        The constructor has checked the fields that have a use here. This also checks the ones that have none, such as
        `all_reduce_variant`, as ROCm/iris does.

        Args:
            world_size: the number of ranks, to check what depends on it; None skips that.

        Raises:
            ArgumentError: for a field or a combination of fields that no kernel supports.
        """
        self.__post_init__()
        if world_size is not None and (type(world_size) is not int or world_size < 1):
            raise ArgumentError(f"FusedConfig.validate: world_size is {world_size!r}; expected a positive integer")
        for name in ("num_xcds", "chunk_size", "all_reduce_num_rings", "reduce_num_sms"):
            value = vars(self).get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise ArgumentError(f"FusedConfig.{name} is {value!r}; expected a positive integer")
        variant = vars(self).get("all_reduce_variant")
        if variant is not None and variant not in ALL_REDUCE_VARIANTS:
            raise ArgumentError(f"FusedConfig.all_reduce_variant is {variant!r}; expected one of {ALL_REDUCE_VARIANTS}")
        if variant == "ring" and world_size is not None and self.block_n % world_size:
            raise ArgumentError(
                f"FusedConfig.block_n is {self.block_n} with the variant 'ring' and {world_size} ranks; expected a "
                f"multiple of the ranks"
            )

    def depth(self, itemsize: int) -> int:
        """Return the elements of a block along K: `block_k`, or twice as many of one-byte operands, in the same
        room.

        Args:
            itemsize: bytes of an element of A or B.
        """
        return 2 * self.block_k if itemsize == 1 else self.block_k

    @property
    def finished(self) -> int:
        """Return the elements of the finished tiles that a warp-specialised program has room for."""
        places = 2 if self.algorithm == "one_shot" else 1  # (`lamport_pair.py`)
        return places * self.block_m * self.block_n

    @property
    def lamport(self) -> bool:
        """Return whether the algorithm uses Lamport values, which are for few rows."""
        return self.algorithm in ("one_shot", "two_shot")

    def explain(self) -> str:
        """Return the reasons for this choice, one a line."""
        return "\n".join(self.reasons) or "given by the caller"


MOST_ELEMENTS = 1 << 20  # of a block, Triton's
# What warp-specialised programs have on Hopper for operands and a tile; a little more is for what says where they
# stand.
SHARED_BYTES = 226 << 10
# Of the fields that are numbers, the least that they may be.
_LEAST = {f.name: 0 if f.name in ("num_programs", "stagger_us") else 1 for f in fields(FusedConfig) if f.type == "int"}
