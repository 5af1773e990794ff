"""Ranks for the demo and the examples: processes of this machine, or those that torchrun already started.

`run(rank_main, ranks, *args)` calls `rank_main(*args)` once per rank with torchrun's environment set, so that a rank
needs only `iris.iris()`. The first rank that fails ends the others, and `run` raises: nothing waits for a dead rank.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
from typing import Any

from iris import platform
import torch
from torch import distributed, multiprocessing
from torch.distributed import TCPStore


def default_ranks(most: int = 4, on_cpu: int = 3) -> int:
    """As many ranks as there are GPUs, up to `most`; without a GPU, and where ranks share GPUs, `on_cpu`."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    each_its_own = torch.cuda.is_available() and not platform.sharing_gpus()
    return min(torch.cuda.device_count(), most) if each_its_own else on_cpu


def check_ranks(ranks: int) -> None:
    """Raises if this machine cannot give each of `ranks` ranks what it needs."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: at least 1 is needed")
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < ranks and not platform.sharing_gpus():
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs and this machine shows {gpus}: ask for at most {gpus}, let them take "
            f"turns with {platform.ENV_SHARE_GPUS}=1, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPUs"
        )


def run(rank_main: Callable[..., None], ranks: int | None = None, *args: Any) -> None:
    """Runs `rank_main(*args)` on every rank and returns when all have; raises if one fails."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank_main(*args)
        return
    ranks = default_ranks() if ranks is None else ranks
    check_ranks(ranks)
    with started(rank_main, ranks, *args) as context:
        while not context.join():
            pass


@contextlib.contextmanager
def started(rank_main: Callable[..., None], ranks: int, *args: Any) -> Iterator[Any]:
    """The ranks' processes, to be joined; at the end of the block those that still run are killed."""
    # The parent serves the ranks' rendezvous, as torchrun does: a port that is bound here cannot be taken by another.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with _threads(None if torch.cuda.is_available() else max(1, len(os.sched_getaffinity(0)) // ranks)):
        context = multiprocessing.spawn(_rank, (ranks, store.port, rank_main, args), nprocs=ranks, join=False)
    try:
        yield context
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Processes started meanwhile use `count` threads. The interpreter computes in numpy, which asks at import."""
    name = "OMP_NUM_THREADS"
    if count is None or name in os.environ:
        yield
        return
    os.environ[name] = str(count)
    try:
        yield
    finally:
        del os.environ[name]


def _rank(rank: int, ranks: int, port: int, rank_main: Callable[..., None], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    rank_main(*args)
    if distributed.is_initialized():
        distributed.destroy_process_group()
