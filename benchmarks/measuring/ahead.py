"""Compiles what a benchmark launches before it runs: on all cores at once, and once for all ranks.

A kernel takes about a second to compile, and its ranks wait for each other. Here calls are made that launch nothing.
What they would have launched is divided among the ranks, which compile it in threads into Triton's cache on disk.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
import os
from unittest import mock

import iris
from iris.launch import relaunch
from iris.triton_private import FUSED
from iris_ops import launch as op_launches
from iris_tp.bench.team import Team
import triton


def compile_ahead(team: Team, contexts: Iterable[iris.Iris], calls: Callable[[], None]) -> int:
    """Compiles what `calls` of the `contexts` would launch, and launches nothing. Returns how many kernels that is.

    Of calls that take torch's product, or the copy engines, nothing is compiled.
    """
    found: dict[tuple, tuple] = {}

    def keep(kernels, device, kernel, grid, args, moving=(), **options):
        key = (kernel, *options.values(), *map(relaunch._specialization, args.values()))
        found.setdefault(key, (kernel, grid, {**args, **FUSED, **options}))

    nothing = dict.fromkeys(op_launches.PREPARERS, lambda *given: lambda: True)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(relaunch, "launch", keep))
        patches.enter_context(mock.patch.dict(op_launches.PREPARERS, nothing))
        calls()
    for ctx in contexts:
        ctx.ops.forget_launches()  # for nothing was launched
    # by the sizes that are the same on all ranks, so that no kernel is left to nobody
    names = sorted(found, key=lambda key: (key[0].fn.__qualname__, *map(str, key[1:])))
    own = [found[name] for name in names[team.rank :: team.world]]
    threads = max(1, (os.cpu_count() or 1) // team.world)
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
        for kernel, grid, args in own:
            kernel.run(grid=grid, warmup=True, **args)
    team.barrier()
    return len(found)
