"""`Way`: one way to compute a problem, as numbers. It names the module of its kernel and of the kernel's launcher.

A way is one object in `planning/ways/`, and one line of the table there. The engine (`iris/planning.py`) leaves out the
ways that object to a problem, and compares the times of the others' tiles. A new way overrides `tiles`, `together` and
`workspace`, and whatever else differs from the usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from iris import planning

from ..config import FusedConfig, Prediction
from . import orders
from .epilogues import Epilogue
from .needs import PLAIN
from .orders import Order
from .sums import ANY_ORDER, ROWS_ALIKE
from .tile_model import gemm_us
from .waves import codes_refused

if TYPE_CHECKING:
    from iris.machines import Machine

    from ..problem import Problem


class Sizes(NamedTuple):
    """The memory that a call needs of its workspace: int32 flags, bytes of staging memory, bytes of the exchange
    area."""

    flags: int = 0
    staging: int = 0
    exchange: int = 0


class Way(planning.Way):
    """A kernel, or a torch call, that computes ops: what it accepts, its tiles, its times and its memory. All ranks
    compute the same from equal arguments."""

    kernel: str
    """The kernel's name: its module below `iris_ops/kernels`, or below `iris_ops/` (`launch_names.py`)."""
    launcher: str
    """`module:function` below `iris_ops`, which names a launch's kernel, grid and arguments, or prepares several."""
    supports: str = ""
    """`module:function` that says why the kernel cannot load given tensors; empty where it loads all."""
    several_launches: bool = False
    """Whether `launcher` prepares a call of several launches."""
    follows: bool = False
    """Whether the kernel begins by `arch.follow`."""
    options: str = ""
    """`module:function` that gives more launch options, by the grid's programs, those that run at once, and the
    arguments."""
    algorithms: tuple[str, ...] = ("overlapped",)
    """Of `FusedConfig.algorithm`, those that this way has a form of."""
    warp_specialised: bool = False
    weights = frozenset((PLAIN,))
    sums = frozenset((ANY_ORDER, ROWS_ALIKE))
    fallback: str = ""
    """The kernel that sends the same to the same places where this one cannot load a rank's tensors."""

    def accepts(self, problem: Any, machine: Machine) -> str | None:
        """Return the reason why `problem` cannot be served, beyond its weights and sums; None if it can."""
        return None

    def objection(self, problem: Any, machine: Machine) -> str | None:
        """Return the reason why `problem` is not supported: its weights, its sums, or what `accepts` says; None if it
        is."""
        if problem.weights not in self.weights:
            return f"it multiplies no weights {problem.weights.name}"
        if problem.sums.kind not in self.sums:
            return f"its sums are {' or '.join(sorted(self.sums))}, not {problem.sums.kind}"
        return self.accepts(problem, machine)

    def refuses(self, problem: Any) -> str | None:
        """Return the reason why not even a user's configuration can serve `problem`; None if it can."""
        return None

    def refuses_config(self, problem: Any, config: FusedConfig, machine: Machine) -> str | None:
        """Return what is wrong with a user's `config` for this way, and what is expected; None of nothing."""
        codes = self.warp_specialised and problem.weights.widened_in_tiles
        return codes_refused(problem.weights, config) if codes else None

    def tiles(self, problem: Any, machine: Machine) -> Sequence[FusedConfig]:
        """Return the configurations to compare, each with this way's `kernel`."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the name that a trace shows where this way is not supported."""
        return self.kernel

    def fallback_for(self, problem: Any) -> str:
        """Return the kernel of this way's fallback, for a rank whose tensors it cannot load; "" if none."""
        return self.fallback

    def means(self, problem: Any, config: FusedConfig) -> bool:
        """Return whether a user's `config` selects this way. Of several, the last in the table counts."""
        alike = config.warp_specialised == self.warp_specialised
        return alike and problem.op in self.ops and config.algorithm in self.algorithms

    def predicted(self, problem: Any, config: FusedConfig, machine: Machine) -> Prediction:
        """Return `times` plus what runs in separate kernels: rounding, and an epilogue that this way does not fuse."""
        times, rest = self.times(problem, config, machine), 0.0
        if problem.epilogue not in self.fuses(problem, config):
            rest += problem.epilogue.us(problem, machine)
        if self.rounds_rows(problem):
            rest += problem.weights.rounding_us(problem.M, problem.K, machine)
        return replace(times, total_us=times.total_us + rest) if rest else times

    def times(self, problem: Any, config: FusedConfig, machine: Machine) -> Prediction:
        """Return the microseconds of the product, of the exchange, and of both with a launch."""
        product = self.product_us(problem, config, machine)
        link, total = self.together(problem, config, machine, product)
        return Prediction(product, link, total + machine.launch_us)

    def product_us(self, problem: Any, config: FusedConfig, machine: Machine) -> float:
        """Return the microseconds of one rank's product."""
        return gemm_us(problem, config, machine)

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        """Return the microseconds of (the exchange alone, product and exchange together), from those of the product."""
        raise NotImplementedError

    def workspace(self, problem: Any, config: FusedConfig, programs: int) -> Sizes:
        """Return what a call needs on a device on which `programs` run at once."""
        return Sizes()

    def order(self, problem: Any, config: FusedConfig, machine: Machine) -> Order | None:
        """Return the order in which a row's products are added; None where it depends on the number of rows."""
        return orders.of_tiles(problem, config, machine)

    def fuses(self, problem: Any, config: FusedConfig) -> tuple[Epilogue, ...]:
        """Return the epilogues that this way computes itself; any other runs in a separate kernel."""
        return ()

    def rounds_rows(self, problem: Any) -> bool:
        """Return whether rows of A are rounded to the weight's format in a kernel before this one."""
        return problem.weights.rounds_rows

    def writes_to_peers(self, problem: Any) -> bool:
        """Return whether the kernel stores into the peers' `out`, which must then lie on the heap."""
        return False

    def most_rows(self, problem: Any, config: FusedConfig) -> int:
        """Return how many rows one launch takes at most; more are computed in pieces, with the same bits."""
        return max(1, problem.M)

    def fallback_config(self, problem: Any, config: FusedConfig, machine: Machine) -> FusedConfig:
        """Return this way's configuration where it is the fallback of the way that `config` is for."""
        return config

    def label(self, problem: Any, config: FusedConfig) -> str:
        """Return the kernel and its form, as a plan's trace names a candidate."""
        label = f"{self.kernel} {config.block_m}x{config.block_n}x{config.depth(problem.itemsize)}"
        if config.lamport:
            label += f" {config.algorithm}, {config.num_warps} warps"
        return label + (f", {problem.weights.rounding}" if self.rounds_rows(problem) else "")
