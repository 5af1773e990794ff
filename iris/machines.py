"""Describe devices for planners: rates, latencies and what kernels can do, all in one table.

Each `Machine` says where its numbers come from. A GPU that is not in the table gets the H200's rates, scaled by its
multiprocessors. Rates that `iris-tp calibrate` measured on this machine (`rates.py`) replace those of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
import hashlib
from typing import Any

import torch

from . import platform, rates

INTERPRETER = "interpreter"
HOPPER = "hopper"


@dataclass(frozen=True)
class LinkRates:
    """Rates for the model of collectives; measured on an H200 of an NVLink host."""

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
    """From this number of megabytes on, values take twice as long: they leave the cache before they are polled."""
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
    name: str = ""
    """The device's."""
    source: str = "estimated"
    """Where the rates come from, for people."""


# Hops are a switch of processes, and each operation of a kernel costs more than its data.
_INTERPRETED = LinkRates(
    1, 1.0, 0.8, 0.8, 0.8, 100.0, 2000.0, 2000.0, 4000.0, 2000.0, interpreted=True, name=INTERPRETER
)
H200_LINK_GBS = 380.0  # to which `LinkRates` belong


@dataclass(frozen=True)
class Machine:
    """Rates of one device; `source` says where they come from."""

    name: str
    num_programs: int
    """Programs that run at once: multiprocessors."""
    tflops: float
    """bf16 products of the whole chip at large tiles."""
    hbm_gbs: float
    link_gbs: float
    """To all peers together, each way."""
    launch_us: float
    hop_us: float
    """Store, signal and poll between two devices."""
    exchange_us: float
    """Data that says itself that it has arrived (`iris/device/lamport.py`): store and poll."""
    shared_bytes: int
    """A program's shared memory, at most."""
    architecture: str = ""
    """The folder below `iris_ops/kernels` of the warp-specialised kernels that run here; "" if none do."""
    source: str = "of the data sheet, not measured; iris-tp calibrate measures them"
    """Where the rates come from, for people."""
    library_tflops: float | None = None
    """bf16 products of torch, of the whole chip; None: as `tflops`."""
    fp32_tflops: float | None = None
    """float32 products of our kernels, of the whole chip; None: an H200's share of `tflops`."""
    collectives: LinkRates | None = None
    """Measured rates of collectives; None: an H200's, by this device's link."""

    @property
    def digest(self) -> str:
        """Return a text that is equal on ranks whose plans are equal."""
        return hashlib.sha256(repr(replace(self, source="")).encode()).hexdigest()[:12]

    @property
    def warp_specialised(self) -> bool:
        """Return whether warps of a program can be given different work (`pipeline.py`)."""
        return self.architecture != ""

    @property
    def links(self) -> LinkRates:
        """Return the rates of collectives: measured ones, or an H200's by this device's link."""
        if self.collectives:
            return self.collectives
        if self.name == INTERPRETER:
            return _INTERPRETED
        share = self.link_gbs / H200_LINK_GBS
        scaled = {
            name: share * getattr(LinkRates, name) for name in ("link_gbs", "lamport_gbs", "pair_gbs", "two_hops_gbs")
        }
        resident = 1 if self.name.startswith("AMD") else 2
        return LinkRates(self.num_programs, **scaled, resident=resident, name=self.name, source=self.source)

    def product_tflops(self, itemsize: int) -> float:
        """Return the TFLOP/s of our kernels on the whole chip with large tiles, for operands of `itemsize` bytes."""
        if itemsize == 4 and self.fp32_tflops:
            return self.fp32_tflops
        return self.tflops * _SHARES[itemsize]

    def stages(self, block_bytes: int) -> int:
        """Return the number of pipeline stages of `block_bytes` that fit; fewer than two count as none."""
        if self.name in _GFX942:  # one of them is in registers; later chips load all to shared memory
            return self.shared_bytes // block_bytes + 1
        return (self.shared_bytes - _BARRIER_BYTES) // block_bytes


# The rate of products by the bytes of an operand, over that of two bytes. float32 takes no tensor cores.
_SHARES = {1: 1.85, 2: 1.0, 4: 0.0136}
_GFX942 = ("AMD Instinct MI300X", "AMD Instinct MI325X")
_MACHINES = {
    # One H200 of an NVLink host, torch 2.11, triton 3.6: benchmarks/results.
    "NVIDIA H200": Machine(
        "NVIDIA H200", 132, 740.0, 4300.0, 380.0, 3.2, 5.5, 1.6, 227 << 10, HOPPER, "measured on H200s"
    ),
    # Data sheet values scaled by what the H200 reaches of its own. Of 137 rows measured between two H100s none is
    # further than a fifth from what is predicted, 6 % in the mean.
    "NVIDIA H100": Machine(
        "NVIDIA H100",
        132,
        700.0,
        3000.0,
        380.0,
        3.2,
        6.5,
        1.6,
        227 << 10,
        HOPPER,
        "of the data sheet, checked on two H100s",
    ),
    # Data sheets (bf16 without sparsity, memory, NVLink each way), times what an H200 reaches of its own: 0.75, 0.9 and
    # 0.84. The fixed times are the H100's. None of these was measured.
    "NVIDIA A100-SXM4-80GB": Machine("NVIDIA A100-SXM4-80GB", 108, 234.0, 1830.0, 253.0, 3.2, 6.5, 1.6, 163 << 10),
    "NVIDIA A100-SXM4-40GB": Machine("NVIDIA A100-SXM4-40GB", 108, 234.0, 1400.0, 253.0, 3.2, 6.5, 1.6, 163 << 10),
    "NVIDIA H20": Machine("NVIDIA H20", 78, 111.0, 3600.0, 380.0, 3.2, 6.5, 1.6, 227 << 10, HOPPER),
    "NVIDIA H800": Machine("NVIDIA H800", 132, 700.0, 3000.0, 169.0, 3.2, 6.5, 1.6, 227 << 10, HOPPER),
    "NVIDIA B200": Machine("NVIDIA B200", 148, 1690.0, 7200.0, 760.0, 3.2, 6.5, 1.6, 227 << 10),
    "AMD Instinct MI300X": Machine("AMD Instinct MI300X", 304, 600.0, 4000.0, 300.0, 5.0, 6.0, 3.0, 64 << 10),
    "AMD Instinct MI325X": Machine("AMD Instinct MI325X", 304, 600.0, 4500.0, 300.0, 5.0, 6.0, 3.0, 64 << 10),
    "AMD Instinct MI350X": Machine("AMD Instinct MI350X", 256, 1000.0, 6000.0, 350.0, 5.0, 6.0, 3.0, 160 << 10),
    "AMD Instinct MI355X": Machine("AMD Instinct MI355X", 256, 1090.0, 6000.0, 350.0, 5.0, 6.0, 3.0, 160 << 10),
}
# What devices call themselves, where that is not the name above: the H100 of NVLink hosts.
_OTHER_NAMES = {"NVIDIA H100 80GB HBM3": "NVIDIA H100"}
# Of shared memory, what is for barriers.
_BARRIER_BYTES = 1 << 10


def machine_named(name: str, num_programs: int) -> Machine:
    """Return the rates of a device by its name; for an unknown name, the H200's scaled by its multiprocessors.

    An unknown device is assumed to have little shared memory, until the device itself reports its size.
    """
    name = _OTHER_NAMES.get(name, name)
    if name in _MACHINES:
        return _MACHINES[name]
    if name == INTERPRETER:
        return Machine(INTERPRETER, 1, 0.05, 1.0, 1.0, 2000.0, 5000.0, 5000.0, 1 << 40, source="estimated")
    scale = num_programs / 132
    source = "an H200's, scaled by the number of multiprocessors"
    return Machine(name, num_programs, 740.0 * scale, 4300.0 * scale, 380.0, 3.2, 6.5, 1.6, 64 << 10, source=source)


def calibrated(machine: Machine) -> Machine:
    """Return `machine` with the rates of the user's table, if there is one for it.

    Raises `PlatformError` for a table that cannot be used.
    """
    if (stored := rates.read(machine.name, machine.num_programs)) is None:
        return machine
    table, path = stored
    own: dict[str, Any] = {**table.rates, "source": table.source(path)}
    shared: dict[str, Any] = {**table.collectives, "source": table.source(path)}
    return replace(machine, **own, collectives=replace(machine.links, **shared))


def machine_at(device: torch.device) -> Machine:
    """Return the rates of `device`, measured ones if there are any, without what its kernels can do."""
    if device.type == "cpu":
        return calibrated(machine_named(INTERPRETER, 1))
    properties = torch.cuda.get_device_properties(device)
    return calibrated(machine_named(properties.name, properties.multi_processor_count))


@cache
def machine_of(device: torch.device) -> Machine:
    """Return the rates with which `overlap_model.py` predicts times on `device`.

    Raises `PlatformError` for a table of measured rates that cannot be used.
    """
    known = machine_at(device)
    if device.type == "cpu":
        return known
    # a Hopper GPU under any name, and whatever another one has room for
    architecture = HOPPER if platform.has_warp_specialisation(device) else ""
    return replace(known, architecture=architecture, shared_bytes=platform.shared_bytes(device))
