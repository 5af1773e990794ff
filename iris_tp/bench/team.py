"""Run ranks as processes, with one verdict on every step.

`launch(worker, args, ranks)` starts the ranks itself, or joins those that torchrun has started. A rank works through
its `Team`: its rank and device, a barrier, the slowest rank's figures, and `attempt`, which runs a step on every rank
and reports a failure to all of them. So a rival that raises drops out on all ranks and the run goes on.

Nothing waits for ever: our kernels time out first, so that an error names the one that waited in vain; then collectives
time out with the process group; and a rank that has made no step for a while prints its stack and ends, upon which the
parent ends the others.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
import faulthandler
import os
import re
import sys
import time
from typing import TypeVar

from iris import platform
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..launch import started

T = TypeVar("T")
STEP_SECONDS = 90
KERNEL_SECONDS = 20  # on a GPU; the wait of one of our kernels


@dataclass(frozen=True)
class Team:
    """This rank, its device and the number of ranks."""

    rank: int
    world: int
    device: torch.device
    own_process: bool = False
    """Whether the process is this rank's alone, and ends when the ranks hang."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Synchronise the ranks: on the GPU in stream order, without stopping the host."""
        dist.all_reduce(torch.ones(1, device=self.device))

    def slowest(self, values: list[float]) -> list[float]:
        """Return for each value the largest among the ranks."""
        worst = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.tolist()

    def attempt(self, step: Callable[[], T]) -> tuple[T | None, str | None]:
        """Run `step` on every rank; return its result, or on all ranks the reason why it failed on one of them."""
        if self.own_process:
            faulthandler.dump_traceback_later(STEP_SECONDS + 30, exit=True)
        result, reason = None, None
        try:
            result = step()
            self.synchronize()
        except Exception as error:  # any error of a rival: it becomes a note in the table
            reason = describe(error)
            self.synchronize()  # after a fault the device stays unusable, and then this rank ends here
        if not self.slowest([reason is not None])[0]:
            return result, None
        reasons: list[str | None] = [None] * self.world
        dist.all_gather_object(reasons, reason)
        return None, next(text for text in reasons if text)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def describe(error: Exception) -> str:
    """Return an error as one short line that can be published: no folders."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: " + re.sub(r"(?<![\w.])/\S+/", "", first)[:160]


def launch(worker: Callable[[Team, argparse.Namespace], None], args: argparse.Namespace, limit_s: float) -> int:
    """Run `worker(team, args)` on `args.ranks` ranks of `args.device`; return the exit code."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run(worker, args)
        return 0
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"--ranks {args.ranks}: expected at most {torch.cuda.device_count()}, a GPU each", file=sys.stderr)
        return 2
    deadline = time.monotonic() + limit_s
    try:
        with started(_run, args.ranks, worker, args) as context:
            while not context.join(timeout=1, grace_period=5):
                if time.monotonic() > deadline:
                    print(f"the ranks have not ended after {limit_s:.0f} s", flush=True)
                    return 1
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(error, flush=True)
        return 1
    return 0


def _run(worker: Callable, args: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(STEP_SECONDS + 60, exit=True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.device == "cuda":
        os.environ.setdefault(platform.ENV_TIMEOUT, str(KERNEL_SECONDS))
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(seconds=STEP_SECONDS), device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=STEP_SECONDS))
    worker(Team(rank, world, device, own_process=True), args)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
