"""Compile a benchmark's kernels before it runs, on all cores at once and once for all ranks: `iris/launch/ahead.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class Ahead:
    """Kernels of several cases, compiled in the background in the order of the cases, while earlier ones are measured.

    Every rank makes one, with as many cases.
    """

    def __init__(self, team: Team, contexts: Iterable[iris.Iris], cases: Sequence[Callable[[], None]]) -> None:
        """Record the kernels of each case, which launches none of them, and begin to compile.

        Three cores of a rank's share are left to the rank, whose host must not be late.
        """
        self.team, contexts = team, list(contexts)
        forms: dict[str, ahead.Form] = {}
        ends = []  # by case: how many forms it and those before it need
        for case in cases:
            forms |= ahead.recorded(contexts, case)
            ends.append(len(forms))
        names: list[list[str]] = [[]] * team.world
        distributed.all_gather_object(names, list(forms))
        self.count = len({name for known in names for name in known})
        own, place = set(ahead.share_of(team.rank, names)), {name: number for number, name in enumerate(forms)}
        order = [name for name in forms if name in own]
        self.compilers = ahead.Compilers((os.cpu_count() or 1) // team.world - 3)
        self.compilers.add(forms[name] for name in order)
        self._ends = [sum(place[name] < end for name in order) for end in ends]

    def wait_for(self, case: int, seconds: float) -> bool:
        """Wait until the kernels of a case are compiled, on whichever rank; return False if some are not in time."""
        late = not self.compilers.wait_for(self._ends[case], seconds)
        return not self.team.slowest([late])[0]
