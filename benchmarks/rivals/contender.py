"""The interface of a benchmark's contender, and whether an optional one can be imported."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
import importlib.util
import os

from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch

OURS, RIVAL, GEMM = "ours", "rival", "gemm"


def everything(row: Row, world: int, dtype: torch.dtype) -> bool:
    return True


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str
    prepare: dict[str, Callable[[Inputs], Call]] = field(repr=False)
    supports: Callable[[Row, int, torch.dtype], bool] = field(default=everything, repr=False)
    plan: Callable[[Row], dict] | None = field(default=None, repr=False)  # what it chose for a row, for the record
    note: str | None = None  # what its result lacks, for the table
    capture: Callable[[], AbstractContextManager] = field(default=nullcontext, repr=False)  # in which a graph is made

    @property
    def alone(self) -> bool:
        """Return whether this is the product without the collective."""
        return self.kind == GEMM

    def takes(self, row: Row, world: int, dtype: torch.dtype) -> bool:
        return row.op in self.prepare and self.supports(row, world, dtype)


def installed(team: Team, module: str, name: str) -> bool:
    """Return whether a rival can be imported, and IRIS_WITHOUT does not name it; say so where it cannot."""
    if module in os.environ.get("IRIS_WITHOUT", "").split(","):
        team.say(f"without {name}: IRIS_WITHOUT names it")
    elif importlib.util.find_spec(module) is None:
        team.say(f"without {name}: it is not installed")
    else:
        return True
    return False
