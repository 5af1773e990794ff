"""How a collective is carried out: arithmetic on its size, the number of ranks and the machine's rates, no table.

So it is the same on every rank without talking. `plan` fills in what a `Config` leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..errors import ArgumentError
from .config import Config
from .problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem


@dataclass(frozen=True)
class Machine:
    """Rates of one device; measured on an H200 of an NVLink host."""

    num_programs: int
    """Programs that run at once."""
    link_gbs: float = 363.0
    """Stores to all peers together, each way."""
    lamport_gbs: float = 240.0
    """The same for Lamport values, which the receiver polls, reads and overwrites by the sentinel."""
    pair_gbs: float = 340.0
    """For Lamport values between two ranks, where sends and sums take turns."""
    two_hops_gbs: float = 335.0
    """For Lamport values in two hops between several peers, where one hop goes on beside the other."""
    lamport_mb: float = 100.0
    """Of so many megabytes the values take twice as long: they leave the cache before they are polled."""
    launch_us: float = 1.4
    hop_us: float = 1.5
    """A Lamport value: stored at the peer, seen by the peer."""
    signal_us: float = 3.6
    """A program's stores drained, its signal sent and seen."""
    enter_us: float = 1.4
    """A signal with nothing to drain."""
    resident: int = 1
    """Programs of the kernels here that share a multiprocessor, where one is to go on while another waits."""
    interpreted: bool = False


@dataclass(frozen=True)
class Plan:
    """What is launched. `block`: elements of a unit. `tile_n`, `group_m`: of a unit that is a tile. `chunk`: units
    between two signals. `rings`: 0 but for a ring.
    """

    variant: str
    protocol: str
    block: int
    programs: int
    num_warps: int
    interleaved: bool
    tile_n: int
    group_m: int
    chunk: int
    rings: int
    expected_us: float


def plan(problem: Problem, config: Config, machine: Machine) -> Plan:
    return _plan(problem, config, machine)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, config: Config, machine: Machine) -> Plan:
    candidates = [
        (_expected_us(problem, variant, protocol, machine), order, variant, protocol)
        for order, (variant, protocol) in enumerate(_candidates(problem, config))
    ]
    if not candidates:
        raise ArgumentError(_refusal(problem, config))
    us, _, variant, protocol = min(candidates)
    programs = min(config.comm_sms or machine.num_programs, machine.num_programs)
    shared = machine.resident if _shares_multiprocessors(problem, protocol) and not config.comm_sms else 1
    tile_m, tile_n = config.tile
    if problem.cols:
        block = tile_m * tile_n
    else:
        block, tile_n = config.block or _block(problem, variant, protocol, programs, machine), 0
    programs *= shared
    units = units_of(problem, variant, block, tile_n)
    per_lane, unit_bytes = -(-units // programs), block * problem.dtype.itemsize
    least, most = (max(1, nbytes // unit_bytes) for nbytes in _CHUNK_BYTES)
    chunk = min(max(-(-per_lane // _CHUNKS.get(problem.op, 1)), least), most, per_lane)
    work = units * (max(1, problem.world_size - 1) if variant not in WHOLE else 1)
    lanes = units if protocol == "flags" else work
    return Plan(
        variant=variant,
        protocol=protocol,
        block=block,
        programs=max(1, min(programs, lanes)),
        num_warps=_num_warps(block, protocol),
        interleaved=config.all_reduce_distribution == 0 and _has_owners(problem, variant),
        tile_n=tile_n,
        group_m=config.swizzle_size,
        chunk=chunk,
        rings=config.all_reduce_num_rings if variant == "ring" else 0,
        expected_us=us,
    )


# Variants of all_reduce in which nobody owns a part.
WHOLE = ("one_shot", "atomic", "spinlock")
# Into how many chunks a lane cuts its units, so that sums begin while others are pushed, and what it pushes to an owner
# between two signals, from and to: a signal costs about as much time as 8 KiB of the lane's share of the link.
_CHUNKS = {ALL_REDUCE: 2, REDUCE_SCATTER: 8}
_CHUNK_BYTES = 8 << 10, 64 << 10


def _candidates(problem: Problem, config: Config) -> list[tuple[str, str]]:
    """(variant, protocol) pairs that can serve the problem and are not excluded by the config."""
    if problem.op == ALL_REDUCE:
        found = [("one_shot", "lamport"), ("two_shot", "lamport"), ("two_shot", "flags")]
        wanted = config.all_reduce_variant
        if wanted in ("ring", "atomic", "spinlock"):  # never the fastest
            found = [(wanted, "flags")]
    else:
        found, wanted = [("two_shot", "lamport"), ("two_shot", "flags")], None
    if problem.dtype.itemsize > 4 and not problem.dtype.is_floating_point:
        found = [(variant, protocol) for variant, protocol in found if protocol == "flags"]  # no wider integers
    if problem.op == REDUCE_SCATTER and not _everyone_owns(problem):
        found = [(variant, protocol) for variant, protocol in found if protocol == "flags"]
    return [
        (variant, protocol)
        for variant, protocol in found
        if wanted in (None, variant) and config.protocol in (None, protocol)
    ]


def _refusal(problem: Problem, config: Config) -> str:
    """What is said where no variant and protocol that the config leaves can serve the problem."""
    given = {"all_reduce_variant": config.all_reduce_variant, "protocol": config.protocol}
    if problem.op != ALL_REDUCE:
        del given["all_reduce_variant"]
    said = " and ".join(f"config.{name} is {value!r}" for name, value in given.items() if value is not None)
    protocols = sorted({protocol for _, protocol in _candidates(problem, replace(config, protocol=None))})
    wanted = f"protocol {protocols[0]!r} or None" if protocols else "another all_reduce_variant or None"
    return (
        f"{problem.op}: {said}, which cannot serve {problem.dtype} with {problem.world_size} ranks; expected {wanted}"
    )


def _everyone_owns(problem: Problem) -> bool:
    """Whether every rank has part of a reduce-scatter: a rank without one waits for nothing, and would run ahead."""
    return not problem.cols and problem.part * (problem.world_size - 1) < problem.n


def _expected_us(problem: Problem, variant: str, protocol: str, machine: Machine) -> float:
    w, nbytes = problem.world_size, problem.nbytes
    others = w - 1
    if problem.op == ALL_REDUCE:
        hops, sent = (1, others * nbytes) if variant == "one_shot" else (2, 2 * others * nbytes / w)
    else:
        hops, sent = 1, others * (nbytes if problem.op == ALL_GATHER else nbytes / w)
    if w == 1:
        return machine.launch_us
    if variant == "ring":
        return machine.launch_us + 2 * others * machine.signal_us + 1.5 * sent / (machine.link_gbs * 1e3)
    if variant in ("atomic", "spinlock"):
        sums = others * problem.n * 4
        return machine.launch_us + machine.signal_us + sums / (machine.link_gbs * 1e3)
    if protocol == "lamport":
        moved = sent * (1 if problem.reduces and problem.dtype.is_floating_point else 2)
        lamport_gbs = machine.lamport_gbs if hops == 1 else machine.two_hops_gbs
        if others == 1:
            lamport_gbs = machine.pair_gbs
        else:
            moved *= 1 + moved / (machine.lamport_mb * 1e6)
        return machine.launch_us + hops * machine.hop_us + moved / (lamport_gbs * 1e3)
    enter = 0.0 if problem.reduces else machine.enter_us
    # the sums of a reduce-scatter hide less behind the stores
    link_gbs = machine.link_gbs * (0.85 if problem.op == REDUCE_SCATTER else 1.0)
    return machine.launch_us + enter + hops * machine.signal_us + sent / (link_gbs * 1e3)


def _shares_multiprocessors(problem: Problem, protocol: str) -> bool:
    """Whether two programs share a multiprocessor, so that one sums while the other stores.

    Not in an all-reduce by flags: its sums are stored to everyone, and the links are busy all the time as it is.
    """
    if protocol == "lamport":
        return problem.world_size == 2
    return problem.op == REDUCE_SCATTER and problem.nbytes >= problem.world_size << 22


def _has_owners(problem: Problem, variant: str) -> bool:
    """Whether whose part is what is ours to decide."""
    return (problem.op == ALL_REDUCE and variant not in WHOLE) or problem.cols > 0


def part_of(problem: Problem, variant: str) -> int:
    """Elements of the largest part."""
    if problem.part:
        return problem.part
    if variant in WHOLE:
        return problem.n
    return -(-problem.n // (16 * problem.world_size)) * 16  # whole vectors


def units_of(problem: Problem, variant: str, block: int, tile_n: int = 0) -> int:
    """Units of the largest part."""
    if problem.cols:
        tile_m, rows = block // tile_n, problem.n // problem.cols
        return -(-(-(-rows // tile_m) * -(-problem.cols // tile_n)) // problem.world_size)
    return -(-part_of(problem, variant) // block)


def _block(problem: Problem, variant: str, protocol: str, programs: int, machine: Machine) -> int:
    """Many units where there are few elements, for many programs; large ones where there are many."""
    itemsize = problem.dtype.itemsize
    if machine.interpreted:
        return 1 << max(4, min(14, (part_of(problem, variant) - 1).bit_length()))
    if protocol == "flags":
        least, most = 4096 // itemsize, 16384 // itemsize
    else:
        least, most = 256, 4096 // itemsize
    # by flags a program takes one unit of every part at a time; by Lamport values one at all
    sharers = 2 if protocol == "flags" else problem.world_size / 2
    block = most
    while block > least and units_of(problem, variant, block) * sharers < programs:
        block //= 2
    return block


def _num_warps(block: int, protocol: str) -> int:
    if protocol == "flags":
        return 8 if block >= 2048 else 4
    return max(1, min(8, block // 256))


def machine_of(device: torch.device, num_programs: int) -> Machine:
    if device.type == "cpu":
        # hops are a switch of processes, and each operation of a kernel costs more than its data
        return Machine(
            num_programs=1, link_gbs=1.0, lamport_gbs=0.8, two_hops_gbs=0.8, launch_us=2000.0, hop_us=2000.0,
            pair_gbs=0.8, signal_us=4000.0, enter_us=2000.0, interpreted=True,
        )  # fmt: skip
    return Machine(num_programs, resident=1 if torch.version.hip else 2)
