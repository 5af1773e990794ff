"""Compile a benchmark's kernels before it runs, on all cores at once and once for all ranks: `iris/launch/ahead.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import os

import iris
from iris.launch import ahead
from iris_tp.bench.team import Team
from torch import distributed


def compile_ahead(team: Team, contexts: Iterable[iris.Iris], calls: Callable[[], None]) -> int:
    """Compile the kernels of `calls` of the `contexts` without launching them, and return their number.

    Other work of the calls, torch's products or copy engines, runs. Raises where a kernel cannot be compiled.
    """
    forms = ahead.recorded(list(contexts), calls)
    names: list[list[str]] = [[]] * team.world
    distributed.all_gather_object(names, list(forms))
    compilers = ahead.Compilers((os.cpu_count() or 1) // team.world - 1)  # one core runs this rank
    compilers.add(forms[name] for name in ahead.share_of(team.rank, names))

    def wait() -> None:
        compilers.wait()
        if compilers.errors:
            raise RuntimeError("; ".join(compilers.errors))

    _, reason = team.attempt(wait)
    if reason:
        raise RuntimeError(reason)
    return len({name for known in names for name in known})
