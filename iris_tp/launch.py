"""Ranks for the demo and the examples: processes of this machine, or those of a launcher.

`run(rank_main, ranks, *args)` calls `rank_main(*args)` once per rank with torchrun's environment set, so that a rank
needs only `iris.iris()`. The first rank that fails ends the others, and `run` raises: nothing waits for a dead rank.

Without GPUs one server imports what every rank needs, and ranks are forked from it: importing torch and transformers
takes seconds of a core for each. A process of CUDA cannot be forked, so with GPUs each rank begins anew.
"""

from collections.abc import Callable, Iterator
import contextlib
from multiprocessing import forkserver
import os
from pathlib import Path
from typing import Any

from iris import launchers, platform
from iris.errors import IrisError
import torch
from torch import distributed, multiprocessing
from torch.distributed import TCPStore

from .arguments import MOST_RANKS

_FAILED, _UNREAD = ".failed", ".unread"


class RankError(Exception):
    """A rank ended with a typed error: its class and message."""


def default_ranks(on_cpu: int = 3) -> int:
    """Return the number of GPUs, up to 4; without a GPU, and where ranks share GPUs, `on_cpu`."""
    if launchers.adopt():
        return int(os.environ["WORLD_SIZE"])
    exclusive = torch.cuda.is_available() and not platform.sharing_gpus()
    return min(torch.cuda.device_count(), 4) if exclusive else on_cpu


def check_ranks(ranks: int) -> None:
    """Raise `ValueError` if this machine is too small for `ranks` ranks."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: expected at least 1")
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks is {ranks}: expected at most {MOST_RANKS}, because ranks share one host")
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < ranks and not platform.sharing_gpus():
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs and this machine has {gpus}: use at most {gpus}, let them take "
            f"turns with {platform.ENV_SHARE_GPUS}=1, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPUs"
        )


def run(rank_main: Callable[..., None], ranks: int | None = None, *args: Any) -> None:
    """Run `rank_main(*args)` on every rank; return when all have ended, raise if one fails."""
    if launchers.adopt():
        rank_main(*args)
        return
    ranks = default_ranks() if ranks is None else ranks
    check_ranks(ranks)
    with started(rank_main, ranks, *args) as context:
        while not context.join():
            pass


@contextlib.contextmanager
def reporting(results: Path) -> Iterator[None]:
    """Write a typed error of this rank into the folder `results`, for `run_reporting`, or that nobody reads stdout."""
    try:
        yield
    except BrokenPipeError:
        (results / _UNREAD).touch()
        raise
    except IrisError as error:
        (results / f"{os.getpid()}{_FAILED}").write_text(f"{type(error).__name__}: {error}")
        raise


def run_reporting(rank_main: Callable[..., None], ranks: int | None, results: Path, *args: Any) -> None:
    """Call `rank_main(results, *args)` on every rank. Raise `RankError` with the error that `reporting` wrote.

    Raises `BrokenPipeError` where the reader of a rank's stdout has closed it.
    """
    try:
        run(rank_main, ranks, results, *args)
    except (IrisError, multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        if (results / _UNREAD).exists():
            raise BrokenPipeError from error
        if reports := sorted(results.glob(f"*{_FAILED}"), key=lambda path: path.stat().st_mtime_ns):
            raise RankError(reports[0].read_text()) from error
        raise


@contextlib.contextmanager
def started(rank_main: Callable[..., None], ranks: int, *args: Any) -> Iterator[Any]:
    """Start the ranks' processes, to be joined; at the end of the block those that still run are killed."""
    # The parent hosts the ranks' rendezvous, as torchrun does: a port that is bound here cannot be taken by another.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    import_ahead(ranks)
    with _threads(ranks):
        given = ranks, store.port, dict(os.environ), rank_main, args
        context = multiprocessing.start_processes(_rank, given, nprocs=ranks, join=False, start_method=method)
    try:
        yield context
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def import_ahead(ranks: int, *modules: str) -> None:
    """Let the server of later ranks import `modules` and their own needs, in the background; not with GPUs."""
    if launchers.adopt() or torch.cuda.is_available():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["iris.device", *modules, f"{__package__}.preloaded"]
    )
    with _threads(ranks):
        forkserver.ensure_running()


@contextlib.contextmanager
def _threads(ranks: int) -> Iterator[None]:
    """Divide the cores among processes started in the block, without GPUs: numpy reads the variable at import."""
    name = "OMP_NUM_THREADS"
    if torch.cuda.is_available() or name in os.environ:
        yield
        return
    os.environ[name] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        yield
    finally:
        del os.environ[name]


def _rank(
    rank: int, ranks: int, port: int, environment: dict[str, str], rank_main: Callable[..., None], args: tuple
) -> None:
    os.environ.clear()  # a server keeps its own
    os.environ.update(environment)
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
